"""The built nodes and edges as the solver's problem: exact integers, and memory over time."""

from __future__ import annotations

import math

import numpy as np

from autopar.passes.sharding.layout import local_shape
from autopar.passes.sharding.peak_memory import FUSION_REACH
from autopar.passes.sharding.scopes import Assigned
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.solver import FORBIDDEN, Problem

PICOSECONDS = 1e12
# Values smaller than the limit over this are left to the check after lowering.
NEGLIGIBLE_SHARE = 2000


def to_problem(built: StrategyGraph, memory_limit: int | None) -> Problem:
    """The problem whose node i is the built node i; with a limit, value holders come after them.

    A holder stands for one value's bytes over its live range: it has one strategy for each size
    that the value can have, tied to its group by forbidden pairs.
    """
    costs = [_picoseconds(np.asarray(node.seconds)) for node in built.nodes]
    edges = list(built.edges)
    edge_costs = [_picoseconds(built.edges[edge]) for edge in edges]
    usages = [np.zeros(len(c), np.int64) for c in costs]
    intervals = [(0, 0)] * len(costs)
    known: dict[tuple[object, ...], list[int]] = {}  # layers have values alike
    if memory_limit is not None:
        for value in built.values:
            key = (value.shape, value.itemsize, value.layouts)
            if key not in known:
                known[key] = _local_bytes(value, built.mesh)
            sizes = known[key]
            if not _takes_memory(value) or max(sizes) * NEGLIGIBLE_SHARE < memory_limit:
                continue
            kinds = sorted(set(sizes))
            holder = len(costs)
            costs.append(np.zeros(len(kinds), np.int64))
            usages.append(np.asarray(kinds, np.int64))
            intervals.append((value.live.first, value.live.last + 1))
            tie = np.full((len(sizes), len(kinds)), FORBIDDEN, np.int64)
            for s, size in enumerate(sizes):
                tie[s, kinds.index(size)] = 0
            edges.append((value.node, holder))
            edge_costs.append(tie)
    return Problem(
        intervals=tuple(intervals),
        node_costs=tuple(costs),
        usages=tuple(usages),
        edges=tuple(edges),
        edge_costs=tuple(edge_costs),
        usage_limit=memory_limit,
    )


def _takes_memory(value: Assigned) -> bool:
    live = value.live
    return live.last > live.first and not (live.fused and live.last - live.first <= FUSION_REACH)


def _local_bytes(value: Assigned, mesh: tuple[int, ...]) -> list[int]:
    return [
        value.itemsize * math.prod(local_shape(value.shape, layout, mesh))
        for layout in value.layouts
    ]


def _picoseconds(seconds: np.ndarray) -> np.ndarray:
    return np.rint(seconds * PICOSECONDS).astype(np.int64)
