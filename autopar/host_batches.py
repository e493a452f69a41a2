"""Batches of any library as NumPy arrays; rows that are missing, filled up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

Axes = Sequence[int | None]
"""For each leaf the dimension along which it holds examples; None: it has none."""


def on_host(leaf: Any) -> Any:
    """A leaf of a batch as a NumPy array of its own; JAX's arrays and what is no array stay.

    It is a copy: a source may write its next batch into the memory of the last one.
    """
    if isinstance(leaf, (jax.Array, str, bytes)) or leaf is None:
        return leaf
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if hasattr(leaf, "detach") and hasattr(leaf, "cpu"):  # PyTorch's
        leaf = leaf.detach().cpu()
        if str(leaf.dtype) == "torch.bfloat16":  # which NumPy does not know
            bits = leaf.view(__import__("torch").int16).numpy()
            return bits.view(jax.numpy.bfloat16).copy()
        return leaf.numpy().copy()
    if callable(getattr(leaf, "numpy", None)):  # TensorFlow's
        return np.array(leaf.numpy())
    if hasattr(leaf, "__array__"):
        return np.array(leaf)
    return leaf


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
    """A batch with its last example repeated until there are so many: numbers that stay finite."""
    leaves: list[Any]
    tree: Any
    leaves, tree = jax.tree.flatten(value)
    had = rows_of(value, axes)

    def filled(leaf: Any, axis: int | None) -> Any:
        if axis is None or np.ndim(leaf) <= axis or np.shape(leaf)[axis] != had or not had:
            return leaf
        return np.take(np.asarray(leaf), np.minimum(np.arange(rows), had - 1), axis=axis)

    return tree.unflatten([filled(*each) for each in zip(leaves, axes, strict=True)])
