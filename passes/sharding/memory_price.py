"""The integer program in which bytes have a price instead of a limit.

Every value costs what a device holds of it, times a price, wherever it is in time. That is one more
number for each strategy of a node, or for each pair of two nodes' where a value may be another
one's buffer, so the program is as quickly solved as one without a limit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.passes.sharding.filled_memory import filled
from autopar.passes.sharding.integer_program import PICOSECONDS, to_problem
from autopar.passes.sharding.layout import Layout
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
        places = {edge: place for place, edge in enumerate(self.free.edges)}
        self._of_nodes: list[tuple[int, Floats]] = []
        self._of_edges: list[tuple[int, Floats]] = []
        for row in rows:
            value, other = row.value, row.same_as
            key = (value.shape, value.itemsize, value.layouts, row.times)
            if key not in known:
                sizes = [row.bytes_in(layout, built.mesh) for layout in value.layouts]
                known[key] = np.array(sizes, np.float64)
            own = known[key]
            if other is not None and (pair := (other.node, value.node)) in places:
                first, second = _numbered(other.layouts, value.layouts)
                self._of_edges.append((places[pair], (first[:, None] != second) * own))
                continue
            if other is not None and other.node == value.node:
                own = np.not_equal(*_numbered(other.layouts, value.layouts)) * own
            self._of_nodes.append((value.node, own))
        priced = (*self._of_nodes, *self._of_edges)
        self._most = sum(float(sizes.max()) for _, sizes in priced)

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
        for node, sizes in self._of_nodes:
            costs[node] = costs[node] + np.rint(sizes * (of_byte / unit)).astype(np.int64)
        between = list(problem.edge_costs)
        if unit > 1:
            between = [np.where(x < FORBIDDEN, x // unit, FORBIDDEN) for x in between]
        for place, sizes in self._of_edges:
            added = np.rint(sizes * (of_byte / unit)).astype(np.int64)
            forbidden = between[place] >= FORBIDDEN
            between[place] = np.where(forbidden, FORBIDDEN, between[place] + added)
        return replace(problem, node_costs=tuple(costs), edge_costs=tuple(between))


def _numbered(*groups: Sequence[Layout]) -> list[NDArray[np.int64]]:
    """The same numbers for the same layouts."""
    numbers = {
        layout: number for number, layout in enumerate(dict.fromkeys(itertools.chain(*groups)))
    }
    return [np.array([numbers[layout] for layout in group]) for group in groups]


def solve_at_price(
    built: StrategyGraph,
    rows: Sequence[MemoryRow],
    price: float,
    solved: Callable[[Problem], Solution],
) -> Solution:
    """`MemoryPrices.solved` for a single price."""
    return MemoryPrices(built, rows).solved(price, solved)
