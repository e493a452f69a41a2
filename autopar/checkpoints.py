"""`Checkpoints`: states in files, by parameter path, written while the next steps run."""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core.primitives import convert_element_type_p

from autopar.arrays.ray_array import Keeper, RayArray, key_implementation
from autopar.arrays.split_array import SplitArray, put
from autopar.base.errors import AutoparError, CheckpointError
from autopar.runtime.checkpoint_files import (
    LostItem,
    StoredLeaf,
    StoredPiece,
    begin,
    commit,
    keep_last,
    name_of,
    orbax,
    read_contents,
    read_item,
    steps_in,
    write_item,
)
from autopar.runtime.ray.transport.host_tiles import host_numbers, is_key, plain

logger = logging.getLogger("autopar")

_PYTHON = {bool: "Python bool", int: "Python int", float: "Python float", complex: "Python complex"}
_DRIVER = "driver"
_POLL_SECONDS = 1.0
_SILENT_SECONDS = 5.0
_WHOLE = "the state itself"


class Checkpoint(NamedTuple):
    """What was saved.

    Args:
      step: its number.
      state: the state.
      extra: what was saved with it.
    """

    step: int
    state: Any
    extra: Any


class Checkpoints:
    """A folder with the last checkpoints of a run.

    A state is saved by the paths of its leaves and their shapes, so it can be restored for another
    plan, another number of stages and another runtime. `save` copies the state and returns; files
    are written meanwhile, under Ray by all actors at the same time, on a file system that they
    share with the driver. A checkpoint gets its name when all of it is written: one that a crash
    cut short is ignored, and removed later. A process that ends waits for what it still writes.
    One process writes into a folder at a time.

    Args:
      directory: the folder; it is made when a step is first saved.
      keep: how many checkpoints are kept; older ones are removed.

    Raises:
      CheckpointError: the folder is there and holds something else.

    >>> import tempfile, jax.numpy as jnp, autopar
    >>> state = {"w": jnp.arange(3.0), "count": 7}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with autopar.Checkpoints(folder) as checkpoints:
    ...         checkpoints.save(10, state, extra={"position": 640})
    ...     step, state, extra = autopar.Checkpoints(folder).restore(state)
    >>> step, state["count"], extra
    (10, 7, {'position': 640})
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3):
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise CheckpointError(
                f"keep={keep!r} is not possible.", why="it must be an integer of at least 1."
            )
        self._directory = Path(directory).absolute()
        self._keep = keep
        self._writing: _Writing | None = None
        steps_in(self._directory)

    @property
    def directory(self) -> Path:
        """The folder."""
        return self._directory

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of which there are whole checkpoints, ascending.

        Raises:
          CheckpointError: the folder is no longer one of checkpoints.
        """
        return steps_in(self._directory)

    @property
    def latest(self) -> int | None:
        """The last of them."""
        return max(self.steps, default=None)

    # Saving

    def save(self, step: int, state: Any, extra: Any = None) -> None:
        """Save a state; it may be consumed as soon as this returns.

        An earlier checkpoint is completed first.

        Args:
          step: its number, greater than those that are there.
          state: a pytree of arrays of any runtime, PRNG keys and Python numbers.
          extra: JSON values to be kept with it, such as the position in the data.

        Raises:
          CheckpointError: a leaf cannot be saved, or this or the checkpoint before it not be
            written.
          LostActorError: actors were lost for good.
        """
        self.wait()
        orbax()
        latest = self.latest
        if latest is not None and step <= latest:
            raise CheckpointError(
                f"Step {step} cannot be saved behind step {latest}.",
                where=str(self._directory),
                why="the last checkpoint is the one that a run continues from.",
                hint="use another folder for a run that branches off, or remove later steps.",
            )
        try:
            extra = json.loads(json.dumps(extra))  # the caller may change it while it is written
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                "What is to be saved beside the state is no JSON.",
                where="extra",
                why=str(error),
                hint="put arrays into the state.",
            ) from error
        paths, leaves = _flat(state)
        for path, leaf in zip(paths, leaves, strict=True):
            _check_leaf(path, leaf)
        folder = begin(self._directory, step)
        self._writing = _Writing(folder, step, paths, leaves, extra, self._keep)
        self._writing.start()

    def wait(self) -> None:
        """Wait until what was saved is in its place.

        Raises:
          CheckpointError: it cannot be written.
          LostActorError: the actors that had it were lost for good.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish()

    def close(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Restoring

    def restore(self, like: Any, step: int | None = None) -> Checkpoint:
        """A saved state, placed as another one is.

        Args:
          like: the state as it is now, whose leaves say where the new ones shall be (they may have
            been consumed), or `jax.ShapeDtypeStruct`s, which may have shardings.
          step: which; None: the last.

        Returns:
          The number of the step, the state, and what was saved with it. The leaves are of the
          kinds of those of `like`.

        Raises:
          CheckpointError: there is no such checkpoint, or it has other leaves than `like`, or
            leaves of other shapes or dtypes; says which.
        """
        self.wait()
        step = self._existing(step)
        stored, extra = read_contents(self._directory, step)
        paths, leaves = _flat(like)
        _check_fit(stored, paths, leaves, step)
        folder = self._directory / name_of(step)
        items = _Items(folder)
        found = [
            _placed(path, items.numbers(stored[path], leaf), leaf)
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        tree: Any = jax.tree.structure(like)
        return Checkpoint(step, tree.unflatten(found), extra)

    def extra(self, step: int | None = None) -> Any:
        """What was saved with a state, without the state.

        Args:
          step: which; None: the last.

        Raises:
          CheckpointError: there is no such checkpoint.
        """
        self.wait()
        return read_contents(self._directory, self._existing(step))[1]

    def _existing(self, step: int | None) -> int:
        steps = self.steps
        if steps and step is None:
            return steps[-1]
        if step is not None and step in steps:
            return step
        raise CheckpointError(
            "There is no checkpoint" + ("." if step is None else f" of step {step}."),
            where=str(self._directory),
            why=f"the steps are {', '.join(map(str, steps))}."
            if steps
            else "no step has been saved here.",
        )


class _Writing:
    """A checkpoint that is being written."""

    def __init__(
        self,
        folder: Path,
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
        self._described = [(tuple(np.shape(x)), _dtype_name(x)) for x in leaves]
        groups: dict[int, tuple[Keeper, list[int]]] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, RayArray):
                groups.setdefault(id(leaf.keeper), (leaf.keeper, []))[1].append(index)
        self._parts = [
            (keeper, indices, keeper.save([leaves[i] for i in indices], folder, f"plan_{number}"))
            for number, (keeper, indices) in enumerate(groups.values())
        ]
        own = {i: x for i, x in enumerate(leaves) if not isinstance(x, RayArray)}
        self._copies = {str(i): np.array(_numbers(x)) for i, x in own.items()}

    def start(self) -> None:
        """Write in the background."""
        _at_exit()
        self._tries = self._told()
        self._thread = threading.Thread(target=self._run, daemon=True)
        _unfinished.add(self)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the end, and meanwhile see that actors are alive."""
        try:
            self._finish()
        finally:
            _unfinished.discard(self)

    def is_silent(self) -> bool:
        """Whether it is still being written after some seconds."""
        self._thread.join(_SILENT_SECONDS)
        return self._thread.is_alive()

    def __str__(self) -> str:
        return f"the checkpoint of step {self._step} in {self._folder.parent}"

    def _finish(self) -> None:
        while True:
            self._thread.join(_POLL_SECONDS)
            if self._is_done:
                return
            is_alive = self._thread.is_alive()
            for keeper, _, saving in self._parts:
                if not saving.is_done:
                    keeper.ping()  # a step before it may have failed; new actors are told again
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


