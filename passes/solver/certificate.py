"""The exact value of a dual bound: floating-point messages and prices, integer arithmetic.

Any messages and any prices that are not negative give a valid bound, so they are rounded to
multiples of a power of two first, and everything after that is exact.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autopar.passes.solver.dual import Dual
from autopar.passes.solver.model import INFINITE
from autopar.passes.solver.problem import Integers

PRICE_BITS = 40
"""Prices are rounded to multiples of 2^-40 of a unit of cost per unit of usage."""


def certified_bound(dual: Dual) -> int:
    """An exact lower bound on the model's cost without its offset, memory limit included."""
    arrays = dual.arrays
    largest = max(
        *(float(np.abs(part).max(initial=0.0)) for part in (dual.low, dual.high, dual.priced)),
        float(arrays.low.exact.max(where=arrays.low.exact < INFINITE, initial=0)),
        float(arrays.exact.max(initial=0)),
    )
    # A node adds up to as many messages as it has neighbours; leave room for their sum.
    degree = int(np.diff(arrays.around_first).max(initial=0)) + 2
    bits = 61 - math.frexp(max(largest, 1.0) * degree)[1]
    if bits < 0:
        return 0
    low, high = (np.rint(np.ldexp(part, bits)).astype(np.int64) for part in (dual.low, dual.high))
    nodes = (arrays.exact << bits) + _price_costs(dual, bits)
    np.add.at(nodes, arrays.low.slot_node, low)
    np.add.at(nodes, arrays.high.slot_node, high)
    total = _edges(dual, low, high, bits) + _sum(np.minimum.reduceat(nodes, arrays.first[:-1]))
    paid = sum(
        int(price) * int(room)
        for price, room in zip(_rounded(dual.prices), arrays.room.tolist(), strict=True)
    )
    # The bound itself may be rounded up, as costs are integers.
    total += _in_units(-paid, bits)
    return -((-total) >> bits)


def _edges(dual: Dual, low: Integers, high: Integers, bits: int) -> int:
    """The sum over edges of the least that they keep, in units of `2^-bits`."""
    side = dual.arrays.high
    if not len(side.exact):
        return 0
    kept = np.where(side.exact < INFINITE, side.exact, 0) << bits
    kept -= np.repeat(high, side.slot_size)
    kept -= low[side.cell_far_slot]
    kept[side.exact >= INFINITE] = np.iinfo(np.int64).max
    least_of_slot = np.minimum.reduceat(kept, side.slot_start)
    first_slots = np.flatnonzero(np.diff(side.slot_edge, prepend=-1))
    return _sum(np.minimum.reduceat(least_of_slot, first_slots))


def _price_costs(dual: Dual, bits: int) -> Integers:
    """What the prices add to each strategy, rounded down to units of `2^-bits`."""
    arrays = dual.arrays
    costs = np.zeros(len(arrays.costs), object)
    if not len(arrays.usage):
        return np.zeros(len(arrays.costs), np.int64)
    row_price = arrays.in_rows(_rounded(dual.prices))
    amounts = arrays.usage.astype(np.int64).astype(object) * row_price[arrays.usage_row]
    np.add.at(costs, arrays.usage_strategy, amounts)
    return _in_units(costs, bits).astype(np.int64)


def _in_units(paid: Any, bits: int) -> Any:
    """What prices make, in units of `2^-PRICE_BITS`, rounded down to units of `2^-bits`."""
    return paid >> (PRICE_BITS - bits) if bits <= PRICE_BITS else paid << (bits - PRICE_BITS)


def _rounded(prices: np.ndarray) -> np.ndarray:
    return np.array([round(price * 2.0**PRICE_BITS) for price in prices.tolist()], object)


def _sum(values: Integers) -> int:
    return sum(values.tolist())
