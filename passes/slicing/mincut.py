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
    """A value and its readers.

    Args:
      bytes: what a transfer over one boundary costs.
      maker: the node that makes it, or None where the stages that have it are known.
      stages: the stages that have it.
      readers: nodes that read it.
      downward: it may only flow to the same or a lower stage.
      tied: its readers are on the stage of its maker.
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
    """The stage of every node, by `num_stages - 1` minimum cuts.

    Args:
      nodes: what is to be placed.
      values: what the nodes make and read.
      fixed: nodes whose stage is given.
      preferred: nodes whose stage is given unless a downward value forbids it.
      num_stages: how many stages there are.

    Returns:
      For every node its stage; as low as possible where that costs nothing.
    """
    numbers = {node: number for number, node in enumerate(nodes)}
    stage = np.zeros(len(nodes), int)
    for boundary in range(1, num_stages):
        above = _cut(numbers, values, fixed, preferred, boundary, stage)
        stage[above] = boundary
    return {node: int(stage[number]) for node, number in numbers.items()}


def _cut(
    numbers: Mapping[Node, int],
    values: Sequence[CutValue],
    fixed: Mapping[Node, int],
    preferred: Mapping[Node, int],
    boundary: int,
    stage: np.ndarray,
) -> np.ndarray:
    """Numbers of the nodes above a boundary."""
    source, sink = len(numbers), len(numbers) + 1
    joints = itertools.count(len(numbers) + 2)
    firm = sum(value.bytes for value in values) + 1
    infinite = firm * (len(preferred) + 1)
    arcs: list[Arc] = []

    def pin(number: int, above: bool, capacity: int) -> None:
        arcs.append((source, number, capacity) if above else (number, sink, capacity))

    for given, capacity in ((fixed, infinite), (preferred, firm)):
        for node, where in given.items():
            pin(numbers[node], where >= boundary, capacity)
    for number in np.flatnonzero(stage < boundary - 1):  # already below the last boundary
        pin(int(number), False, infinite)
    for value in values:
        readers = [numbers[reader] for reader in value.readers]
        maker = None if value.maker is None else numbers[value.maker]
        if value.tied or value.downward:
            assert maker is not None
            arcs += [(reader, maker, infinite) for reader in readers]
        if value.tied:
            assert maker is not None
            arcs += [(maker, reader, infinite) for reader in readers]
            continue
        low = maker is not None or min(value.stages) < boundary
        high = maker is not None or max(value.stages) >= boundary
        if high and (maker is not None or not low):  # readers below pay
            joint = next(joints)
            arcs.append((source if maker is None else maker, joint, value.bytes))
            arcs += [(joint, reader, infinite) for reader in readers]
        if low and not value.downward and (maker is not None or not high):  # readers above pay
            joint = next(joints)
            arcs.append((joint, sink if maker is None else maker, value.bytes))
            arcs += [(reader, joint, infinite) for reader in readers]
    side = source_side([arc for arc in arcs if arc[0] != arc[1] and arc[2]], source, sink)
    return side[side < len(numbers)]


def source_side(arcs: Sequence[Arc], source: int, sink: int) -> np.ndarray:
    """The nodes before the cheapest cut of a network; of several, the cut next to the source."""
    flow = max_flow.SimpleMaxFlow()
    for tail, head, capacity in ((source, sink, 0), *arcs):  # the first so that both exist
        flow.add_arc_with_capacity(tail, head, capacity)
    status = flow.solve(source, sink)
    assert status == flow.OPTIMAL, status
    return np.array(flow.get_source_side_min_cut())
