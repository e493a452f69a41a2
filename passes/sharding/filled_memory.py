"""Between two plans of one program, a small one and a quick one: as much of the quick one as fits.

Layers that are alike change their shardings at the same price of a byte, so of two neighbouring
prices one may leave much memory empty and the other exceed it. What differs between their plans
falls into groups that no cost joins, often a few for each layer. Which of them to take from the
quick plan is a knapsack problem, filled greedily by the seconds that a byte saves (Dantzig,
"Discrete-Variable Extremum Problems", 1957).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.passes.sharding.memory_rows import MemoryRow, row_bytes
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.solver import Problem


@dataclass
class _Group:
    """Nodes that change together: what that saves, and bytes that come or go at times."""

    nodes: list[int] = field(default_factory=list)
    saved: int = 0
    changes: Counter[int] = field(default_factory=Counter)

    def over_time(self, times: int) -> np.ndarray:
        """The bytes that are there more at each time."""
        steps = np.zeros(times, np.int64)
        steps[[*self.changes]] = [*self.changes.values()]
        return np.cumsum(steps)


def filled(
    built: StrategyGraph,
    problem: Problem,
    rows: Sequence[MemoryRow],
    small: Sequence[int],
    quick: Sequence[int],
    limit: int,
) -> tuple[int, ...]:
    """The small plan with groups of nodes as in the quick one, while all keeps within `limit`.

    Args:
      built: the nodes.
      problem: their costs, without memory.
      rows: the values that are counted.
      small: a strategy for each node, none forbidden.
      quick: other strategies.
      limit: bytes of a device, as the rows count them.
    """
    groups = _groups(problem, rows, small, quick)
    _add_savings(groups, problem, small, quick)
    steps = np.zeros(built.time + 2, np.int64)
    for row in rows:
        before, after = (row_bytes(row, built, x) for x in (small, quick))
        steps[row.first] += before
        steps[row.end] -= before
        if before != after:
            changes = groups[_changing(row, groups)].changes
            changes[row.first] += after - before
            changes[row.end] -= after - before
    there, chosen = np.cumsum(steps), list(small)
    found = [group for group in {id(x): x for x in groups.values()}.values() if group.saved > 0]
    more = {id(group): group.over_time(len(there)) for group in found}
    for group in sorted(found, key=lambda x: -x.saved / max(int(more[id(x)].max()), 1)):
        with_group = there + more[id(group)]
        if with_group.max() <= max(limit, there.max()):
            there = with_group
            for node in group.nodes:
                chosen[node] = quick[node]
    return tuple(chosen)


def _groups(
    problem: Problem, rows: Sequence[MemoryRow], small: Sequence[int], quick: Sequence[int]
) -> dict[int, _Group]:
    """For each node that differs, those that a cost or a shared buffer joins it with."""
    differing = [n for n, (a, b) in enumerate(zip(small, quick, strict=True)) if a != b]
    parent = {node: node for node in differing}

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    shared = ((x.value.node, x.same_as.node) for x in rows if x.same_as is not None)
    for a, b in (*problem.edges, *shared):
        if a in parent and b in parent:
            first, second = sorted((root(a), root(b)))
            parent[second] = first
    groups = {node: _Group() for node in differing if parent[node] == node}
    for node in differing:
        groups[root(node)].nodes.append(node)
    return {node: groups[root(node)] for node in differing}


def _add_savings(
    groups: dict[int, _Group], problem: Problem, small: Sequence[int], quick: Sequence[int]
) -> None:
    for node, group in groups.items():
        costs = problem.node_costs[node]
        group.saved += int(costs[small[node]] - costs[quick[node]])
    for (a, b), costs in zip(problem.edges, problem.edge_costs, strict=True):
        if a in groups or b in groups:
            group = groups[a] if a in groups else groups[b]
            group.saved += int(costs[small[a], small[b]] - costs[quick[a], quick[b]])


def _changing(row: MemoryRow, groups: dict[int, _Group]) -> int:
    """A node that differs of those that decide a value's bytes; all of them are in one group."""
    if row.value.node in groups:
        return row.value.node
    assert row.same_as is not None, "what no node decides otherwise has as many bytes"
    return row.same_as.node
