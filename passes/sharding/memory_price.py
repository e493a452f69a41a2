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

from autopar.passes.sharding.filled_memory import filled
from autopar.passes.sharding.integer_program import PICOSECONDS, to_problem
from autopar.passes.sharding.memory_rows import MemoryRow
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.solver import FORBIDDEN, Problem, Solution
from autopar.passes.solver.flat import Flat

Floats = NDArray[np.float64]

MOST_COST = FORBIDDEN // 10  # of all bytes: a strategy that costs more than that is none


class MemoryPrices:
    """A program whose bytes may have a price: what all prices have in common.

    Args:
      built: the nodes.
      rows: the values that cost something.
    """

    def __init__(self, built: StrategyGraph, rows: Sequence[MemoryRow]) -> None:
        self.built, self.rows = built, rows
        self.free = to_problem(built, None)
        self._flat = Flat(self.free)
        known: dict[tuple[object, ...], Floats] = {}
        self._sizes: list[Floats] = []
        for row in rows:
            value = row.value
            key = (value.shape, value.itemsize, value.layouts, row.times)
            if key not in known:
                sizes = [row.bytes_in(layout, built.mesh) for layout in value.layouts]
                known[key] = np.array(sizes, np.float64)
            self._sizes.append(known[key])
        self._most = sum(float(sizes.max()) for sizes in self._sizes)

    def solved(self, price: float, solve: Callable[[Problem], Solution]) -> Solution:
        """The strategies that are best if bytes have a price; the cost is theirs without that.

        Nothing is proven of it: the lower bound is 0.

        Args:
          price: seconds for each byte of a device.
          solve: solves a problem.
        """
        found = solve(self._with_price(price))
        return replace(found, cost=self.cost(found.assignment), lower_bound=0, gap=1.0)

    def filled(self, small: Solution, quick: Solution, limit: int) -> Solution:
        """As much of a quick plan as fits, of a small one the rest; what is proven is the latter's.

        Args:
          small: a plan.
          quick: one that takes less time, and more bytes.
          limit: bytes of a device, as the rows count them.
        """
        plans = small.assignment, quick.assignment
        found = filled(self.built, self.free, self.rows, *plans, limit)
        return replace(small, assignment=found, cost=self.cost(found))

    def cost(self, assignment: Sequence[int]) -> int:
        """Of strategies that are not forbidden, without a price."""
        cost = self._flat.cost(np.array(assignment, np.int64))
        assert cost is not None, "what is forbidden is so with a price as well"
        return cost

    def _with_price(self, price: float) -> Problem:
        """The problem with prices; its costs are in a larger unit where they would be too large."""
        problem, of_byte = self.free, price * PICOSECONDS
        unit = math.ceil(self._most * of_byte / MOST_COST) or 1
        costs = [node // unit for node in problem.node_costs]
        for row, sizes in zip(self.rows, self._sizes, strict=True):
            added = np.rint(sizes * (of_byte / unit)).astype(np.int64)
            costs[row.value.node] = costs[row.value.node] + added
        if unit == 1:
            return replace(problem, node_costs=tuple(costs))
        between = [np.where(x < FORBIDDEN, x // unit, FORBIDDEN) for x in problem.edge_costs]
        return replace(problem, node_costs=tuple(costs), edge_costs=tuple(between))


def solve_at_price(
    built: StrategyGraph,
    rows: Sequence[MemoryRow],
    price: float,
    solved: Callable[[Problem], Solution],
) -> Solution:
    """`MemoryPrices.solved` for a single price."""
    return MemoryPrices(built, rows).solved(price, solved)
