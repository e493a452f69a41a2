"""The problem: one strategy per node, costs on nodes and edges, memory over time under a limit.

This is the form in which the ASPLOS / EuroSys 2025 contest on intra-operator parallelism poses it.
Everything here is exact: costs and usages are 64-bit integers, sums are Python integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.base.errors import AutoparError

Integers = NDArray[np.int64]

FORBIDDEN = 10**18
"""A cost of this size or more means that the strategy, or the pair of strategies, is forbidden."""


class ProblemError(AutoparError, ValueError):
    """The problem is malformed; the message names the node or edge and what is wrong with it."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Choose one strategy per node so that cost is least and memory stays under a limit.

    Args:
        intervals: per node, the half-open interval `[start, end)` of time in which it is alive.
            An empty interval uses no memory.
        node_costs: per node, int64 `[strategies]`.
        usages: per node, int64 `[strategies]`, not negative: what the node uses while it is alive.
        edges: pairs of node indices; the same pair may occur more than once.
        edge_costs: per edge `(u, v)`, int64 `[strategies of u, strategies of v]`.
        usage_limit: what the usages of the nodes alive at any time may add up to; None: no limit.
        name: what messages and reports call the problem.

    Raises:
        ProblemError: if lengths, shapes, indices or signs don't fit together.
    """

    intervals: tuple[tuple[int, int], ...]
    node_costs: tuple[Integers, ...]
    usages: tuple[Integers, ...]
    edges: tuple[tuple[int, int], ...]
    edge_costs: tuple[Integers, ...]
    usage_limit: int | None = None
    name: str = "problem"

    def __post_init__(self) -> None:
        count = self.num_nodes
        if len(self.intervals) != count or len(self.usages) != count:
            raise ProblemError(
                f"{count} nodes have costs, {len(self.intervals)} have intervals and "
                f"{len(self.usages)} have usages: the three must be as many"
            )
        if len(self.edges) != len(self.edge_costs):
            raise ProblemError(
                f"{len(self.edges)} edges, but costs for {len(self.edge_costs)} of them"
            )
        for i in range(count):
            costs, usage, interval = self.node_costs[i], self.usages[i], self.intervals[i]
            if costs.ndim != 1 or costs.size == 0:
                raise ProblemError(
                    f"node {i} has no strategies: its costs have shape {costs.shape}"
                )
            if usage.shape != costs.shape:
                raise ProblemError(
                    f"node {i}: {costs.size} costs but usages of shape {usage.shape}"
                )
            if costs.dtype != np.int64 or usage.dtype != np.int64:
                raise ProblemError(
                    f"node {i}: costs and usages must be int64 arrays, "
                    f"they are {costs.dtype} and {usage.dtype}"
                )
            if interval[0] > interval[1]:
                raise ProblemError(f"node {i}: its interval {interval} ends before it starts")
            if interval[0] < -(2**63) or interval[1] >= 2**63:
                raise ProblemError(f"node {i}: its interval {interval} does not fit into 64 bits")
        for e, ((u, v), matrix) in enumerate(zip(self.edges, self.edge_costs, strict=True)):
            for end in (u, v):
                if not 0 <= end < count:
                    raise ProblemError(f"edge {e}: there is no node {end}")
            shape = len(self.node_costs[u]), len(self.node_costs[v])
            if matrix.shape != shape:
                raise ProblemError(f"edge {e}: costs of shape {matrix.shape}, expected {shape}")
            if matrix.dtype != np.int64:
                raise ProblemError(f"edge {e}: costs must be an int64 array, it is {matrix.dtype}")
        for what, least, tables in (
            ("node {}: a usage is negative ({})", 0, self.usages),
            ("node {}: the cost {} is out of range", 1 - FORBIDDEN, self.node_costs),
            ("edge {}: the cost {} is out of range", 1 - FORBIDDEN, self.edge_costs),
        ):
            if _least(tables) < least:
                place, table = next((i, t) for i, t in enumerate(tables) if _least([t]) < least)
                raise ProblemError(what.format(place, table.min()))
        if self.usage_limit is not None and self.usage_limit < 0:
            raise ProblemError(f"the usage limit is negative ({self.usage_limit})")

    @property
    def num_nodes(self) -> int:
        return len(self.node_costs)

    def restricted(self, allowed: Sequence[Sequence[int]]) -> Problem:
        """The problem in which node i may only take `allowed[i]`; later nodes keep all."""
        kept = [np.asarray(strategies, np.int64) for strategies in allowed]
        kept += [np.arange(len(costs)) for costs in self.node_costs[len(kept) :]]
        return replace(
            self,
            node_costs=tuple(costs[s] for costs, s in zip(self.node_costs, kept, strict=True)),
            usages=tuple(usage[s] for usage, s in zip(self.usages, kept, strict=True)),
            edge_costs=tuple(
                np.ascontiguousarray(matrix[np.ix_(kept[u], kept[v])])
                for (u, v), matrix in zip(self.edges, self.edge_costs, strict=True)
            ),
        )

    def __str__(self) -> str:
        strategies = sum(len(costs) for costs in self.node_costs)
        return (
            f"{self.name}: {self.num_nodes} nodes, {strategies} strategies, "
            f"{len(self.edges)} edges, usage limit {self.usage_limit}"
        )


def _least(tables: Sequence[Integers]) -> int:
    """The least number in some tables, of which each is looked at once; at most 0."""
    distinct = {id(table): table for table in tables}.values()
    return min((int(table.min(initial=0)) for table in distinct), default=0)
