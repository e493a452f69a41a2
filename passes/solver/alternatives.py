"""What every node of a solved problem could have chosen instead, and what that would change.

A node's best alternative is searched in the part of the graph around it: the node takes another
strategy, the nodes within `REACH` steps choose anew, all others stay as they are. Along the tree in
which these nodes are reached, dynamic programming ranks the node's strategies; the best of the
first few is improved one node at a time. What comes out is an assignment with exactly that cost, so
the best one in the whole problem costs no more. Memory is left out of the choice, and only told.

Nodes whose surroundings are alike in all numbers share one answer. Surroundings are told apart as
in Weisfeiler and Leman, "The reduction of a graph to canonical form" (1968): a node's colour is
what it has, then also what its neighbours have, and so on as far as the search can see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.passes.solver.arrays import Floats
from autopar.passes.solver.problem import FORBIDDEN, Problem

REACH = 2
"""Nodes so many steps from a node choose anew."""

MOST_NODES = 40
"""At most so many nodes choose anew."""

TRIED = 3
"""So many of a node's other strategies are looked at, those that rank first."""

SWEEPS = 3
"""How often every node around is looked at again."""


@dataclass(frozen=True)
class Alternative:
    """The best that was found with another strategy for a node.

    Args:
      strategy: what the node takes instead.
      more_cost: by how much that raises the cost; negative where only memory stood against it.
      more_usage: the most by which it raises the usage at any time, or 0.
      own_cost: the part of `more_cost` that is the node's own.
      neighbour: the neighbour whose part of it is largest, with the edge to it, or None.
      neighbour_cost: that part.
    """

    strategy: int
    more_cost: int
    more_usage: int
    own_cost: int
    neighbour: int | None
    neighbour_cost: int


def alternatives(
    problem: Problem, assignment: Sequence[int], nodes: Iterable[int]
) -> dict[int, Alternative]:
    """For each of these nodes the best other strategy, where there is one.

    Args:
      problem: what was solved.
      assignment: of the nodes that decide; later ones, which hold usages, take what these allow.
      nodes: that are asked for.
    """
    around = _Surroundings(problem, assignment)
    colours, neighbours = around.colours()
    known: dict[int, tuple[Alternative, int | None] | None] = {}
    found: dict[int, Alternative] = {}
    for node in nodes:
        colour, here = colours[node], neighbours[node]
        if colour not in known:
            best = around.best_without(node)
            known[colour] = None
            if best is not None:
                place = None if best.neighbour is None else here.index(best.neighbour)
                known[colour] = best, place
        answer = known[colour]
        if answer is not None:
            best, place = answer
            found[node] = replace(best, neighbour=None if place is None else here[place])
    return found


