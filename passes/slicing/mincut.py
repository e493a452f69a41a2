"""Nested minimum cuts: nodes go to stages so that the fewest bytes cross.

For every boundary k a node is above it (its stage is at least k) or below. What crosses is counted
once per value and boundary, whoever reads it. The boundaries are independent minimum cuts, and
nested: what is below boundary k stays below k + 1 (the capacities of a boundary's network are
monotone in it: Gallo, Grigoriadis and Tarjan, SIAM J. Comput. 1989). So the boundary in the middle
is cut first, and each half has only the nodes that are left between its boundaries.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import max_flow

Node = tuple[Any, ...]
Arc = tuple[int, int, int]  # tail, head, capacity


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
    cuts.between(1, num_stages, range(len(values)))
    return {node: int(cuts.low[number]) for number, node in enumerate(nodes)}


class _Cuts:
    """Boundaries are cut in the middle first; what is above is then settled for those below.

    Attributes:
      low, high: the stages that each node can still be on.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        values: Sequence[CutValue],
        fixed: Mapping[Node, int],
        preferred: Mapping[Node, int],
    ) -> None:
        numbers = {node: number for number, node in enumerate(nodes)}
        self.values = values
        self.readers = [[numbers[reader] for reader in value.readers] for value in values]
        self.makers = [None if x.maker is None else numbers[x.maker] for x in values]
        firm = sum(value.bytes for value in values) + 1
        self.infinite = firm * (len(preferred) + 1)
        self.given = [
            (numbers[node], where, capacity)
            for places, capacity in ((fixed, self.infinite), (preferred, firm))
            for node, where in places.items()
        ]
        self.low = np.zeros(len(nodes), int)
        self.high = np.full(len(nodes), np.iinfo(int).max)

    def between(self, first: int, stop: int, touching: Sequence[int]) -> None:
        """Cut at the boundaries from `first` to `stop`, left out.

        Args:
          first: a boundary.
          stop: a later one.
          touching: all values of which a node is not settled for these boundaries.
        """
        is_open = (self.low < stop - 1) & (self.high >= first)
        if first >= stop or not is_open.any():
            return
        values = self._touching(is_open, touching)
        middle = (first + stop) // 2
        above = self._above(middle, values)
        below = (self.low < middle) & (self.high >= middle)
        below[above] = False
        self.high[below] = middle - 1
        self.low[above] = middle
        self.between(first, middle, values)
        self.between(middle + 1, stop, values)

    def _touching(self, is_open: NDArray[np.bool_], values: Sequence[int]) -> list[int]:
        """The values that one of these nodes makes or reads."""
        return [
            number
            for number in values
            if any(is_open[node] for node in self.readers[number])
            or (self.makers[number] is not None and is_open[self.makers[number]])
        ]

    def _above(self, boundary: int, values: Sequence[int]) -> NDArray[np.intp]:
        """The open nodes that are above a boundary."""
        is_open = (self.low < boundary) & (self.high >= boundary)
        count = int(is_open.sum())
        source, sink = count, count + 1
        ends = np.where(self.low >= boundary, source, sink)
        ends[is_open] = np.arange(count)
        numbers = ends.tolist()
        joints = itertools.count(count + 2)
        arcs: list[Arc] = []
        for node, where, capacity in self.given:
            if is_open[node]:
                pinned = (source, numbers[node]) if where >= boundary else (numbers[node], sink)
                arcs.append((*pinned, capacity))
        for index in values:
            value, of = self.values[index], self.makers[index]
            readers = [numbers[reader] for reader in self.readers[index]]
            maker = None if of is None else numbers[of]
            if value.tied or value.downward:
                assert maker is not None
                arcs += [(reader, maker, self.infinite) for reader in readers]
                if value.tied:
                    arcs += [(maker, reader, self.infinite) for reader in readers]
                    continue
            if maker is not None or min(value.stages) >= boundary:  # readers below pay
                joint = next(joints)
                arcs.append((source if maker is None else maker, joint, value.bytes))
                arcs += [(joint, reader, self.infinite) for reader in readers]
            if value.downward:
                continue
            if maker is not None or max(value.stages) < boundary:  # those above pay
                joint = next(joints)
                arcs.append((joint, sink if maker is None else maker, value.bytes))
                arcs += [(reader, joint, self.infinite) for reader in readers]
        side = source_side([arc for arc in arcs if arc[0] != arc[1] and arc[2]], source, sink)
        return np.flatnonzero(is_open)[side[side < count]]


def source_side(arcs: Sequence[Arc], source: int, sink: int) -> np.ndarray:
    """The nodes before the cheapest cut of a network; of several, the cut next to the source."""
    flow = max_flow.SimpleMaxFlow()
    table = np.array([(source, sink, 0), *arcs])  # the first so that both exist
    flow.add_arcs_with_capacity(table[:, 0], table[:, 1], table[:, 2])
    status = flow.solve(source, sink)
    assert status == flow.OPTIMAL, status
    return np.array(flow.get_source_side_min_cut())
