"""`Checkpoints`: states in files, by parameter path, written while the next steps run."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core.primitives import convert_element_type_p

from autopar.arrays.ray_array import RayArray, key_implementation
from autopar.arrays.split_array import put
from autopar.arrays.typed_keys import is_key
from autopar.base.errors import AutoparWarning, CheckpointError, DamagedCheckpointError
from autopar.base.user_code import shortens, warn_at_call
from autopar.checkpoint_writing import PYTHON, WritingCheckpoint, check_leaf, dtype_name, flat
from autopar.passes.trace.graph_objects import objects_of, states_of
from autopar.runtime.checkpoint_files import (
    Item,
    StoredLeaf,
    begin,
    name_of,
    orbax,
    read_contents,
    read_item,
    steps_in,
)
from autopar.runtime.file_paths import is_remote, path_of
from autopar.runtime.ray.transport.host_tiles import plain

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
      directory: the folder; it is made when a step is first saved. Its path may begin with `gs://`,
        `s3://` or `az://` (by `etils.epath` and the file system's package: gcsfs, s3fs, adlfs).
      keep: how many checkpoints are kept; older ones are removed.

    Attributes:
      directory: the folder, as an absolute path (on the network, one of epath's).

    Raises:
      CheckpointError: the folder is there and holds something else, or cannot be reached.

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
        path = path_of(directory)
        self.directory: Any = path if is_remote(path) else path.absolute()
        self._keep = keep
        self._writing: WritingCheckpoint | None = None
        steps_in(self.directory)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of which there are whole checkpoints, ascending.

        Raises:
          CheckpointError: the folder is no longer one of checkpoints.
        """
        return steps_in(self.directory)

    @property
    def latest(self) -> int | None:
        """The last of them."""
        return max(self.steps, default=None)

    # Saving

    @shortens
    def save(self, step: int, state: Any, extra: Any = None) -> None:
        """Save a state; it may be consumed as soon as this returns.

        An earlier checkpoint is completed first.

        Args:
          step: its number, greater than those that are there.
          state: a pytree of arrays of any runtime, PRNG keys and Python numbers, or of objects that
            hold them (NNX).
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
                f"Step {step} cannot be saved after step {latest}.",
                where=str(self.directory),
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
        paths, leaves = flat(states_of(state))
        for path, leaf in zip(paths, leaves, strict=True):
            check_leaf(path, leaf)
        folder = begin(self.directory, step)
        self._writing = WritingCheckpoint(folder, step, paths, leaves, extra, self._keep)
        self._writing.start()

    @shortens
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

    @shortens
    def restore(self, like: Any, step: int | None = None, *, fallback: bool = False) -> Checkpoint:
        """A saved state, placed as another one is.

        Args:
          like: the state as it is now, whose leaves say where the new ones shall be (they may have
            been consumed), or `jax.ShapeDtypeStruct`s, which may have shardings.
          step: which; None: the last.
          fallback: take the one before a checkpoint that is damaged, or cannot be read, with a
            warning that names both. One of another state is no such checkpoint.

        Returns:
          The number of the step, the state, and what was saved with it. The leaves are of the
          kinds of those of `like`; objects are new ones.

        Raises:
          CheckpointError: there is no such checkpoint, or it has other leaves than `like`, or
            leaves of other shapes or dtypes; says which. Or it is damaged, and with `fallback` all
            before it are.
        """
        self.wait()
        step = self._existing(step)
        first: DamagedCheckpointError | None = None
        for each in reversed([each for each in self.steps if each <= step]):
            try:
                found = self._restored(like, each)
            except DamagedCheckpointError as error:
                first = first or error
                if not fallback:
                    raise self._hinting(error, each) from None
            else:
                if first is not None:
                    warn_at_call(
                        f"The checkpoint of step {each} is restored, for that of step {step} "
                        f"cannot be used: {first.why}",
                        AutoparWarning,
                    )
                return found
        assert first is not None, "its step is one of them"
        first.add_note("autopar: all earlier checkpoints are damaged as well.")
        raise first

    def _restored(self, like: Any, step: int) -> Checkpoint:
        stored, extra = read_contents(self.directory, step)
        like = states_of(like)
        paths, leaves = flat(like)
        check_fit(stored, paths, leaves, step)
        read = functools.cache(functools.partial(_read_item, self.directory / name_of(step)))
        needed = {piece for path in paths for piece in stored[path].pieces}
        for piece in needed:
            if piece.name not in read(piece.item)[0]:
                raise DamagedCheckpointError(
                    f"The checkpoint of step {step} is damaged.",
                    where=str(self.directory / name_of(step) / piece.item),
                    why=f"an array ({piece.name}) is not there.",
                )
        wrong = {piece for piece in needed if piece.name in read(piece.item)[1]}
        if wrong:
            broken = [x for x in paths if not wrong.isdisjoint(stored[x].pieces)]
            raise self._damaged(step, broken)
        found = [
            placed_leaf(path, _stored_numbers(stored[path], leaf, read), leaf)
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        tree: Any = jax.tree.structure(like)
        return Checkpoint(step, objects_of(tree.unflatten(found)), extra)

    def _damaged(self, step: int, paths: Sequence[str]) -> DamagedCheckpointError:
        more = f", and of {len(paths) - 1} leaves more" if len(paths) > 1 else ""
        return DamagedCheckpointError(
            f"The checkpoint of step {step} is damaged.",
            where=str(self.directory / name_of(step)),
            why=f"the numbers of {paths[0]}{more} are not those that were written: their checksums "
            "differ.",
        )

    def _hinting(self, error: DamagedCheckpointError, step: int) -> DamagedCheckpointError:
        """The same error, with what to do."""
        earlier = [each for each in self.steps if each < step]
        hint = (
            f"restore(state, fallback=True) takes the one before, of step {earlier[-1]}; so does "
            f"restore(state, step={earlier[-1]})."
            if earlier
            else "it is the only one here; take a copy of it, if there is one."
        )
        return DamagedCheckpointError(error.what, where=error.where, why=error.why, hint=hint)

    @shortens
    def extra(self, step: int | None = None) -> Any:
        """What was saved with a state, without the state.

        Args:
          step: which; None: the last.

        Raises:
          CheckpointError: there is no such checkpoint.
        """
        self.wait()
        return read_contents(self.directory, self._existing(step))[1]

    def _existing(self, step: int | None) -> int:
        steps = self.steps
        if steps and step is None:
            return steps[-1]
        if step is not None and step in steps:
            return step
        raise CheckpointError(
            "There is no checkpoint" + ("." if step is None else f" of step {step}."),
            where=str(self.directory),
            why=f"the steps are {', '.join(map(str, steps))}."
            if steps
            else "no step has been saved here.",
        )


def _stored_numbers(stored: StoredLeaf, like: Any, read: Callable[[str], Item]) -> np.ndarray:
    """The numbers of a leaf, from the items that `read` gives by their names."""
    if len(stored.pieces) == 1:
        (piece,) = stored.pieces
        return read(piece.item)[0][piece.name]
    whole = np.zeros(*plain(np.shape(like), like.dtype))
    for item, name, start in stored.pieces:
        part = read(item)[0][name]
        whole[tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=False))] = part
    return whole


def _read_item(folder: Any, name: str) -> Item:
    try:
        return read_item(folder / name)
    except CheckpointError:
        raise
    except Exception as error:
        raise DamagedCheckpointError(
            "A checkpoint cannot be read.",
            where=str(folder / name),
            why=f"{type(error).__name__}: {error}",
        ) from error


def check_fit(
    stored: dict[str, StoredLeaf], paths: Sequence[str], leaves: Sequence[Any], step: int
) -> None:
    """See that what is stored has the leaves that are wanted.

    Raises:
      CheckpointError: it has others, or of other shapes or dtypes; says which.
    """
    lines = [f"- {path or _WHOLE}: not in the checkpoint" for path in paths if path not in stored]
    lines += [f"- {path or _WHOLE}: not in the state" for path in stored if path not in set(paths)]
    for path, leaf in zip(paths, leaves, strict=True):
        if path in stored:
            was, now = stored[path], (tuple(np.shape(leaf)), dtype_name(leaf))
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


def placed_leaf(path: str, numbers: np.ndarray, like: Any) -> Any:
    """The numbers of a leaf as a leaf of the kind of another."""
    kind = type(like)
    if kind in PYTHON:
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
        array = jax.numpy.asarray(numbers)  # JAX promotes it as it does a Python number
        array = convert_element_type_p.bind(
            array, new_dtype=array.dtype, weak_type=True, sharding=None
        )
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
