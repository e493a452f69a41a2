"""How many examples a batch has; those that are missing, filled up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from autopar.arrays.typed_keys import is_key

Axes = Sequence[int | None]
"""For each leaf the dimension along which it holds examples; None: it has none."""


def with_axes(value: Any, axes: Axes) -> Axes:
    """The batch dimension of each leaf of a batch; the first one where it is not known."""
    leaves = jax.tree.leaves(value)
    if len(axes) == len(leaves):
        return axes
    return [0 if np.ndim(leaf) else None for leaf in leaves]


def rows_of(value: Any, axes: Axes) -> int | None:
    """How many examples a batch has."""
    pairs = zip(jax.tree.leaves(value), axes, strict=True)
    sizes = [np.shape(x)[axis] for x, axis in pairs if axis is not None and np.ndim(x) > axis]
    return max(sizes, default=None)


def padded(value: Any, axes: Axes, rows: int) -> Any:
    """A batch with its last example repeated until there are so many: numbers that stay finite.

    Of a batch without examples, they are zeros.
    """
    leaves: list[Any]
    tree: Any
    leaves, tree = jax.tree.flatten(value)
    had = rows_of(value, axes) or 0
    places = np.minimum(np.arange(rows), had - 1)

    def filled(leaf: Any, axis: int | None) -> Any:
        if axis is None or np.ndim(leaf) <= axis or np.shape(leaf)[axis] != had:
            return leaf
        if not had and not is_key(leaf.dtype):
            shape = np.shape(leaf)
            return np.zeros((*shape[:axis], rows, *shape[axis + 1 :]), leaf.dtype)
        if is_key(leaf.dtype):  # which NumPy cannot hold
            rest = (slice(None),) * axis
            return leaf[(*rest, places)]
        return np.take(np.asarray(leaf), places, axis=axis)

    return tree.unflatten([filled(*each) for each in zip(leaves, axes, strict=True)])
