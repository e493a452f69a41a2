"""Leaves of a state as a checkpoint stores them, and as a restored state has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core.primitives import convert_element_type_p

from autopar.arrays.ray_array import RayArray, key_implementation
from autopar.arrays.split_array import SplitArray, put
from autopar.base.errors import CheckpointError
from autopar.runtime.checkpoint_files import (
    StoredLeaf,
    read_item,
)
from autopar.runtime.ray.transport.host_tiles import host_numbers, is_key, plain

_PYTHON = {bool: "Python bool", int: "Python int", float: "Python float", complex: "Python complex"}
_WHOLE = "the state itself"


class StoredItems:
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


def numbers_of(leaf: Any) -> np.ndarray:
    """The numbers of a leaf, in its own dtype, also where JAX would use a smaller one."""
    if isinstance(leaf, (jax.Array, SplitArray)):
        return host_numbers(leaf)
    return np.asarray(leaf)


def dtype_name(leaf: Any) -> str:
    """The name of a leaf's dtype as it is stored."""
    return _PYTHON.get(type(leaf)) or str(leaf.dtype.name)


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
