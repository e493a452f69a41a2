"""The built nodes and edges as the solver's problem: exact integers, and memory over time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from autopar.passes.sharding.layout import Layout
from autopar.passes.sharding.memory_rows import MemoryRow, memory_rows
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.solver import FORBIDDEN, Problem
from autopar.passes.solver.problem import Integers

PICOSECONDS = 1e12
# Values smaller than the limit over this are left to the check after lowering.
NEGLIGIBLE_SHARE = 2000


def to_problem(
    built: StrategyGraph, memory_limit: int | None, rows: Sequence[MemoryRow] | None = None
) -> Problem:
    """The problem whose node i is the built node i; with a limit, value holders come after them.

    A holder stands for one of the `rows` (None: those of the program alone): one value's bytes over
    its live range. It has one strategy for each size that the value can have, tied to its group by
    forbidden pairs; where the value may be another one's buffer, also one without bytes for each
    layout in which it is.
    """
    costs = [_picoseconds(np.asarray(node.seconds)) for node in built.nodes]
    edges = list(built.edges)
    edge_costs = [_picoseconds(built.edges[edge]) for edge in edges]
    usages = [np.zeros(len(c), np.int64) for c in costs]
    intervals = [(0, 0)] * len(costs)
    if memory_limit is None:
        rows = ()
    known: dict[tuple[object, ...], list[int]] = {}  # layers have values alike
    for row in memory_rows(built) if rows is None else rows:
        value, other = row.value, row.same_as
        key = (value.shape, value.itemsize, value.layouts, row.times)
        if key not in known:
            known[key] = [row.bytes_in(layout, built.mesh) for layout in value.layouts]
        sizes = known[key]
        assert memory_limit is not None
        if _is_negligible(sizes, memory_limit):
            continue
        shared = [] if other is None else [x for x in value.layouts if x in other.layouts]
        kinds: list[int | Layout] = [*sorted(set(sizes)), *dict.fromkeys(shared)]
        holder = len(costs)
        costs.append(np.zeros(len(kinds), np.int64))
        usages.append(np.asarray([x if isinstance(x, int) else 0 for x in kinds], np.int64))
        intervals.append((row.first, row.end))
        own: list[set[int | Layout]] = [
            {size, layout} for size, layout in zip(sizes, value.layouts, strict=True)
        ]
        edges.append((value.node, holder))
        edge_costs.append(_tie(own, kinds))
        if other is not None and shared:
            theirs: list[set[int | Layout]] = [{*sizes, layout} for layout in other.layouts]
            edges.append((other.node, holder))
            edge_costs.append(_tie(theirs, kinds))
    return Problem(
        intervals=tuple(intervals),
        node_costs=tuple(costs),
        usages=tuple(usages),
        edges=tuple(edges),
        edge_costs=tuple(edge_costs),
        usage_limit=memory_limit,
    )


def counted_rows(
    built: StrategyGraph, rows: Sequence[MemoryRow], memory_limit: int
) -> list[MemoryRow]:
    """The rows that the problem with such a limit counts."""
    return [
        row
        for row in rows
        if not _is_negligible(
            [row.bytes_in(layout, built.mesh) for layout in row.value.layouts], memory_limit
        )
    ]


def _is_negligible(sizes: Sequence[int], memory_limit: int) -> bool:
    return max(sizes) * NEGLIGIBLE_SHARE < memory_limit


def _tie(allowed: Sequence[Collection[int | Layout]], kinds: Sequence[int | Layout]) -> Integers:
    """Forbidden pairs of a node's strategies and a holder's `kinds`, but for those `allowed`."""
    return np.array([[0 if k in may else FORBIDDEN for k in kinds] for may in allowed], np.int64)


def _picoseconds(seconds: np.ndarray) -> np.ndarray:
    return np.rint(seconds * PICOSECONDS).astype(np.int64)
