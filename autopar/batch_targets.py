"""Where a compiled step wants its batch, and batches put there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from autopar.arrays.split_array import placed
from autopar.passes.trace.trace import Traced
from autopar.plans.plan import Plan


class CompiledStep(Protocol):
    """A step that is compiled for one signature, as far as it matters here."""

    @property
    def traced(self) -> Traced:
        """Its trace, which knows the batch."""

    @property
    def plan(self) -> Plan:
        """What was decided."""

    def place_leaf(self, index: int, read: Callable[[tuple[slice, ...]], np.ndarray]) -> Any:
        """An array leaf where the step wants it, from what reads its parts."""

    def source_bytes(self, source: Any) -> bytes | None:
        """A source of batches as bytes, where other processes read it; None: this one does."""

    @property
    def leaf_shardings(self) -> tuple[Any, ...]:
        """Where each array leaf of its arguments lies."""


@dataclass(frozen=True)
class BatchTarget:
    """One batch argument of a compiled step: its structure, and of its leaves what is wanted."""

    tree: Any
    shapes: tuple[jax.ShapeDtypeStruct | None, ...]
    axes: tuple[int | None, ...]
    shardings: tuple[Any, ...]

    def placed(self, value: Any) -> Any | None:
        """The argument on the devices; None: it is not as the step was compiled for."""
        leaves: list[Any] | None
        leaves, tree = jax.tree.flatten(value)
        if tree != self.tree:
            leaves = _like(value, self.tree)
        if leaves is None or not all(map(_fits, leaves, self.shapes)):
            return None
        wanted = zip(leaves, self.shapes, self.shardings, strict=True)
        return self.tree.unflatten([_put(*each) for each in wanted])


def _like(value: Any, tree: Any) -> list[Any] | None:
    """The leaves of a value whose lists are a structure's tuples (loaders make lists)."""

    def tuples(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(tuples, value))
        if isinstance(value, dict):
            return {key: tuples(each) for key, each in value.items()}
        return value

    leaves, found = jax.tree.flatten(tuples(value))
    return leaves if found == tree else None


def _fits(leaf: Any, shape: jax.ShapeDtypeStruct | None) -> bool:
    return shape is None or (hasattr(leaf, "dtype") and np.shape(leaf) == shape.shape)


def _put(leaf: Any, shape: jax.ShapeDtypeStruct | None, sharding: Any) -> Any:
    if shape is None or sharding is None:
        return leaf
    if isinstance(leaf, np.ndarray):
        leaf = leaf.astype(shape.dtype, copy=False) if _same_kind(leaf, shape) else leaf
        if not sharding.is_fully_addressable:
            # Of several processes, each copies what its devices hold; device_put would compare.
            return jax.make_array_from_callback(leaf.shape, sharding, lambda rows: leaf[rows])
    return placed(leaf, sharding)


def _same_kind(leaf: np.ndarray, shape: jax.ShapeDtypeStruct) -> bool:
    """Whether NumPy's dtype is the plan's but for its width, which JAX would cut as well."""
    kinds = (leaf.dtype.kind, np.dtype(shape.dtype).kind)
    return kinds[0] == kinds[1] and leaf.dtype.itemsize > np.dtype(shape.dtype).itemsize


def batch_targets(executable: CompiledStep) -> tuple[BatchTarget, ...]:
    """The arguments of a step that hold the batch."""
    traced, shardings = executable.traced, executable.leaf_shardings
    inputs, found = traced.graph.inputs, list[BatchTarget]()
    for argument in traced.arguments:
        arrays = {path: i for i, path, _ in argument.arrays()}
        indices = [arrays.get(path) for path in argument.paths]
        if not any(i is not None and inputs[i].role == "batch" for i in indices):
            continue
        found.append(
            BatchTarget(
                argument.tree,
                tuple(argument.leaves),
                tuple(None if i is None else inputs[i].batch_axis for i in indices),
                tuple(None if i is None else _sharding(shardings[i]) for i in indices),
            )
        )
    return tuple(found)


def _sharding(sharding: Any) -> jax.sharding.Sharding | None:
    """Where JAX can put an array; not on Ray actors, which are sent it with the call."""
    return sharding if isinstance(sharding, jax.sharding.Sharding) else None


def placed_batch(value: Any, targets: tuple[BatchTarget, ...]) -> Any:
    """The batch on the devices of a step; None: the step was compiled for others."""
    if len(targets) == 1:
        return targets[0].placed(value)
    if not isinstance(value, (tuple, list)) or len(value) != len(targets):
        return None
    each = [target.placed(x) for target, x in zip(targets, value, strict=True)]
    return None if any(x is None for x in each) else tuple(each)
