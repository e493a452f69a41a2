"""Nested minimum cuts: nodes go to stages so that the fewest bytes cross.

For every boundary k a node is above it (its stage is at least k) or below. What crosses is counted
once per value and boundary, whoever reads it. The boundaries are independent minimum cuts, and
nested: what is below boundary k stays below k + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.graph.python import max_flow

Node = tuple[Any, ...]


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
    following = len(numbers) + 2
    tails: list[int] = []
    heads: list[int] = []
    capacities: list[int] = []
    firm = sum(value.bytes for value in values) + 1
    infinite = firm * (len(preferred) + 1)

    def arc(tail: int, head: int, capacity: int) -> None:
        if tail != head and capacity:
            tails.append(tail)
            heads.append(head)
            capacities.append(capacity)

    def pin(number: int, above: bool, capacity: int) -> None:
        arc(*((source, number) if above else (number, sink)), capacity)

    for node, where in fixed.items():
        pin(numbers[node], where >= boundary, infinite)
    for node, where in preferred.items():
        pin(numbers[node], where >= boundary, firm)
    for number in range(len(numbers)):
        if stage[number] < boundary - 1:  # already below the last boundary
            pin(number, False, infinite)
    for value in values:
        readers = [numbers[reader] for reader in value.readers]
        maker = None if value.maker is None else numbers[value.maker]
        if maker is None:
            low, high = min(value.stages) < boundary, max(value.stages) >= boundary
        if value.tied:
            assert maker is not None
            for reader in readers:
                arc(maker, reader, infinite)
                arc(reader, maker, infinite)
            continue
        joint = following
        following += 2
        if maker is not None or (high and not low):  # readers below pay
            arc(source if maker is None else maker, joint, value.bytes)
            for reader in readers:
                arc(joint, reader, infinite)
        if value.downward:
            assert maker is not None
            for reader in readers:
                arc(reader, maker, infinite)
        elif maker is not None or (low and not high):  # readers above pay
            arc(joint + 1, sink if maker is None else maker, value.bytes)
            for reader in readers:
                arc(reader, joint + 1, infinite)
    if not tails:
        return np.zeros(0, int)
    side = source_side(tails, heads, capacities, source, sink)
    return side[side < len(numbers)]


def source_side(
    tails: Sequence[int], heads: Sequence[int], capacities: Sequence[int], source: int, sink: int
) -> np.ndarray:
    """The nodes before the cheapest cut of a network; of several, the cut next to the source."""
    flow = max_flow.SimpleMaxFlow()
    flow.add_arc_with_capacity(source, sink, 0)  # so that both exist
    flow.add_arcs_with_capacity(
        np.array(tails, np.int32), np.array(heads, np.int32), np.array(capacities, np.int64)
    )
    status = flow.solve(source, sink)
    assert status == flow.OPTIMAL, status
    return np.array(flow.get_source_side_min_cut())