_unfinished: set[_Writing] = set()
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


class _Items:
    """The items of a checkpoint, each read once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._items: dict[str, dict[str, np.ndarray]] = {}

    def numbers(self, stored: StoredLeaf, like: Any) -> np.ndarray:
        """The numbers of a leaf."""
        if len(stored.pieces) == 1:
            (piece,) = stored.pieces
            return self._item(piece.item)[piece.name]
        whole = np.zeros(*plain(np.shape(like), like.dtype))
        for item, name, start in stored.pieces:
            part = self._item(item)[name]
            whole[tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=False))] = part
        return whole

    def _item(self, name: str) -> dict[str, np.ndarray]:
        if name not in self._items:
            try:
                self._items[name] = read_item(self._folder / name)
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(
                    "A checkpoint cannot be read.",
                    where=str(self._folder / name),
                    why=f"{type(error).__name__}: {error}",
                ) from error
        return self._items[name]


def _flat(state: Any) -> tuple[list[str], list[Any]]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(state)
    return [jax.tree_util.keystr(path) for path, _ in pairs], [leaf for _, leaf in pairs]


def _check_leaf(path: str, leaf: Any) -> None:
    if isinstance(leaf, (jax.Array, SplitArray, RayArray)):
        if leaf.is_deleted():
            raise CheckpointError(
                "A leaf of the state was consumed, so it cannot be saved.",
                where=path,
                hint="save the state that the last call of the step returned.",
            )
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise CheckpointError(
                "A leaf of the state lies on devices of other processes.", where=path
            )
        return
    is_number = type(leaf) in _PYTHON
    if (is_number or isinstance(leaf, (np.ndarray, np.generic))) and np.asarray(
        leaf
    ).dtype != np.dtype(object):
        return
    raise CheckpointError(
        f"A leaf of the state is a {type(leaf).__name__}, which cannot be saved.",
        where=path,
        why="leaves are arrays, PRNG keys and numbers of up to 64 bits.",
    )


def _numbers(leaf: Any) -> np.ndarray:
    """The numbers of a leaf, in its own dtype, also where JAX would use a smaller one."""
    if isinstance(leaf, (jax.Array, SplitArray)):
        return host_numbers(leaf)
    return np.asarray(leaf)


def _dtype_name(leaf: Any) -> str:
    return _PYTHON.get(type(leaf)) or str(leaf.dtype.name)


def _check_fit(
    stored: dict[str, StoredLeaf], paths: Sequence[str], leaves: Sequence[Any], step: int
) -> None:
    lines = [f"- {path or _WHOLE}: not in the checkpoint" for path in paths if path not in stored]
    lines += [f"- {path or _WHOLE}: not in the state" for path in stored if path not in set(paths)]
    for path, leaf in zip(paths, leaves, strict=True):
        if path in stored:
            was, now = stored[path], (tuple(np.shape(leaf)), _dtype_name(leaf))
            if was.shape != now[0] or not _same_dtype(was.dtype, now[1]):
                lines.append(
                    f"- {path or _WHOLE}: saved as {was.dtype}{list(was.shape)}, wanted as "
                    f"{now[1]}{list(now[0])}"
                )
    if lines:
        more = [f"- ... {len(lines)} differences in all"] if len(lines) > 6 else []
        raise CheckpointError(
            f"The checkpoint of step {step} is of another state.",
            where=lines[0][2:].partition(": ")[0],
            why="its leaves and those that are wanted:\n" + "\n".join([*lines[:6], *more]),
        )


def _same_dtype(saved: str, wanted: str) -> bool:
    """Whether numbers of one are those of the other; a Python number is one of any width."""
    if saved == wanted:
        return True
    kinds = {saved.startswith("Python "), wanted.startswith("Python ")}
    return True in kinds and _kind(saved) == _kind(wanted)


def _kind(dtype: str) -> str:
    name = dtype.removeprefix("Python ").rstrip("0123456789").removeprefix("u")
    return "float" if name == "bfloat" else name


def _placed(path: str, numbers: np.ndarray, like: Any) -> Any:
    """The numbers of a leaf as a leaf of the kind of another."""
    kind = type(like)
    if kind in _PYTHON:
        return kind(numbers.item())
    if not is_key(like.dtype):
        numbers = _cast(path, numbers, like.dtype)
    if isinstance(like, RayArray):
        return like.keeper.place(numbers, like.place, like.weak_type)
    if isinstance(like, (np.ndarray, np.generic)):
        return numbers[()] if isinstance(like, np.generic) else numbers
    array: Any = numbers
    if is_key(like.dtype):
        array = jax.random.wrap_key_data(
            jax.numpy.asarray(numbers), impl=key_implementation(like.dtype)
        )
    elif getattr(like, "weak_type", False):
        array = _weak(numbers)
    is_free = isinstance(like, jax.Array) and not like.committed
    if like.sharding is None or is_free:
        return jax.numpy.asarray(array)
    return put(array, like.sharding)


def _cast(path: str, numbers: np.ndarray, dtype: Any) -> np.ndarray:
    """Numbers in a dtype; those of a Python number may need it."""
    found = numbers.astype(dtype)
    if numbers.dtype.kind in "iu" and found.dtype.kind in "iu" and (found != numbers).any():
        raise CheckpointError(
            f"{numbers.item()} is no number of {np.dtype(dtype).name}.", where=path
        )
    return found


def _weak(numbers: np.ndarray) -> Any:
    """An array that JAX promotes as it does a Python number."""
    array = jax.numpy.asarray(numbers)
    return convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)
