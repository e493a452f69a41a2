"""A problem's tables one after the other in flat arrays, and assignments evaluated on them.

The files' instances have some 100,000 small tables; to look at each of them by itself takes longer
than to look at all of their cells at once. Sums are exact: they are taken of Python integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.passes.solver.problem import FORBIDDEN, Integers, Problem
from autopar.passes.solver.usage_rows import over_points


@dataclass(frozen=True)
class Tables:
    """Tables as one array of cells; table `i` is `cells[first[i]:first[i + 1]]`."""

    cells: Integers
    first: Integers

    @staticmethod
    def of(tables: Sequence[Integers]) -> Tables:
        sizes = np.fromiter((table.size for table in tables), np.int64, len(tables))
        cells = np.concatenate([t.ravel() for t in tables]) if tables else np.zeros(0, np.int64)
        return Tables(cells, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    def least(self) -> Integers:
        """The least cell of each table."""
        return np.minimum.reduceat(self.cells, self.first[:-1]) if len(self.cells) else self.cells

    def most(self) -> Integers:
        """The largest cell of each table."""
        return np.maximum.reduceat(self.cells, self.first[:-1]) if len(self.cells) else self.cells

    def split(self) -> list[Integers]:
        """The tables again, as views of one dimension."""
        bounds = self.first.tolist()
        return [self.cells[start:end] for start, end in itertools.pairwise(bounds)]


class Flat:
    """A problem's costs, usages and intervals as flat arrays."""

    def __init__(self, problem: Problem) -> None:
        self.nodes = Tables.of(problem.node_costs)
        self.edges = Tables.of(problem.edge_costs)
        self.usages = Tables.of(problem.usages)
        ends = np.array(problem.edges, np.int64).reshape(-1, 2)
        self.left, self.right = ends[:, 0], ends[:, 1]
        self.width = np.diff(self.nodes.first)[self.right]
        intervals = np.array(problem.intervals, np.int64).reshape(-1, 2)
        self.times, index = np.unique(intervals, return_inverse=True)
        index = index.reshape(-1, 2)
        self.start, self.end = index[:, 0], index[:, 1]

    def cost(self, assignment: Integers) -> int | None:
        """The exact cost of an assignment, None if it is forbidden."""
        cells = self.edges.first[:-1] + assignment[self.left] * self.width + assignment[self.right]
        nodes = self.nodes.cells[self.nodes.first[:-1] + assignment]
        costs = np.concatenate([nodes, self.edges.cells[cells]])
        return None if (costs >= FORBIDDEN).any() else sum(costs.tolist())

    def peak(self, assignment: Integers) -> tuple[int, tuple[int, int]]:
        """The largest total usage over time, and the first interval in which it is reached.

        Usages whose sum does not fit into 64 bits are added as Python integers.
        """
        used = self.usages.cells[self.usages.first[:-1] + assignment]
        if len(self.times) < 2:
            return 0, (0, 0)
        fits = float(used.sum(dtype=np.float64)) < 2.0**62
        used = used if fits else used.astype(object)
        total = over_points(self.start, self.end, used, len(self.times) - 1)
        point = int(total.argmax())
        if total[point] <= 0:
            return 0, (0, 0)
        return int(total[point]), (int(self.times[point]), int(self.times[point + 1]))
