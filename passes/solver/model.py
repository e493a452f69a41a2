"""The working graph of the solver: what is left of a problem while it is being reduced.

A `Model` is mutable and private to the solver. Each exact change (a strategy dropped, a node merged
into another, a node eliminated) is written to a trail, and `reconstruct` reads the trail backwards
to turn an assignment of what is left into one of the problem.

Costs are int64 and not negative (`offset` holds what was subtracted), `INFINITE` means forbidden.
Usages are relative: what every strategy of a node uses has been moved to `base`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.passes.solver.budget import unlimited
from autopar.passes.solver.flat import Flat, Tables
from autopar.passes.solver.problem import FORBIDDEN, Integers, Problem

CHECK_EVERY = 256
"""How many steps a long loop makes between two checks of the time limit."""

LARGEST_LIMIT = 1 << 62
"""Larger usage limits count as this one, so that room fits into int64."""

INFINITE = 1 << 61
"""Forbidden, inside the solver: three of them still fit into int64."""


@dataclass(frozen=True)
class Rows:
    """Usages of a node's strategies over time: row `k` holds at the points `starts[k]:ends[k]`."""

    starts: Integers  # [rows]
    ends: Integers  # [rows]
    usage: Integers  # [rows, strategies]

    def select(self, strategies: Integers) -> Rows:
        return Rows(self.starts, self.ends, self.usage[:, strategies])


@dataclass(frozen=True)
class Kept:
    """Only the listed strategies of `node` were kept."""

    node: int
    strategies: Integers

    def undo(self, assignment: list[int]) -> None:
        assignment[self.node] = int(self.strategies[assignment[self.node]])


@dataclass(frozen=True)
class Merged:
    """`node` was merged into `owner`, whose strategy `s` leaves it `strategy_of[s]`."""

    node: int
    owner: int
    strategy_of: Integers

    def undo(self, assignment: list[int]) -> None:
        assignment[self.node] = int(self.strategy_of[assignment[self.owner]])


@dataclass(frozen=True)
class Eliminated:
    """`node` is chosen last, the cheapest strategy given what its `neighbours` have."""

    node: int
    costs: Integers
    neighbours: tuple[tuple[int, Integers], ...]

    def undo(self, assignment: list[int]) -> None:
        total = self.costs
        for v, matrix in self.neighbours:
            total = saturated(total + matrix[:, assignment[v]])
        assignment[self.node] = int(total.argmin())


@dataclass(frozen=True)
class _Single:
    """Nodes of one row each, the most common kind: where the row holds and what it uses."""

    nodes: list[int]
    starts: Integers
    ends: Integers
    largest: Integers
    usages: list[Integers]


class Contradiction(Exception):
    """No assignment is left; `usage` and `point` say where memory made that certain, if it did."""

    def __init__(self, usage: int | None = None, point: int | None = None) -> None:
        super().__init__("no assignment is left")
        self.usage = usage
        self.point = point


def saturated(costs: Integers) -> Integers:
    """Costs with everything from `INFINITE` up made `INFINITE` again."""
    return np.minimum(costs, INFINITE)


