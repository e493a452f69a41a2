"""Arrays whose dimensions lie in another order than the program's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["order"])
@dataclasses.dataclass(frozen=True)
class TurnedArray:
    """An array as it lies.

    Args:
      array: as it lies.
      order: for each of its dimensions, which one of the value's it is.
    """

    array: Any
    order: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> TurnedArray:
        """A value in the order that it has."""
        return cls(value, tuple(range(value.ndim)))

    def with_first(self, dim: int) -> TurnedArray:
        """The same value, of which one of its dimensions is the outermost."""
        order = (dim, *(other for other in self.order if other != dim))
        return TurnedArray(lax.transpose(self.array, [*map(self.order.index, order)]), order)

    @property
    def value(self) -> Any:
        """In the program's order."""
        return lax.transpose(self.array, _places(self.order))

    def row(self, place: Any) -> TurnedArray:
        """One of the slices along the value's first dimension."""
        row = lax.dynamic_index_in_dim(self.array, place, self.order.index(0), keepdims=False)
        return TurnedArray(row, tuple(other - 1 for other in self.order if other))


def _places(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
