"""Tiles of a batch that a process reads from a source of its own, ahead of the step."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.arrays.sourced_leaf import SourcedLeaf, checked_leaf
from autopar.runtime.ray.transport import pickling
from autopar.runtime.ray.transport.routes import Box, slices

_KEPT = 2
"""Sources that a process keeps: one to train, one to evaluate."""


@dataclass(frozen=True)
class SourcedTiles:
    """What `Message.given` says of such a leaf.

    Args:
      data: the source as bytes; they are few, so every message has them.
      number: of the batch.
      leaf: its number in the batch.
      boxes: the tiles that the process holds.
      shape, dtype: of the whole leaf.
    """

    data: bytes
    number: int
    leaf: int
    boxes: tuple[Box, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, leaf: SourcedLeaf, boxes: tuple[Box, ...]) -> SourcedTiles:
        """The tiles of a leaf."""
        return cls(leaf.data, leaf.number, leaf.leaf, boxes, leaf.shape, leaf.dtype)

    def read(self) -> tuple[np.ndarray, ...]:
        """The tiles, in the order of the boxes.

        Raises:
          ValueError: the batch is not as it shall be.
          Exception: whatever the source raises.
        """
        leaves = _reader(self.data).batch(self.number)
        whole = checked_leaf(leaves, self.number, self.leaf, self.shape, self.dtype)
        return tuple(np.asarray(whole[slices(box)], order="C") for box in self.boxes)


class _Reader:
    """A source of this process, and its next batch, which a thread reads meanwhile."""

    def __init__(self, data: bytes):
        self._source = pickling.loads(data)
        self._thread = ThreadPoolExecutor(1, "autopar source")
        self._batches: dict[int, Future[list[Any]]] = {}

    def batch(self, number: int) -> list[Any]:
        """The leaves of a batch."""
        for wanted in (number, number + 1):
            if wanted not in self._batches and (wanted == number or wanted < len(self._source)):
                self._batches[wanted] = self._thread.submit(self._read, wanted)
        for known in self._batches.keys() - {number, number + 1}:
            del self._batches[known]
        try:
            return self._batches[number].result()
        except BaseException:
            del self._batches[number]  # the next call may have more luck
            raise

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False)

    def _read(self, number: int) -> list[Any]:
        return jax.tree.leaves(self._source[number])


_readers: OrderedDict[bytes, _Reader] = OrderedDict()


def _reader(data: bytes) -> _Reader:
    key = hashlib.sha256(data).digest()
    if key not in _readers:
        _readers[key] = _Reader(data)
        while len(_readers) > _KEPT:
            _readers.popitem(last=False)[1].close()
    _readers.move_to_end(key)
    return _readers[key]