class Model:
    """Nodes with costs, edges as oriented matrices, memory as rows; see the module's text."""

    def __init__(
        self,
        problem: Problem,
        *,
        with_memory: bool = True,
        flat: Flat | None = None,
        check: Callable[[], None] = unlimited,
    ) -> None:
        self.check = check  # called now and then in long loops; may raise
        self.num_nodes = problem.num_nodes
        flat = Flat(problem) if flat is None else flat
        self.shift = _shift(flat)
        self.offset = 0
        self.edges: list[dict[int, Integers]] = [{} for _ in range(problem.num_nodes)]
        self.trail: list[Kept | Merged | Eliminated] = []
        self.dirty_nodes: set[int] = set(range(problem.num_nodes))
        self.dirty_edges: set[tuple[int, int]] = set()
        self.costs: list[Integers | None] = [*self._internal(flat.nodes).split()]
        edge_costs = problem.edge_costs
        matrices = self._internal(flat.edges).split()
        for e, (u, v) in enumerate(problem.edges):
            if e % CHECK_EVERY == 0:
                check()
            if u == v:
                self.add_costs(u, np.diagonal(matrices[e].reshape(edge_costs[e].shape)))
            else:
                self.add_edge(u, v, matrices[e].reshape(edge_costs[e].shape))
        self.limit: int | None = None
        if with_memory and problem.usage_limit is not None:
            self.limit = min(problem.usage_limit, LARGEST_LIMIT)
        self.memory: list[list[Rows]] = [[] for _ in range(problem.num_nodes)]
        self.base: Integers = np.zeros(0, np.int64)
        self.times: list[tuple[int, int]] = []
        if self.limit is not None:
            self._start_memory(problem)

    def _internal(self, tables: Tables) -> Tables:
        """Costs shifted to be zero at each table's least, forbidden ones `INFINITE`."""
        forbidden = tables.cells >= FORBIDDEN
        cells = tables.cells >> self.shift if self.shift else tables.cells
        cells = np.where(forbidden, INFINITE, cells)
        least = Tables(cells, tables.first).least()
        least[least >= INFINITE] = 0  # all of that table is forbidden
        self.offset += sum(least.tolist())
        cells -= np.repeat(least, np.diff(tables.first))
        cells[forbidden] = INFINITE
        return Tables(cells, tables.first)

    def _start_memory(self, problem: Problem) -> None:
        times = sorted({time for interval in problem.intervals for time in interval})
        index = {time: i for i, time in enumerate(times)}
        self.times = list(itertools.pairwise(times))
        self.base = np.zeros(len(self.times), np.int64)
        for u, ((start, end), usage) in enumerate(
            zip(problem.intervals, problem.usages, strict=True)
        ):
            if start < end and usage.any():
                where = np.array([index[start]]), np.array([index[end]])
                self.memory[u] = [Rows(*where, usage[None, :])]

    @property
    def nodes(self) -> list[int]:
        """The nodes that are left."""
        return [u for u, costs in enumerate(self.costs) if costs is not None]

    @property
    def num_cells(self) -> int:
        """The pairs of strategies on all edges that are left."""
        return sum(m.size for u in self.nodes for m in self.edges[u].values()) // 2

    def cost_of(self, u: int) -> Integers:
        costs = self.costs[u]
        assert costs is not None, f"node {u} is gone"
        return costs

    def add_costs(self, u: int, costs: Integers) -> None:
        self.costs[u] = saturated(self.cost_of(u) + costs)
        self.dirty_nodes.add(u)

    def add_edge(self, u: int, v: int, matrix: Integers) -> None:
        """Adds an edge, to the one that is there if there is one."""
        present = self.edges[u].get(v)
        if present is not None:
            matrix = saturated(present + matrix)
        self.edges[u][v] = matrix
        self.edges[v][u] = matrix.T
        self.dirty_edges.add((u, v) if u < v else (v, u))
        self.dirty_nodes.update((u, v))

    def replace_costs(self, u: int, costs: Integers) -> None:
        self.costs[u] = costs
        self.dirty_nodes.add(u)

    def replace_edge(self, u: int, v: int, matrix: Integers) -> None:
        self.edges[u][v] = matrix
        self.edges[v][u] = matrix.T
        self.dirty_edges.add((u, v) if u < v else (v, u))

    def remove_edge(self, u: int, v: int) -> None:
        del self.edges[u][v]
        del self.edges[v][u]
        self.dirty_nodes.update((u, v))

    def keep(self, u: int, strategies: Integers) -> None:
        """Drops all strategies of `u` but those listed (indices in ascending order)."""
        if len(strategies) == 0:
            raise Contradiction
        self.costs[u] = self.cost_of(u)[strategies]
        for v, matrix in self.edges[u].items():
            kept = matrix[strategies]
            self.edges[u][v] = kept
            self.edges[v][u] = kept.T
            self.dirty_edges.add((u, v) if u < v else (v, u))
        self.dirty_nodes.add(u)
        if self.memory[u]:
            self.memory[u] = [_joined(self.memory[u]).select(strategies)]

        self.trail.append(Kept(u, strategies))

    def merge(self, v: int, u: int, strategy_of: Integers) -> None:
        """Merges `v` into `u`, whose strategy `s` leaves `v` only `strategy_of[s]`."""
        matrix = self.edges[u][v]
        tie = matrix[np.arange(len(strategy_of)), strategy_of]
        self.remove_edge(u, v)
        self.add_costs(u, saturated(tie + self.cost_of(v)[strategy_of]))
        for w, other in list(self.edges[v].items()):
            self.remove_edge(v, w)
            self.add_edge(u, w, other[strategy_of])
        if self.memory[v]:
            self.memory[u] = self.memory[u] + [_joined(self.memory[v]).select(strategy_of)]
            self.memory[v] = []
        self.costs[v] = None
        self.trail.append(Merged(v, u, strategy_of))

    def eliminate(self, u: int) -> None:
        """Eliminates a memory-free node of at most two neighbours."""
        costs = self.cost_of(u)
        neighbours = list(self.edges[u].items())
        assert not self.memory[u] and len(neighbours) <= 2
        for v, _ in neighbours:
            self.remove_edge(u, v)
        self.costs[u] = None
        if not neighbours:
            self._spend(int(costs.min()))
        elif len(neighbours) == 1:
            ((v, matrix),) = neighbours
            least = saturated((costs[:, None] + matrix).min(axis=0))
            self.add_costs(v, self._settle(least))
        else:
            (v, left), (w, right) = neighbours
            joint = _min_plus((costs[:, None] + left).T, right)
            self.add_edge(v, w, self._settle(saturated(joint)))
        self.trail.append(Eliminated(u, costs, tuple(neighbours)))

    def fix(self, u: int) -> None:
        """Removes a node of one strategy: its edges become costs, its usage part of the base."""
        costs = self.cost_of(u)
        assert len(costs) == 1
        self._spend(int(costs[0]))
        for v, matrix in list(self.edges[u].items()):
            self.remove_edge(u, v)
            self.add_costs(v, matrix[0])
        for rows in self.memory[u]:
            _add_rows(self.base, rows.starts, rows.ends, rows.usage[:, 0])
        self.memory[u] = []
        self.costs[u] = None
        self.trail.append(Eliminated(u, costs, ()))

    def _spend(self, cost: int) -> None:
        if cost >= INFINITE:
            raise Contradiction
        self.offset += cost

    def _settle(self, costs: Integers) -> Integers:
        """Moves the least of a table to the offset."""
        least = int(costs.min())
        self._spend(least)
        return np.where(costs < INFINITE, costs - least, INFINITE) if least else costs

    def reconstruct(self, chosen: dict[int, int], since: int = 0) -> tuple[int, ...]:
        """The problem's assignment for a choice of strategies of the nodes that are left.

        With `since`, only the changes from there on are undone: the result is an assignment for the
        model that had a trail of that length, -1 for the nodes that were gone by then.
        """
        assignment = [-1] * self.num_nodes
        for u, strategy in chosen.items():
            assignment[u] = strategy
        for change in reversed(self.trail[since:]):
            change.undo(assignment)
        return tuple(assignment)

    def value(self, chosen: dict[int, int]) -> int:
        """The exact internal cost of a choice for the nodes that are left, without the offset."""
        total = 0
        for u, strategy in chosen.items():
            total += int(self.cost_of(u)[strategy])
            for v, matrix in self.edges[u].items():
                if u < v:
                    total += int(matrix[strategy, chosen[v]])
        return total

    def largest_cost(self) -> int:
        """More than no choice for the nodes that are left can cost."""
        tables = [self.cost_of(u) for u in self.nodes]
        tables += [m for u in self.nodes for v, m in self.edges[u].items() if u < v]
        return sum(int(t.max(where=t < INFINITE, initial=0)) for t in tables)

    def fits(self, chosen: dict[int, int]) -> bool:
        """Whether a choice for the nodes that are left keeps within the limit at all points."""
        if self.limit is None:
            return True
        used = self.base.copy()
        for u, strategy in chosen.items():
            for rows in self.memory[u]:
                _add_rows(used, rows.starts, rows.ends, rows.usage[:, strategy])
        return bool((used <= self.limit).all())

    def compress_time(self) -> None:
        """Makes each node's rows disjoint, drops the points at which memory cannot bind.

        A point cannot bind if even the largest usages fit there, or if the next or previous point
        has the same rows or more and at least the same base.

        Raises:
            Contradiction: if even the least usages do not fit.
        """
        if self.limit is None:
            return
        self.check()
        single = self._compress_single()
        most = np.zeros(len(self.base) + 1, np.int64)
        opens = np.zeros(len(self.base) + 1, np.int64)
        closes = np.zeros(len(self.base) + 1, np.int64)
        if single is not None:
            np.add.at(most, single.starts, single.largest)
            np.subtract.at(most, single.ends, single.largest)
            np.add.at(opens, single.starts, 1)
            np.add.at(closes, single.ends, 1)
        others = [u for u in self.nodes if self.memory[u]]
        if single is not None:
            others = sorted(set(others).difference(single.nodes))
        for i, u in enumerate(others):
            if i % CHECK_EVERY == 0:
                self.check()
            rows = disjoint(self.memory[u])
            least = rows.usage.min(axis=1)
            _add_rows(self.base, rows.starts, rows.ends, least)
            rows = Rows(rows.starts, rows.ends, rows.usage - least[:, None])
            varied = rows.usage.any(axis=1)
            if not varied.all():
                rows = Rows(rows.starts[varied], rows.ends[varied], rows.usage[varied])
            self.memory[u] = [rows] if len(rows.starts) else []
            largest = rows.usage.max(axis=1, initial=0)
            np.add.at(most, rows.starts, largest)
            np.subtract.at(most, rows.ends, largest)
            np.add.at(opens, rows.starts, 1)
            np.add.at(closes, rows.ends, 1)
        if len(self.base) and int(self.base.max()) > self.limit:
            point = int(self.base.argmax())
            raise Contradiction(int(self.base[point]), point)
        binding = np.flatnonzero(self.base + np.cumsum(most[:-1]) > self.limit)
        kept = _maximal(binding, self.base, opens, closes)
        place = np.searchsorted(kept, np.arange(len(self.base) + 1))
        if single is not None:
            self._place_single(single, place)
        for u in others:
            for rows in self.memory[u]:
                starts, ends = place[rows.starts], place[rows.ends]
                alive = starts < ends
                self.memory[u] = (
                    [Rows(starts[alive], ends[alive], rows.usage[alive])] if alive.any() else []
                )
        self.base = self.base[kept]
        self.times = [self.times[i] for i in kept]

    def _compress_single(self) -> _Single | None:
        """Moves the least usage of all nodes of one row to the base, all of them at once."""
        nodes = [
            u for u in self.nodes if len(self.memory[u]) == 1 and len(self.memory[u][0].starts) == 1
        ]
        if not nodes:
            return None
        rows = [self.memory[u][0] for u in nodes]
        starts = np.concatenate([row.starts for row in rows])
        ends = np.concatenate([row.ends for row in rows])
        usage = Tables.of([row.usage for row in rows])
        least = usage.least()
        changes = np.zeros(len(self.base) + 1, np.int64)
        np.add.at(changes, starts, least)
        np.subtract.at(changes, ends, least)
        self.base += np.cumsum(changes[:-1])
        largest = usage.most() - least
        usage = Tables(usage.cells - np.repeat(least, np.diff(usage.first)), usage.first)
        varied = np.flatnonzero(largest)
        for i in np.flatnonzero(largest == 0).tolist():
            self.memory[nodes[i]] = []
        tables = usage.split()
        kept = varied.tolist()
        return _Single(
            [nodes[i] for i in kept],
            starts[varied],
            ends[varied],
            largest[varied],
            [tables[i] for i in kept],
        )

    def _place_single(self, single: _Single, place: Integers) -> None:
        """Gives the nodes of one row their usages, at the points that are left."""
        starts, ends = place[single.starts], place[single.ends]
        alive = (starts < ends).tolist()
        for i, (u, usage) in enumerate(zip(single.nodes, single.usages, strict=True)):
            self.memory[u] = (
                [Rows(starts[i : i + 1], ends[i : i + 1], usage[None, :])] if alive[i] else []
            )

    def without_memory(self) -> Model:
        """A copy of the model without the memory limit, to be reduced anew."""
        twin = self.copy()
        twin.limit = None
        twin.memory = [[] for _ in self.costs]
        twin.base = np.zeros(0, np.int64)
        twin.dirty_nodes.update(twin.nodes)
        return twin

    def copy(self) -> Model:
        """A model that can be reduced further without changing this one."""
        twin = object.__new__(Model)
        twin.__dict__.update(self.__dict__)
        twin.costs = list(self.costs)
        twin.edges = [dict(row) for row in self.edges]
        twin.memory = list(self.memory)
        twin.base = self.base.copy()
        twin.trail = list(self.trail)
        twin.dirty_nodes = set(self.dirty_nodes)
        twin.dirty_edges = set(self.dirty_edges)
        return twin


