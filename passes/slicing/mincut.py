"""Nested minimum cuts: nodes go to stages so that the fewest bytes cross.

For every boundary k a node is above it (its stage is at least k) or below. What crosses is counted
once per value and boundary, whoever reads it. The boundaries are independent minimum cuts, and
nested: what is below boundary k stays below k + 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
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
    """The stage of every node, by `num_stages - 1` minimum cuts; low where that costs nothing.

    Stages of `fixed` nodes are given, and of `preferred` ones unless a downward value forbids it.
    """
    numbers = {node: number for number, node in enumerate(nodes)}
    source, sink = len(nodes), len(nodes) + 1
    firm = sum(value.bytes for value in values) + 1
    infinite = firm * (len(preferred) + 1)
    stage = np.zeros(len(nodes), int)
    for boundary in range(1, num_stages):
        joints = itertools.count(len(nodes) + 2)
        arcs: list[Arc] = []
        for given, capacity in ((fixed, infinite), (preferred, firm)):
            for node, where in given.items():
                number = numbers[node]
                pinned = (source, number) if where >= boundary else (number, sink)
                arcs.append((*pinned, capacity))
        # Already below the last boundary:
        arcs += [(int(number), sink, infinite) for number in np.flatnonzero(stage < boundary - 1)]
        for value in values:
            readers = [numbers[reader] for reader in value.readers]
            maker = None if value.maker is None else numbers[value.maker]
            if value.tied or value.downward:
                assert maker is not None
                arcs += [(reader, maker, infinite) for reader in readers]
                if value.tied:
                    arcs += [(maker, reader, infinite) for reader in readers]
                    continue
            if maker is not None or min(value.stages) >= boundary:  # readers below pay
                joint = next(joints)
                arcs.append((source if maker is None else maker, joint, value.bytes))
                arcs += [(joint, reader, infinite) for reader in readers]
            if value.downward:
                continue
            if maker is not None or max(value.stages) < boundary:  # those above pay
                joint = next(joints)
                arcs.append((joint, sink if maker is None else maker, value.bytes))
                arcs += [(reader, joint, infinite) for reader in readers]
        side = source_side([arc for arc in arcs if arc[0] != arc[1] and arc[2]], source, sink)
        stage[side[side < len(nodes)]] = boundary
    return {node: int(stage[number]) for node, number in numbers.items()}


def source_side(arcs: Sequence[Arc], source: int, sink: int) -> np.ndarray:
    """The nodes before the cheapest cut of a network; of several, the cut next to the source."""
    flow = max_flow.SimpleMaxFlow()
    for tail, head, capacity in ((source, sink, 0), *arcs):  # the first so that both exist
        flow.add_arc_with_capacity(tail, head, capacity)
    status = flow.solve(source, sink)
    assert status == flow.OPTIMAL, status
    return np.array(flow.get_source_side_min_cut())