class _Surroundings:
    """The graph of the nodes that decide, with what is chosen now."""

    def __init__(self, problem: Problem, assignment: Sequence[int]) -> None:
        self.problem, self.now = problem, list(assignment)
        count = len(self.now)
        self.costs: list[Floats] = [c.astype(np.float64) for c in problem.node_costs[:count]]
        self.edges: list[list[tuple[int, Floats]]] = [[] for _ in range(count)]
        self.holders: dict[int, list[tuple[int, Floats]]] = defaultdict(list)
        for (u, v), costs in zip(problem.edges, problem.edge_costs, strict=True):
            matrix = costs.astype(np.float64)
            if u == v:
                self.costs[u] = self.costs[u] + np.diagonal(matrix)
            elif max(u, v) >= count:
                if min(u, v) < count:
                    tie = matrix if u < v else matrix.T
                    self.holders[min(u, v)].append((max(u, v), tie))
            else:
                self.edges[u].append((v, matrix))
                self.edges[v].append((u, matrix.T))

    def colours(self) -> tuple[list[int], list[list[int]]]:
        """Equal numbers for nodes whose surroundings are alike, as far as the search sees them.

        And each node's neighbours, in an order in which those of nodes alike correspond.
        """
        numbers: dict[Hashable, int] = {}

        def number(key: Hashable) -> int:
            return numbers.setdefault(key, len(numbers))

        def data(array: np.ndarray) -> int:
            return number((array.shape, array.tobytes()))

        usages = self.problem.usages
        colour = [
            number(
                (
                    now,
                    data(self.costs[i]),
                    data(usages[i]),
                    tuple((data(tie), data(usages[h])) for h, tie in self.holders[i]),
                )
            )
            for i, now in enumerate(self.now)
        ]
        edges = [[(data(matrix), j) for j, matrix in here] for here in self.edges]
        for _ in range(REACH + 1):
            edges = [sorted(here, key=lambda e: (e[0], colour[e[1]], e[1])) for here in edges]
            colour = [
                number((colour[i], tuple((m, colour[j]) for m, j in here)))
                for i, here in enumerate(edges)
            ]
        return colour, [[j for _, j in here] for here in edges]

    def best_without(self, node: int) -> Alternative | None:
        """The best that is found with another strategy for a node."""
        order, parent = self._reached(node)
        total, picks = self._ranked(order, parent)
        total[self.now[node]] = FORBIDDEN
        ranked = [int(s) for s in np.argsort(total, kind="stable") if total[s] < FORBIDDEN / 2]
        best: tuple[float, dict[int, int]] | None = None
        for strategy in ranked[:TRIED]:
            chosen = {node: strategy}
            for j in order[1:]:
                chosen[j] = int(picks[j][chosen[parent[j]]])
            more = self._more_cost(chosen)
            if more < FORBIDDEN / 2 and (best is None or more < best[0]):
                best = more, chosen
        if best is None:
            return None
        _, chosen = best
        self._improve(chosen, order[1:])
        return self._told(node, self._more_cost(chosen), chosen)

    def _reached(self, node: int) -> tuple[list[int], dict[int, int]]:
        """The nodes around one, nearest first, and from which each was reached."""
        order, parent, depth = [node], {node: node}, {node: 0}
        for j in order:
            if depth[j] == REACH:
                break
            for k, _ in self.edges[j]:
                if k not in parent and len(order) < MOST_NODES:
                    parent[k], depth[k] = j, depth[j] + 1
                    order.append(k)
        return order, parent

    def _ranked(
        self, order: Sequence[int], parent: Mapping[int, int]
    ) -> tuple[Floats, dict[int, np.ndarray]]:
        """What each strategy of the first node costs at best along the tree, and others' choices.

        Those are, for every strategy of the parent, what is cheapest below it.
        """
        below: dict[int, Floats] = {j: self.costs[j].copy() for j in order}
        picks: dict[int, np.ndarray] = {}
        for j in reversed(order):
            to_parent: Floats | float = 0.0
            for k, matrix in self.edges[j]:
                if j != order[0] and parent[j] == k:
                    to_parent = to_parent + matrix
                elif parent.get(k) != j:
                    below[j] += matrix[:, self.now[k]]
            if j == order[0]:
                break
            table = to_parent + below[j][:, None]
            picks[j] = np.argmin(table, axis=0)
            below[parent[j]] += np.min(table, axis=0)
        return below[order[0]], picks

    def _improve(self, chosen: dict[int, int], nodes: Sequence[int]) -> None:
        """Lets nodes choose again, one at a time, while that lowers the cost."""
        for _ in range(SWEEPS):
            changed = False
            for j in nodes:
                costs = self.costs[j].copy()
                for k, matrix in self.edges[j]:
                    costs += matrix[:, chosen.get(k, self.now[k])]
                least = int(np.argmin(costs))
                if costs[least] < costs[chosen[j]]:
                    chosen[j], changed = least, True
            if not changed:
                return

    def _more_cost(self, chosen: Mapping[int, int]) -> float:
        more = 0.0
        for i, s in chosen.items():
            more += self.costs[i][s] - self.costs[i][self.now[i]]
            for j, matrix in self.edges[i]:
                if j not in chosen or i < j:
                    more += matrix[s, chosen.get(j, self.now[j])] - matrix[self.now[i], self.now[j]]
        return more

    def _told(self, node: int, more: float, chosen: Mapping[int, int]) -> Alternative:
        strategy, now = chosen[node], self.now
        parts: dict[int, float] = {}
        for j, matrix in self.edges[node]:
            there = chosen.get(j, now[j])
            if j not in parts:
                parts[j] = self.costs[j][there] - self.costs[j][now[j]]
            parts[j] += matrix[strategy, there] - matrix[now[node], now[j]]
        neighbour = max(parts, key=lambda j: (parts[j], -j), default=None)
        return Alternative(
            strategy=strategy,
            more_cost=round(more),
            more_usage=self._more_usage(chosen),
            own_cost=round(self.costs[node][strategy] - self.costs[node][now[node]]),
            neighbour=neighbour,
            neighbour_cost=0 if neighbour is None else round(parts[neighbour]),
        )

    def _more_usage(self, chosen: Mapping[int, int]) -> int:
        changes: dict[int, int] = defaultdict(int)

        def change(node: int, before: int, after: int) -> None:
            usage, (start, end) = self.problem.usages[node], self.problem.intervals[node]
            if start < end:
                changes[start] += int(usage[after]) - int(usage[before])
                changes[end] -= int(usage[after]) - int(usage[before])

        for i, s in chosen.items():
            change(i, self.now[i], s)
            for holder, tie in self.holders[i]:
                change(holder, int(np.argmin(tie[self.now[i]])), int(np.argmin(tie[s])))
        level = most = 0
        for time in sorted(changes):
            level += changes[time]
            most = max(most, level)
        return most