def disjoint(chunks: Sequence[Rows]) -> Rows:
    """The same usages as rows that do not overlap in time, adjacent equal ones joined."""
    rows = _joined(chunks)
    if len(rows.starts) == 1:
        return rows
    breaks = np.unique(np.concatenate([rows.starts, rows.ends]))
    changes = np.zeros((len(breaks), rows.usage.shape[1]), np.int64)
    np.add.at(changes, np.searchsorted(breaks, rows.starts), rows.usage)
    np.subtract.at(changes, np.searchsorted(breaks, rows.ends), rows.usage)
    first = np.flatnonzero(changes.any(axis=1))
    usage = np.cumsum(changes[first], axis=0)[:-1]
    starts, ends = breaks[first[:-1]], breaks[first[1:]]
    used = usage.any(axis=1)
    return Rows(starts[used], ends[used], usage[used])


def _joined(chunks: Sequence[Rows]) -> Rows:
    if len(chunks) == 1:
        return chunks[0]
    return Rows(
        np.concatenate([rows.starts for rows in chunks]),
        np.concatenate([rows.ends for rows in chunks]),
        np.concatenate([rows.usage for rows in chunks]),
    )


def _add_rows(base: Integers, starts: Integers, ends: Integers, usage: Integers) -> None:
    """Adds `usage[k]` to `base[starts[k]:ends[k]]`, in place."""
    if len(starts) < 8:
        for start, end, amount in zip(starts, ends, usage, strict=True):
            base[start:end] += amount
        return
    changes = np.zeros(len(base) + 1, np.int64)
    np.add.at(changes, starts, usage)
    np.subtract.at(changes, ends, usage)
    base += np.cumsum(changes[:-1])


