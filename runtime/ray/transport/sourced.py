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
        reader, shape, boxes = _reader(self.data), self.shape, self.boxes
        rows: Rows | None = None
        if reader.has_rows and shape and boxes:
            first, last = min(box[0][0] for box in boxes), max(box[0][1] for box in boxes)
            rows, shape = (first, last), (last - first, *shape[1:])
            boxes = tuple(((a - first, b - first), *rest) for (a, b), *rest in boxes)
        leaves = reader.batch(self.number, rows)
        found = checked_leaf(leaves, self.number, self.leaf, shape, self.dtype)
        return tuple(np.asarray(found[slices(box)], order="C") for box in boxes)


Rows = tuple[int, int]
"""The first row and the last one + 1."""


class _Reader:
    """A source of this process, and its next batch, which a thread reads meanwhile.

    Of a source that has `rows(number, first, last)`, only the rows that are asked for.
    """

    def __init__(self, data: bytes):
        self._source = pickling.loads(data)
        self._thread = ThreadPoolExecutor(1, "autopar source")
        self._batches: dict[tuple[int, Rows | None], Future[list[Any]]] = {}

    @property
    def has_rows(self) -> bool:
        """Whether a part of a batch can be read."""
        return callable(getattr(self._source, "rows", None))

    def batch(self, number: int, rows: Rows | None = None) -> list[Any]:
        """The leaves of a batch, or these rows of them."""
        for wanted in (number, number + 1):
            is_there = wanted == number or wanted < len(self._source)
            if (wanted, rows) not in self._batches and is_there:
                self._batches[wanted, rows] = self._thread.submit(self._read, wanted, rows)
        for known in [key for key in self._batches if key[0] not in (number, number + 1)]:
            del self._batches[known]
        try:
            return self._batches[number, rows].result()
        except BaseException:
            del self._batches[number, rows]  # the next call may have more luck
            raise

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False)

    def _read(self, number: int, rows: Rows | None) -> list[Any]:
        source = self._source
        return jax.tree.leaves(source[number] if rows is None else source.rows(number, *rows))


_readers: OrderedDict[bytes, _Reader] = OrderedDict()


def _reader(data: bytes) -> _Reader:
    key = hashlib.sha256(data).digest()
    if key not in _readers:
        _readers[key] = _Reader(data)
        while len(_readers) > _KEPT:
            _readers.popitem(last=False)[1].close()
    _readers.move_to_end(key)
    return _readers[key]
