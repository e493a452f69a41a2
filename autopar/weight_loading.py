"""Weights from files straight into a plan's layout, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from autopar.base.errors import CheckpointError, TraceError, did_you_mean
from autopar.leaf_paths import nearest_path, path_parts
from autopar.passes.trace.graph_objects import objects_of, states_of
from autopar.passes.trace.trace import Traced
from autopar.runtime.weight_files import Rows, StoredArray, open_weights

Named = str | tuple[str, Sequence[int]]
"""The name of an array, and the order of its dimensions that the leaf has them in."""

Place = Callable[[int, Callable[[Rows], np.ndarray]], Any]


def load_weights(
    traced: Traced,
    place: Place,
    like: Any,
    source: Any,
    names: Callable[[str], Named] | None,
) -> Any:
    """See `AroundStep.load_weights`.

    Args:
      traced: the step.
      place: makes the leaf of a number, where the step wants it, from what reads its parts.
      like: the tree to be made.
      source: of the arrays.
      names: of a leaf's path, the array.
    """
    known = open_weights(source)
    pairs, tree = jax.tree_util.tree_flatten_with_path(states_of(like))
    plan = [_planned(traced, known, keys, leaf, names) for keys, leaf in pairs]
    wrong = [each for each in plan if isinstance(each, str)]
    if wrong:
        more = [f"- ... {len(wrong)} in all"] if len(wrong) > 6 else []
        raise CheckpointError(
            "The weights are not those of this tree.",
            where=None if hasattr(source, "keys") else str(source),
            why="\n".join(["leaf by leaf:", *wrong[:6], *more]),
            hint="names= says which array a leaf is: a function of its path, such as "
            "lambda path: path.replace('kernel', 'weight'), that returns a name, or a name with "
            "the order of its dimensions: (name, (1, 0)).",
        )
    leaves = [
        leaf if each is None else place(*each)
        for each, (_, leaf) in zip(plan, pairs, strict=True)
        if not isinstance(each, str)
    ]
    return objects_of(jax.tree.unflatten(tree, leaves))


def _planned(
    traced: Traced,
    known: dict[str, StoredArray],
    keys: Any,
    leaf: Any,
    names: Callable[[str], Named] | None,
) -> tuple[int, Callable[[Rows], np.ndarray]] | str | None:
    """The number of the step's leaf and what reads it; else what is wrong, in a line.

    None is returned for a leaf that is no array.
    """
    if not hasattr(leaf, "dtype"):
        return None
    parts = path_parts("x" + jax.tree_util.keystr(keys))[1:]
    path = ".".join(parts)
    index = _number(traced, parts, leaf)
    asked: Any = path if names is None else names(path)
    if not isinstance(asked, str) and not (isinstance(asked, tuple) and len(asked) == 2):
        return f"- {path}: names says {asked!r}, which is no name"
    name, axes = (asked, None) if isinstance(asked, str) else asked
    stored = known.get(name) or (known.get(name.replace(".", "/")) if names is None else None)
    if stored is None:
        near = did_you_mean(name, list(known))
        return f"- {path}: there is no array {name!r}{f'; {near}' if near else ''}"
    rank = len(stored.shape)
    if axes is not None:
        axes = [axis + rank if axis < 0 else axis for axis in axes]
        if sorted(axes) != list(range(rank)):
            return f"- {path}: {axes} is no order of the {rank} dimensions of {name!r}"
    shape = stored.shape if axes is None else tuple(stored.shape[axis] for axis in axes)
    if shape != np.shape(leaf):
        return f"- {path}: {list(np.shape(leaf))}, and {name!r} has {list(shape)}"
    kinds = [_kind(dtype) for dtype in (leaf.dtype, stored.dtype)]
    if kinds[0] != kinds[1]:
        return f"- {path}: {leaf.dtype}, and {name!r} has {stored.dtype}"

    def read(rows: Rows) -> np.ndarray:
        if axes is None:
            found = stored.read(rows)
        else:
            own = [slice(None)] * len(axes)
            for rows_of, axis in zip(rows, axes, strict=True):
                own[axis] = rows_of
            found = stored.read(tuple(own)).transpose(axes)
        return found.astype(leaf.dtype, copy=False)

    return index, read


def _number(traced: Traced, parts: tuple[str, ...], leaf: Any) -> int:
    shapes = traced.signature.shapes
    labels = zip(traced.graph.inputs, shapes, strict=False)
    alike = [
        (path_parts(label.path), i)
        for i, (label, shape) in enumerate(labels)
        if (shape.shape, shape.dtype) == (np.shape(leaf), leaf.dtype) and label.role != "batch"
    ]
    index = nearest_path(parts, alike) if parts else (alike[0][1] if alike else None)
    if index is None:
        path = ".".join(parts)
        raise TraceError(
            f"The step takes no such leaf as {path or 'this'}.",
            where=path,
            why=f"none of its arguments' leaves of that name is {leaf.dtype}"
            f"[{', '.join(map(str, np.shape(leaf)))}].",
            hint="like= is a tree as the step takes it, or a part of one, such as state.params.",
        )
    return index


def _kind(dtype: Any) -> str:
    for kind in (np.floating, np.integer, np.complexfloating):
        if jax.numpy.issubdtype(dtype, kind):
            return kind.__name__
    return str(dtype)
