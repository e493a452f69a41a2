"""The integer program in which bytes have a price instead of a limit.

Every value costs what a device holds of it, times a price, wherever it is in time. That is one more
number for each strategy of a node, so the program is as quickly solved as one without a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.passes.sharding.integer_program import PICOSECONDS, to_problem
from autopar.passes.sharding.memory_rows import MemoryRow
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.solver import Problem, Solution


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
    problem = _with_price(free, built, rows, price)
    found = solved(problem)
    both = zip(problem.node_costs, free.node_costs, found.assignment, strict=True)
    paid = sum(int(with_bytes[s] - alone[s]) for with_bytes, alone, s in both)
    return replace(found, cost=found.cost - paid, lower_bound=0, gap=1.0)


def _with_price(
    problem: Problem, built: StrategyGraph, rows: Sequence[MemoryRow], price: float
) -> Problem:
    costs = list(problem.node_costs)
    known: dict[tuple[object, ...], np.ndarray] = {}
    for row in rows:
        value = row.value
        key = (value.shape, value.itemsize, value.layouts, row.times)
        if key not in known:
            sizes = [row.bytes_in(layout, built.mesh) for layout in value.layouts]
            known[key] = np.rint(np.array(sizes) * (price * PICOSECONDS)).astype(np.int64)
        costs[value.node] = costs[value.node] + known[key]
    return replace(problem, node_costs=tuple(costs))
