"""The integer program in which bytes have a price instead of a limit.

Every value costs what a device holds of it, times a price, wherever it is in time. That is one more
number for each strategy of a node, so the program is as quickly solved as one without a limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.passes.sharding.integer_program import PICOSECONDS, to_problem
from autopar.passes.sharding.memory_rows import MemoryRow
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.solver import FORBIDDEN, Problem, Solution
from autopar.passes.solver.flat import Flat

Floats = NDArray[np.float64]

MOST_COST = FORBIDDEN // 10  # of all bytes: a strategy that costs more than that is none


def solve_at_price(
    built: StrategyGraph,
    rows: Sequence[MemoryRow],
    price: float,
    solved: Callable[[Problem], Solution],
) -> Solution:
    """The strategies that are best if bytes have a price; the cost is theirs without that.

    Nothing is proven of it: the lower bound is 0.

    Args:
      built: the nodes.
      rows: the values that cost something.
      price: seconds for each byte of a device.
      solved: solves a problem.
    """
    free = to_problem(built, None)
    found = solved(_with_price(free, built, rows, price))
    cost = Flat(free).cost(np.array(found.assignment, np.int64))
    assert cost is not None, "what is forbidden is so with a price as well"
    return replace(found, cost=cost, lower_bound=0, gap=1.0)


def _with_price(
    problem: Problem, built: StrategyGraph, rows: Sequence[MemoryRow], price: float
) -> Problem:
    """The problem with prices; its costs are in a larger unit where they would be too large."""
    known: dict[tuple[object, ...], Floats] = {}
    keys = []
    for row in rows:
        value = row.value
        keys.append((value.shape, value.itemsize, value.layouts, row.times))
        if keys[-1] not in known:
            sizes = [row.bytes_in(layout, built.mesh) for layout in value.layouts]
            known[keys[-1]] = np.array(sizes, np.float64)
    of_byte = price * PICOSECONDS
    unit = math.ceil(sum(known[key].max() for key in keys) * of_byte / MOST_COST) or 1
    costs = [node // unit for node in problem.node_costs]
    for row, key in zip(rows, keys, strict=True):
        added = np.rint(known[key] * (of_byte / unit)).astype(np.int64)
        costs[row.value.node] = costs[row.value.node] + added
    if unit == 1:
        return replace(problem, node_costs=tuple(costs))
    between = [np.where(x < FORBIDDEN, x // unit, FORBIDDEN) for x in problem.edge_costs]
    return replace(problem, node_costs=tuple(costs), edge_costs=tuple(between))