def _maximal(points: Integers, base: Integers, opens: Integers, closes: Integers) -> Integers:
    """The points that no neighbouring point covers: rows only opened (or closed) in between."""
    opened, closed = np.cumsum(opens), np.cumsum(closes)
    kept: list[int] = []
    for point in points.tolist():
        while kept:
            last = kept[-1]
            none_closes = closed[point] == closed[last]
            none_opens = opened[point] == opened[last]
            if none_closes and base[last] <= base[point]:
                kept.pop()
            elif none_opens and base[point] <= base[last]:
                break
            else:
                kept.append(point)
                break
        else:
            kept.append(point)
    return np.array(kept, np.int64)


def _min_plus(left: Integers, right: Integers) -> Integers:
    """`out[i, j] = min over k of left[i, k] + right[k, j]`, in blocks of bounded size."""
    rows, inner = left.shape
    columns = right.shape[1]
    block = max(1, 1_000_000 // max(1, inner * columns))
    out = np.empty((rows, columns), np.int64)
    for start in range(0, rows, block):
        part = left[start : start + block, :, None] + right[None]
        out[start : start + block] = part.min(axis=1)
    return out


def _shift(flat: Flat) -> int:
    """By how many bits costs are shifted so that sums of finite costs stay under `INFINITE`."""
    total = 0
    for tables in (flat.nodes, flat.edges):
        finite = Tables(np.where(tables.cells < FORBIDDEN, tables.cells, 0), tables.first)
        most, least = np.maximum(finite.most(), 0), np.minimum(finite.least(), 0)
        total += sum(most.tolist()) - sum(least.tolist())
    return max(0, total.bit_length() - INFINITE.bit_length() + 1)
