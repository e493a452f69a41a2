"""Nested minimum cuts: nodes go to stages so that the fewest bytes cross.

For every boundary k a node is above it (its stage is at least k) or below. What crosses is counted
once per value and boundary, whoever reads it. The boundaries are independent minimum cuts, and
nested: what is below boundary k stays below k + 1 (the capacities of a boundary's network are
monotone in it: Gallo, Grigoriadis and Tarjan, SIAM J. Comput. 1989). So the boundary in the middle
is cut first, and each half has only the nodes that are left between its boundaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import max_flow

Node = tuple[Any, ...]
Arc = tuple[int, int, int]  # tail, head, capacity
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True)
class CutValue:
    """A value, what a transfer of it over one boundary costs, and the nodes that read it.

    `maker` makes it, or is None where the stages that have it are known. A `downward` value may
    only flow to the same or a lower stage; if it is `tied`, its readers are on its maker's stage.
    """

    bytes: int
    readers: tuple[Node, ...]
    maker: Node | None = None
    stages: tuple[int, ...] = ()
    downward: bool = False
    tied: bool = False


def place(
    nodes: Sequence[Node],
    values: Sequence[CutValue],
    fixed: Mapping[Node, int],
    preferred: Mapping[Node, int],
    num_stages: int,
) -> dict[Node, int]:
    """The stage of every node, by minimum cuts at its boundaries; low where that costs nothing.

    Stages of `fixed` nodes are given, and of `preferred` ones unless a downward value forbids it.
    """
    cuts = _Cuts(nodes, values, fixed, preferred)
    cuts.between(1, num_stages, np.ones(len(values), bool))
    return {node: int(cuts.low[number]) for number, node in enumerate(nodes)}


class _Cuts:
    """Boundaries are cut in the middle first; what is above is then settled for those below.

    Attributes:
      low, high: the stages that each node can still be on.
      readers, read: for each reading of a value, the numbers of the node and of the value.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        values: Sequence[CutValue],
        fixed: Mapping[Node, int],
        preferred: Mapping[Node, int],
    ) -> None:
        numbers = {node: number for number, node in enumerate(nodes)}
        firm = sum(value.bytes for value in values) + 1
        self.infinite = firm * (len(preferred) + 1)
        given = [
            (numbers[node], where, capacity)
            for places, capacity in ((fixed, self.infinite), (preferred, firm))
            for node, where in places.items()
        ]
        self.given = np.array(given, np.int64).reshape(-1, 3).T
        self.bytes = np.array([x.bytes for x in values], np.int64)
        makers = [-1 if x.maker is None else numbers[x.maker] for x in values]
        self.makers = np.array(makers, np.int64)
        self.is_made = self.makers >= 0
        self.lowest = np.array([min(x.stages, default=0) for x in values], np.int64)
        self.highest = np.array([max(x.stages, default=0) for x in values], np.int64)
        self.tied = np.array([x.tied for x in values], bool)
        self.downward = np.array([x.downward for x in values], bool)
        assert self.is_made[self.tied | self.downward].all()
        self.readers = np.array([numbers[node] for x in values for node in x.readers], np.int64)
        counts = np.array([len(x.readers) for x in values], np.int64)
        self.read = np.repeat(np.arange(len(values)), counts)
        self.low = np.zeros(len(nodes), int)
        self.high = np.full(len(nodes), np.iinfo(int).max)

    def between(self, first: int, stop: int, touching: Booleans) -> None:
        """Cut at the boundaries from `first` to `stop`, left out.

        Args:
          first: a boundary.
          stop: a later one.
          touching: whether values have a node that is not settled for these boundaries.
        """
        is_open = (self.low < stop - 1) & (self.high >= first)
        if first >= stop or not is_open.any():
            return
        values = touching & self._touched(is_open)
        middle = (first + stop) // 2
        above = self._above(middle, values)
        below = (self.low < middle) & (self.high >= middle)
        below[above] = False
        self.high[below] = middle - 1
        self.low[above] = middle
        self.between(first, middle, values)
        self.between(middle + 1, stop, values)

    def _touched(self, nodes: Booleans) -> Booleans:
        """The values that one of these nodes makes or reads."""
        touched = self.is_made & nodes[self.makers]
        touched[self.read[nodes[self.readers]]] = True
        return touched

    def _above(self, boundary: int, values: Booleans) -> NDArray[np.intp]:
        """The open nodes that are above a boundary."""
        is_open = (self.low < boundary) & (self.high >= boundary)
        count = int(is_open.sum())
        source, sink = count, count + 1
        ends = np.where(self.low >= boundary, source, sink)
        ends[is_open] = np.arange(count)
        there = np.flatnonzero(values[self.read])
        readers, read = ends[self.readers[there]], self.read[there]
        makers = ends[self.makers]  # of values that are made
        arcs: list[tuple[Any, Any, Any]] = [(source, sink, 0)]  # so that both exist

        node, where, capacity = self.given[:, is_open[self.given[0]]]
        pinned = where >= boundary
        arcs.append((source, ends[node[pinned]], capacity[pinned]))
        arcs.append((ends[node[~pinned]], sink, capacity[~pinned]))
        of = self.tied[read] | self.downward[read]
        arcs.append((readers[of], makers[read[of]], self.infinite))
        of = self.tied[read]
        arcs.append((makers[read[of]], readers[of], self.infinite))

        loose, joints = values & ~self.tied, np.zeros(len(values), np.int64)
        paid = loose & (self.is_made | (self.lowest >= boundary))  # by readers below
        joints[paid] = sink + 1 + np.arange(np.count_nonzero(paid))
        tails = np.where(self.is_made, makers, source)
        arcs.append((tails[paid], joints[paid], self.bytes[paid]))
        of = paid[read]
        arcs.append((joints[read[of]], readers[of], self.infinite))

        next_joint = sink + 1 + np.count_nonzero(paid)
        paid = loose & ~self.downward & (self.is_made | (self.highest < boundary))  # by those above
        joints[paid] = next_joint + np.arange(np.count_nonzero(paid))
        heads = np.where(self.is_made, makers, sink)
        arcs.append((joints[paid], heads[paid], self.bytes[paid]))
        of = paid[read]
        arcs.append((readers[of], joints[read[of]], self.infinite))

        columns = [np.broadcast_arrays(*map(np.atleast_1d, arc)) for arc in arcs]
        tail, head, capacity = (np.concatenate(parts) for parts in zip(*columns, strict=True))
        kept = (tail != head) & (capacity > 0)
        kept[0] = True
        side = _source_side(tail[kept], head[kept], capacity[kept], source, sink)
        return np.flatnonzero(is_open)[side[side < count]]


def source_side(arcs: Sequence[Arc], source: int, sink: int) -> Integers:
    """The nodes before the cheapest cut of a network; of several, the cut next to the source."""
    table = np.array([(source, sink, 0), *arcs])  # the first so that both exist
    return _source_side(table[:, 0], table[:, 1], table[:, 2], source, sink)


def _source_side(
    tails: Integers, heads: Integers, capacities: Integers, source: int, sink: int
) -> Integers:
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(tails, heads, capacities)
    status = flow.solve(source, sink)
    assert status == flow.OPTIMAL, status
    return np.array(flow.get_source_side_min_cut())
