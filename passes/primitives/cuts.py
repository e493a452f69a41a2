"""How the dimensions of a value are cut, and an equation on slices of its operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from autopar.passes.graph import jax_compat
from autopar.passes.graph.primitives import DRAWS
from autopar.passes.primitives import products
from autopar.passes.primitives.shardings import shape_of


class NotLocalError(Exception):
    """An equation cannot be evaluated on these slices. A rule never offers such a cut."""


@dataclass(frozen=True)
class DimCut:
    """A dimension of `major * parts * rest` seen as [major, parts, rest]; we hold [:, index, :].

    `index` is a Python int or a traced int32 scalar. The local size is `major * rest`. Devices hold
    the other parts along the mesh axes with these names; none: they come at other times.
    """

    parts: int
    index: Any
    major: int = 1
    axes: tuple[str, ...] = ()

    def rest(self, size: int) -> int:
        """The length of the contiguous pieces in which a dimension of `size` is cut."""
        rest, left = divmod(size, self.major * self.parts)
        if left:
            raise NotLocalError(
                f"a dimension of {size} is not {self.major} x {self.parts} x an integer"
            )
        return rest


Cuts = tuple[DimCut | None, ...]  # one entry per dimension of a value


def local_shape(shape: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """The shape of a slice."""
    return tuple(
        size if cut is None else cut.major * cut.rest(size)
        for size, cut in zip(shape, cuts, strict=True)
    )


def take(value: Any, cuts: Cuts) -> Any:
    """The slice of a whole array that `cuts` describes."""
    for dim, cut in enumerate(cuts):
        if cut is None:
            continue
        shape = value.shape
        viewed = (*shape[:dim], cut.major, cut.parts, cut.rest(shape[dim]), *shape[dim + 1 :])
        value = lax.dynamic_index_in_dim(
            value.reshape(viewed), cut.index, axis=dim + 1, keepdims=False
        ).reshape(local_shape(shape, (*(None,) * dim, cut, *(None,) * (len(shape) - dim - 1))))
    return value


def positions(size: int, cut: DimCut | None, dtype: Any = np.int32) -> Any:
    """Where the elements of a slice are in the whole dimension, an array of the local size."""
    if cut is None:
        return lax.iota(dtype, size)
    rest = cut.rest(size)
    shape = (cut.major, rest)
    index = lax.convert_element_type(cut.index, dtype)
    place = lax.broadcasted_iota(dtype, shape, 1) + index * np.array(rest, dtype)
    if cut.major > 1:
        place += lax.broadcasted_iota(dtype, shape, 0) * np.array(cut.parts * rest, dtype)
    return place.reshape(cut.major * rest)


Binder = Callable[[JaxprEqn, Sequence[Any], Mapping[str, Any]], list[Any]]
"""Evaluates an equation on operands and with some params changed."""


@dataclass(frozen=True)
class LocalCall:
    """An equation, its local operands, how each operand and each result is cut, what evaluates."""

    eqn: JaxprEqn
    operands: Sequence[Any]
    operand_cuts: Sequence[Cuts]
    result_cuts: Sequence[Cuts]
    binder: Binder

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The whole shapes of the first operand and of the first result."""
        return shape_of(self.eqn.invars[0]), shape_of(self.eqn.outvars[0])

    def bind(self, **changes: Any) -> list[Any]:
        """Its results on the local operands, with some params changed."""
        return self.binder(self.eqn, self.operands, changes)


def bind_with(eqn: JaxprEqn, operands: Sequence[Any], changes: Mapping[str, Any]) -> list[Any]:
    """Evaluate an equation on other operands and with some params changed."""
    if eqn.primitive.name == "dot_general":
        return [products.multiply(eqn.primitive.bind, operands, {**eqn.params, **changes})]
    if eqn.primitive.name in DRAWS:
        with jax.threefry_partitionable(eqn.ctx.threefry_partitionable):
            return jax_compat.bind(eqn, operands, **changes)
    return jax_compat.bind(eqn, operands, **changes)
