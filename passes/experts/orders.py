"""The order that a sort gives to rows, for each example by itself, and values in that order."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import JaxprEqn, Var

from autopar.base.row_sorts import RowSort
from autopar.passes.graph.graph import user_source


@dataclasses.dataclass(frozen=True, eq=False)
class Order:
    """One sort: of how many rows for each example, by the keys of a variable."""

    eqn: JaxprEqn
    rows: int
    keys: Var
    by_example: Any


class MixedRowsError(Exception):
    """Rows of different examples meet, for all that is known.

    Args:
      order: the rows'.
      reason: why they do, if it is not the equation that is evaluated.
    """

    def __init__(self, order: Order, reason: str = ""):
        super().__init__("rows of several examples meet")
        self.order, self.reason = order, reason
        self.at: JaxprEqn | None = None  # the equation that was evaluated

    @property
    def told(self) -> RowSort:
        """The sort, and why it stays one over the whole batch."""
        where = "" if self.at is None else user_source(self.at)
        reason = self.reason
        if not reason and self.at is not None:
            reason = f"`{self.at.primitive.name}` may bring rows of several examples together"
        return RowSort(user_source(self.order.eqn), reason or "sorted rows are a result", where)


@dataclasses.dataclass(frozen=True)
class SortedRows:
    """A value with rows in the order of one sort, or numbers of rows within their example."""

    array: Any
    order: Order
