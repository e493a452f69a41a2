"""What the values of a program hold over time, for the integer program's memory constraint.

A row is one value: its bytes in each layout, between two points of time, as many times as it is
there. In a stage of a pipeline that is the account of the schedule: of what passes between stages
only one microbatch's is ever there, and of what a later task of the same microbatch reads, one for
each microbatch in flight between the two tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.passes.graph.microbatched import InFlight
from autopar.passes.sharding.layout import Layout, local_shape
from autopar.passes.sharding.peak_memory import FUSION_REACH
from autopar.passes.sharding.scopes import Assigned
from autopar.passes.sharding.strategy_graph import StrategyGraph


@dataclass(frozen=True)
class StageMemory:
    """What decides how often a stage's values are there: microbatches in flight, and remat.

    With `remat`, the backward pass computes all of the forward pass again; else, `at_once`, both
    are one task.
    """

    in_flight: InFlight
    remat: bool = False
    at_once: bool = False


class MemoryRow(NamedTuple):
    """A value that is there `times` times from `first` up to (not including) `end`."""

    value: Assigned
    first: int
    end: int
    times: int

    @property
    def same_as(self) -> Assigned | None:
        """The value that is there as long, and whose buffer this one is in its layout."""
        other = self.value.live.same_as
        return other if other is not None and other.live.last >= self.value.live.last else None

    def bytes_in(self, layout: Layout, mesh: tuple[int, ...]) -> int:
        """What a device holds if the value has this layout."""
        if layout.in_host:
            return 0
        shape = local_shape(self.value.shape, layout, mesh)
        return self.times * self.value.itemsize * math.prod(shape)


def memory_rows(built: StrategyGraph, memory: StageMemory | None = None) -> list[MemoryRow]:
    """The rows of a program; `memory` if it is a stage of a pipeline."""
    rows = (_row(value, built, memory) for value in built.values)
    return [row for row in rows if row is not None]


def row_bytes(row: MemoryRow, built: StrategyGraph, assignment: Sequence[int]) -> int:
    """What a device holds for a value with one strategy for each node."""
    value, other = row.value, row.same_as
    layout = value.layouts[assignment[value.node]]
    if other is not None and other.layouts[assignment[other.node]] == layout:
        return 0
    return row.bytes_in(layout, built.mesh)


def rows_peak(built: StrategyGraph, rows: Sequence[MemoryRow], assignment: Sequence[int]) -> int:
    """Bytes per device at the worst point of time with one strategy for each node."""
    changes = np.zeros(built.time + 2, np.int64)
    for row in rows:
        size = row_bytes(row, built, assignment)
        changes[row.first] += size
        changes[row.end] -= size
    return int(np.cumsum(changes).max(initial=0))


def _row(value: Assigned, built: StrategyGraph, memory: StageMemory | None) -> MemoryRow | None:
    live, body = value.live, built.body
    if live.absent or live.made_again or live.last <= live.first:
        return None
    is_inside = body is not None and body.start < live.first <= live.last <= body.end
    if memory is not None and body is not None and is_inside:
        made, read = body.task_at(live.first), body.task_at(live.last)
        if memory.remat and made == "F" and not live.entering:
            made = min(read, "B", key="FBW".index)  # the later task makes it again
        elif memory.at_once and not memory.remat:
            made, read = (max(task, "B", key="FBW".index) for task in (made, read))
        if made != read:
            return MemoryRow(value, body.start, body.end + 1, memory.in_flight[made, read])
    if live.fused and live.last - live.first <= FUSION_REACH:
        return None
    first = live.first if memory is not None or live.since is None else live.since
    return MemoryRow(value, first, live.last + 1, 1)
