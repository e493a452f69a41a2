"""The working graph of the solver: what is left of a problem while it is being reduced.

A `Model` is mutable and private to the solver. Each exact change (a strategy dropped, a node merged
into another, a node eliminated) is written to a trail, and `reconstruct` reads the trail backwards
to turn an assignment of what is left into one of the problem.

Costs are int64 and not negative (`offset` holds what was subtracted), `INFINITE` means forbidden.
Usages are relative: what every strategy of a node uses has been moved to `base`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from autopar.passes.solver.budget import unlimited
from autopar.passes.solver.flat import Flat, Tables
from autopar.passes.solver.problem import FORBIDDEN, Integers, Problem
from autopar.passes.solver.usage_rows import Rows, add_rows, joined

T = TypeVar("T")

CHECK_EVERY = 256
"""How many steps a long loop makes between two checks of the time limit."""

LARGEST_LIMIT = 1 << 62
"""Larger usage limits count as this one, so that room fits into int64."""

INFINITE = 1 << 61
"""Forbidden, inside the solver: three of them still fit into int64."""


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


class Contradiction(Exception):
    """No assignment is left."""


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
        for e, (u, v) in enumerate(self.checked(problem.edges)):
            if u == v:
                self.add_costs(u, np.diagonal(matrices[e].reshape(edge_costs[e].shape)))
            else:
                self.add_edge(u, v, matrices[e].reshape(edge_costs[e].shape))
        self.limit: int | None = None
        self.memory: list[list[Rows]] = [[] for _ in range(problem.num_nodes)]
        self.base: Integers = np.zeros(0, np.int64)
        self.times: list[tuple[int, int]] = []
        if with_memory and problem.usage_limit is not None:
            self.limit = min(problem.usage_limit, LARGEST_LIMIT)
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

    def checked(self, items: Iterable[T]) -> Iterator[T]:
        """The items of a long loop; `check` is called now and then."""
        for i, item in enumerate(items):
            if i % CHECK_EVERY == 0:
                self.check()
            yield item

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
        self.replace_costs(u, saturated(self.cost_of(u) + costs))

    def add_edge(self, u: int, v: int, matrix: Integers) -> None:
        """Adds an edge, to the one that is there if there is one."""
        present = self.edges[u].get(v)
        self.replace_edge(u, v, matrix if present is None else saturated(present + matrix))
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
        self.replace_costs(u, self.cost_of(u)[strategies])
        for v, matrix in self.edges[u].items():
            self.replace_edge(u, v, matrix[strategies])
        if self.memory[u]:
            self.memory[u] = [joined(self.memory[u]).select(strategies)]
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
            self.memory[u] = self.memory[u] + [joined(self.memory[v]).select(strategy_of)]
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
            add_rows(self.base, rows.starts, rows.ends, rows.usage[:, 0])
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

    def before(self, earlier: Model, chosen: dict[int, int]) -> dict[int, int]:
        """What a choice means for the model of which this one was made."""
        assignment = self.reconstruct(chosen, len(earlier.trail))
        return {u: assignment[u] for u in earlier.nodes}

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
                add_rows(used, rows.starts, rows.ends, rows.usage[:, strategy])
        return bool((used <= self.limit).all())

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
