"""The order that a sort gives to rows, for each example by itself, and values in that order."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import JaxprEqn, Var


@dataclasses.dataclass(frozen=True, eq=False)
class Order:
    """One sort: of how many rows for each example, by the keys of a variable."""

    eqn: JaxprEqn
    rows: int
    keys: Var
    by_example: Any


class MixedRowsError(Exception):
    """Rows of different examples meet, for all that is known."""

    def __init__(self, order: Order):
        super().__init__("rows of several examples meet")
        self.order = order


@dataclasses.dataclass(frozen=True)
class SortedRows:
    """A value with rows in the order of one sort, or numbers of rows within their example."""

    array: Any
    order: Order
