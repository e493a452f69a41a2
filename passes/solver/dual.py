"""Lower bounds by message passing, with a price per unit of memory at every point of time.

Memory is relaxed: with prices `p >= 0` per point, a strategy costs its usage times the prices of
the points where it holds, and `sum(p * room)` is subtracted. What remains is a sum of node and edge
costs, of which sequential reweighted message passing computes a bound (V. Kolmogorov, "A new look
at reweighted message passing", 2015): a message per slot moves cost between an edge and its nodes,
so the sum of all minima, of edges and of nodes, is a lower bound whatever the messages are.

A pass goes over all levels. At a node it first *pulls* from the edges before it what they cost at
least, then *pushes* to each edge after it an equal part of what the node has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.passes.solver.arrays import Arrays, Floats, Side
from autopar.passes.solver.problem import Integers


@dataclass(frozen=True)
class Level:
    """A level in a pass, between its pull and its push; slots and cells are those before it."""

    nodes: slice
    strategies: slice
    slots: slice
    cells: slice
    costs: Floats  # [strategies of the level] what its nodes have
    left: Floats  # [cells] what the edges before would have kept without the pull
    pulled: Floats  # [slots] what each of their slots gave


@dataclass(frozen=True)
class DualState:
    """Prices and messages, and what they make of the node costs."""

    prices: Floats
    low: Floats
    high: Floats
    nodes: Floats
    priced: Floats


Visitor = Callable[[Level, Side], None]
"""Something that looks at each level in a pass, with the edges before it."""


class Dual:
    """Messages and prices of a model, improved by `sweep`; bounds leave out the model's offset."""

    def __init__(self, arrays: Arrays, prices: Floats | None = None) -> None:
        self.arrays = arrays
        self.low = np.zeros(len(arrays.low.slot_start))  # messages per slot: cost moved to nodes
        self.high = np.zeros(len(arrays.high.slot_start))
        self.prices = np.zeros(len(arrays.room))
        self.priced = arrays.costs.copy()  # node costs with prices
        self.nodes = self.priced.copy()  # `priced` plus all messages to the node
        degree = np.maximum(arrays.low.node_degree, arrays.high.node_degree)
        self.share = 1.0 / np.maximum(degree, 1)[arrays.owner]
        after = arrays.low.node_degree[arrays.owner] * self.share
        before = arrays.high.node_degree[arrays.owner] * self.share
        self.left_after, self.left_before = 1.0 - after, 1.0 - before
        if prices is not None:
            self.set_prices(prices)

    def state(self) -> DualState:
        """A copy of prices and messages, for `restore`."""
        return DualState(
            self.prices, self.low.copy(), self.high.copy(), self.nodes.copy(), self.priced
        )

    def restore(self, state: DualState) -> None:
        """Goes back to an earlier state."""
        self.prices, self.priced = state.prices, state.priced
        self.low[:], self.high[:], self.nodes[:] = state.low, state.high, state.nodes

    def set_prices(self, prices: Floats) -> None:
        self.prices = prices
        priced = self.arrays.costs + self.price_costs(prices)
        self.nodes += priced - self.priced
        self.priced = priced

    def add_messages(self, low: Floats, high: Floats) -> None:
        """Moves that much more cost, per slot, from edges to nodes; the next `sweep` is a bound."""
        arrays = self.arrays
        self.low += low
        self.high += high
        self.nodes += np.bincount(arrays.low.slot_node, low, len(self.nodes))
        self.nodes += np.bincount(arrays.high.slot_node, high, len(self.nodes))

    def price_costs(self, prices: Floats) -> Floats:
        """What the prices add to the cost of each strategy."""
        arrays = self.arrays
        amounts = arrays.usage * arrays.in_rows(prices)[arrays.usage_row]
        added = np.bincount(arrays.usage_strategy, amounts, len(arrays.costs))
        return added.astype(np.float64, copy=False)

    def sweep(self, forward: bool, visit: Visitor | None = None) -> float:
        """One pass; returns the bound after it, in floating point."""
        arrays = self.arrays
        before, after = (arrays.high, arrays.low) if forward else (arrays.low, arrays.high)
        from_before, from_after = (self.high, self.low) if forward else (self.low, self.high)
        left = self.left_after if forward else self.left_before
        nodes, share = self.nodes, self.share
        levels = range(arrays.num_levels)
        for index in levels if forward else reversed(levels):
            n0, n1 = arrays.level_nodes[index : index + 2]
            f0, f1 = arrays.first[n0], arrays.first[n1]
            s0, s1 = before.level_slots[index : index + 2]
            c0, c1 = before.level_cells[index : index + 2]
            here = nodes[f0:f1]
            cells = before.cells[c0:c1]
            pulled = from_before[s0:s1]
            if s1 > s0:
                cells = cells - from_after.take(before.cell_far_slot[c0:c1])
                pulled = np.minimum.reduceat(cells, before.level_starts[index])
                change = pulled - from_before[s0:s1]
                from_before[s0:s1] = pulled
                here += np.bincount(before.slot_node[s0:s1] - f0, change, f1 - f0)
            if visit is not None:
                level = Level(
                    slice(n0, n1), slice(f0, f1), slice(s0, s1), slice(c0, c1), here, cells, pulled
                )
                visit(level, before)
            s0, s1 = after.level_slots[index : index + 2]
            if s1 > s0:
                pushed = here * share[f0:f1]
                from_after[s0:s1] -= pushed.take(after.slot_node[s0:s1] - f0)
                here *= left[f0:f1]
        # Each edge was pulled empty after its last push, so the nodes hold all that is left.
        bound = float(np.minimum.reduceat(nodes, arrays.first[:-1]).sum())
        return bound - float((self.prices * arrays.room).sum())


