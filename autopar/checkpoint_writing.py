"""A checkpoint that is being written while the next steps run, and what is left at the end.

Its leaves are stored by their paths, each in its own dtype.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from autopar.arrays.ray_array import Keeper, RayArray
from autopar.arrays.split_array import SplitArray
from autopar.base.errors import AutoparError, CheckpointError
from autopar.runtime.checkpoint_files import (
    LostItem,
    StoredLeaf,
    StoredPiece,
    commit,
    keep_last,
    write_item,
)
from autopar.runtime.ray.transport.host_tiles import host_numbers

logger = logging.getLogger("autopar")

_DRIVER = "driver"
_POLL_SECONDS = 1.0
_SILENT_SECONDS = 5.0

PYTHON = {bool: "Python bool", int: "Python int", float: "Python float", complex: "Python complex"}
"""Python numbers, and their dtypes as they are stored."""


class WritingCheckpoint:
    """A checkpoint that is being written."""

    def __init__(
        self,
        folder: Any,
        step: int,
        paths: Sequence[str],
        leaves: Sequence[Any],
        extra: Any,
        keep: int,
    ):
        self._folder, self._step, self._extra, self._keep = folder, step, extra, keep
        self._paths = paths
        self._error: BaseException | None = None
        self._is_done = False
        self._described = [(tuple(np.shape(x)), dtype_name(x)) for x in leaves]
        groups: dict[int, tuple[Keeper, list[int]]] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, RayArray):
                groups.setdefault(id(leaf.keeper), (leaf.keeper, []))[1].append(index)
        self._parts = [
            (keeper, indices, keeper.save([leaves[i] for i in indices], folder, f"plan_{number}"))
            for number, (keeper, indices) in enumerate(groups.values())
        ]
        own = {i: x for i, x in enumerate(leaves) if not isinstance(x, RayArray)}
        # Each in its own dtype, also where JAX would use a smaller one.
        own |= {i: host_numbers(x) for i, x in own.items() if isinstance(x, jax.Array | SplitArray)}
        self._copies = {str(i): np.array(x) for i, x in own.items()}

    def start(self) -> None:
        """Write in the background."""
        _at_exit()
        self._tries = self._told()
        self._thread = threading.Thread(target=self._run, daemon=True)
        _unfinished.add(self)
        self._thread.start()

    def is_silent(self) -> bool:
        """Whether it is still being written after some seconds."""
        self._thread.join(_SILENT_SECONDS)
        return self._thread.is_alive()

    def __str__(self) -> str:
        return f"the checkpoint of step {self._step} in {self._folder.parent}"

    def finish(self) -> None:
        """Wait for the end, and meanwhile see that actors are alive."""
        try:
            while not self._is_done:
                self._thread.join(_POLL_SECONDS)
                is_alive = self._thread.is_alive()
                for keeper, _, saving in self._parts:
                    if not saving.is_done:
                        keeper.ping()  # a step before may have failed; new actors are told again
                if self._error is not None:
                    raise self._error
                if not is_alive and not self._is_done:
                    if self._tries == self._told():
                        raise CheckpointError(
                            f"The state of step {self._step} was lost before it could be saved.",
                            where=str(self._folder),
                            why="the step that was to make it failed.",
                        )
                    self.start()
        finally:
            _unfinished.discard(self)

    def _told(self) -> list[int]:
        """How often actors were told to write."""
        return [saving.tries for _, _, saving in self._parts]

    def _run(self) -> None:
        try:
            for _, _, saving in self._parts:
                saving.wait()
            self._write()
            self._is_done = True
            _unfinished.discard(self)
        except LostItem:
            return  # who waits sees to it
        except AutoparError as error:
            self._error = error
        except Exception as error:
            self._error = CheckpointError(
                f"The checkpoint of step {self._step} cannot be written.",
                where=str(self._folder),
                why=f"{type(error).__name__}: {error}",
            )
        # What is left to say shall not keep arrays and actors.
        self._copies, self._parts = {}, []

    def _write(self) -> None:
        pieces: dict[int, tuple[StoredPiece, ...]] = {}
        for _, indices, saving in self._parts:
            pieces.update(zip(indices, saving.pieces, strict=True))
        written = {name: array for name, array in self._copies.items() if array.size}
        if written:
            write_item(self._folder / _DRIVER, written)
        for name in written:
            index = int(name)
            pieces[index] = (StoredPiece(_DRIVER, name, (0,) * len(self._described[index][0])),)
        leaves = [
            StoredLeaf(path, shape, dtype, pieces.get(index, ()))
            for index, (path, (shape, dtype)) in enumerate(
                zip(self._paths, self._described, strict=True)
            )
        ]
        commit(self._folder, self._step, leaves, self._extra)
        keep_last(self._folder.parent, self._keep)


_unfinished: set[WritingCheckpoint] = set()
os.register_at_fork(after_in_child=_unfinished.clear)


@functools.cache
def _at_exit() -> None:
    """Let the process end when all is written.

    What `atexit` calls comes too late for Orbax, which is imported by now: thread pools take no
    more work by then. `threading` has no public name for what comes before (bpo-39812).
    """
    try:
        threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError) as error:  # it has gone, or the process ends now
        logger.warning("Call wait(): the process may end before a checkpoint is whole (%s).", error)


def _finish_all() -> None:
    """What is left to write; whoever could be told of an error is gone."""
    for writing in tuple(_unfinished):
        try:
            if writing.is_silent():
                logger.warning("Before this process ends, %s is completed.", writing)
            writing.finish()
        except Exception as error:
            logger.error("%s", error)


def flat(state: Any) -> tuple[list[str], list[Any]]:
    """The paths of the leaves of a tree, and the leaves."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(state)
    return [jax.tree_util.keystr(path) for path, _ in pairs], [leaf for _, leaf in pairs]


def check_leaf(path: str, leaf: Any) -> None:
    """See that a leaf can be saved.

    Raises:
      CheckpointError: it was consumed, or is of no kind that is saved.
    """
    if isinstance(leaf, (jax.Array, SplitArray, RayArray)):
        if leaf.is_deleted():
            raise CheckpointError(
                "A leaf of the state was consumed, so it cannot be saved.",
                where=path,
                hint="save the state that the last call of the step returned.",
            )
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise CheckpointError(
                "A leaf of the state lies on devices of other processes.",
                where=path,
                why="autopar's checkpoints are written by one process, or by the actors of "
                "runtime='ray'.",
                hint="orbax.checkpoint.StandardCheckpointer, called by all processes, writes what "
                "each of them holds.",
            )
        return
    is_known = type(leaf) in PYTHON or isinstance(leaf, (np.ndarray, np.generic))
    if not is_known or np.asarray(leaf).dtype == np.dtype(object):
        raise CheckpointError(
            f"A leaf of the state is a {type(leaf).__name__}, which cannot be saved.",
            where=path,
            why="leaves are arrays, PRNG keys and numbers of up to 64 bits.",
        )


def dtype_name(leaf: Any) -> str:
    """The name of a leaf's dtype as it is stored."""
    return PYTHON.get(type(leaf)) or str(leaf.dtype.name)
