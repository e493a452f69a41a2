"""The integer program in which a leaf's place, the device or its host, is a choice of its own.

To bring a part of a leaf from the hosts' memory and back costs the same whoever reads it. So a node
need not have each strategy twice: what holds the leaf's bytes may have none, at that cost. Where
bytes have a price instead, the cheaper of both places is known before. Leaves of which a loop has
copies keep all their strategies: these are free where the leaf lies on the device as they do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.solver import FORBIDDEN, Problem, Solution


@dataclass(frozen=True)
class FoldedHosts:
    """A problem without the strategies that store a leaf in the hosts' memory.

    Args:
      problem: its nodes are those of the problem that was folded.
      holders: of a leaf's node, the node of its bytes, which are elsewhere if there are none.
      better: of a leaf's node, the strategies that are cheaper in the hosts' memory.
      halves: of each of those nodes, how many strategies it has now.
    """

    problem: Problem
    holders: Mapping[int, int] = field(default_factory=dict)
    better: Mapping[int, NDArray[np.bool_]] = field(default_factory=dict)
    halves: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem, built: StrategyGraph) -> FoldedHosts:
        """A problem of built nodes, with or without limit, folded."""
        halves = {
            number: node.num_strategies // 2
            for number, node in enumerate(built.nodes)
            if node.layouts and node.layouts[-1].in_host and not node.layouts[0].in_host
        }
        for number in _not_alike(problem, halves, len(built.nodes)):
            del halves[number]
        if not halves:
            return cls(problem)
        costs, edges = list(problem.node_costs), list(problem.edge_costs)
        more = {n: costs[n][half:] - costs[n][:half] for n, half in halves.items()}
        holders: dict[int, tuple[int, int]] = {}  # the node of a leaf's bytes, and their edge
        for place, (n, end, matrix) in enumerate(_ends(problem)):
            half = halves.get(n)
            if half is None:
                continue
            if end >= len(built.nodes):
                if not np.array_equal(matrix[:half], matrix[half:]):
                    holders[n] = end, place // 2
                continue
            column = int(np.argmax((matrix < FORBIDDEN).all(axis=0)))
            more[n] = more[n] + matrix[half:, column] - matrix[:half, column]
        keep = [np.arange(halves.get(n, len(c))) for n, c in enumerate(costs)]
        for place, (u, v) in enumerate(problem.edges):
            edges[place] = np.ascontiguousarray(edges[place][np.ix_(keep[u], keep[v])])
        better: dict[int, NDArray[np.bool_]] = {}
        for n, half in halves.items():
            costs[n] = costs[n][:half]
            if n in holders:
                holder, place = holders[n]
                tie = edges[place].copy()
                ties = tie if problem.edges[place][0] == n else tie.T
                ties[:, problem.usages[holder] == 0] = np.maximum(more[n], 0)[:, None]
                edges[place] = tie
            else:
                better[n] = more[n] < 0
                costs[n] = costs[n] + np.minimum(more[n], 0)
        usages = tuple(usage[kept] for usage, kept in zip(problem.usages, keep, strict=True))
        folded = replace(problem, node_costs=tuple(costs), edge_costs=tuple(edges), usages=usages)
        return cls(folded, {n: holder for n, (holder, _) in holders.items()}, better, halves)

    def unfolded(self, found: Solution) -> Solution:
        """A solution of the folded problem as one of the other."""
        if not self.halves:
            return found
        chosen = list(found.assignment)
        for n, half in self.halves.items():
            holder = self.holders.get(n)
            if holder is None:
                is_there = bool(self.better[n][chosen[n]])
            else:
                is_there = self.problem.usages[holder][found.assignment[holder]] == 0
            chosen[n] += half * is_there
        return replace(found, assignment=tuple(chosen))


def _not_alike(problem: Problem, halves: Mapping[int, int], count: int) -> set[int]:
    """The nodes whose leaf costs more in the hosts' memory for some of its readers than for others.

    With several holders that is so: of a copy for a loop, which is the leaf's own buffer on the
    device. `count` nodes are no holders.
    """
    holders, found = Counter[int](), set[int]()
    for n, end, matrix in _ends(problem):
        half = halves.get(n)
        if half is None:
            continue
        if end >= count:
            holders[n] += not np.array_equal(matrix[:half], matrix[half:])
            continue
        allowed = matrix[:, (matrix < FORBIDDEN).all(axis=0)]
        more = allowed[half:] - allowed[:half]
        if (more != more[:, :1]).any():
            found.add(n)
    return found | {n for n, number in holders.items() if number > 1}


def _ends(problem: Problem) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Every edge from both of its ends: a node, the other one, and the costs by the first."""
    for (u, v), matrix in zip(problem.edges, problem.edge_costs, strict=True):
        yield u, v, matrix
        yield v, u, matrix.T