class Chooser:
    """Makes a choice along a pass: at each node what is cheapest given the nodes before it.

    The nodes after it enter by their messages, memory by the prices only.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.choice = np.zeros(arrays.num_nodes, np.int64)

    def __call__(self, level: Level, before: Side) -> None:
        arrays, start = self.arrays, level.strategies.start
        far = before.slot_far[level.slots]
        cells = before.cells[before.slot_start[level.slots] + self.choice[far] - arrays.first[far]]
        conditional = level.costs + np.bincount(
            before.slot_node[level.slots] - start, cells - level.pulled, len(level.costs)
        )
        self.choice[level.nodes] = start + first_least(
            conditional, arrays.first[level.nodes] - start
        )


class Excesses:
    """Finds along a pass how much more than the bound each strategy and each pair costs at least.

    The bound is the one before the pass, which no pull or push makes smaller. Just after its pull,
    a node has all that its edges before could give and they have nothing left, so what a strategy
    has above the node's least, and a pair above zero, is what choosing it would add.
    """

    def __init__(self, dual: Dual) -> None:
        self.dual = dual
        arrays = dual.arrays
        self.strategies = np.zeros(len(arrays.costs))
        self.pairs = np.zeros(len(arrays.high.cells))  # in the order of `high`, or of `low`

    def __call__(self, level: Level, before: Side) -> None:
        arrays, nodes = self.dual.arrays, self.dual.nodes
        start = level.strategies.start
        starts = arrays.first[level.nodes] - start
        sizes = np.diff(np.append(starts, len(level.costs)))
        excess = level.costs - np.repeat(np.minimum.reduceat(level.costs, starts), sizes)
        self.strategies[level.strategies] = excess
        if level.slots.stop > level.slots.start:
            near = excess[before.slot_node[level.slots] - start] - level.pulled
            widths = before.slot_size[level.slots]
            far = before.slot_far[level.slots]
            least = np.minimum.reduceat(nodes, arrays.first[:-1])
            offset = np.repeat(near - least[far], widths)
            position = (
                np.arange(level.cells.start, level.cells.stop)
                - np.repeat(before.slot_start[level.slots], widths)
                + np.repeat(arrays.first[far], widths)
            )
            self.pairs[level.cells] = level.left + offset + nodes[position]


def first_least(values: Floats, starts: Integers) -> Integers:
    """The index of the first least value of each segment."""
    least = np.minimum.reduceat(values, starts)
    sizes = np.diff(np.append(starts, len(values)))
    hits = np.flatnonzero(values == np.repeat(least, sizes))
    return hits[np.searchsorted(hits, starts)]
