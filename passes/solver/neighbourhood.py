"""Large-neighbourhood search: free some nodes of the best choice, solve for them, repeat.

Where to look is drawn at random, but by weight: the dual says by how much the present choice
exceeds its bound at each node, and only where it does can a better choice differ. A neighbourhood
is solved like a small problem of its own: reduced, pruned by the global prices' bound, then
eliminated exactly if memory does not bind, else given to CP-SAT.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopar.passes.solver.arrays import Arrays, Floats, flatten
from autopar.passes.solver.ascent import sweep_work
from autopar.passes.solver.budget import Budget
from autopar.passes.solver.cp_sat import solve_cp_sat
from autopar.passes.solver.dual import Dual
from autopar.passes.solver.elimination import eliminate, elimination_order
from autopar.passes.solver.exclude import excluded
from autopar.passes.solver.model import Contradiction, Model, saturated
from autopar.passes.solver.primal import improve
from autopar.passes.solver.problem import Integers
from autopar.passes.solver.reduce import reduce

FIRST_SIZE = 60
LARGEST_SIZE = 600
TABLE_CELLS = 1_000_000
ALL_CELLS = 5_000_000
PATIENCE = 40
CP_SAT_CELLS = 20_000
CP_SAT_WORK = 3.0
"""The most work of CP-SAT for one neighbourhood."""


class Neighbourhoods:
    """The best choice of a model, and the sizes of neighbourhoods that are worth looking at."""

    def __init__(self, model: Model, dual: Dual, chosen: dict[int, int], seed: int) -> None:
        self.model = model
        self.dual = dual
        self.arrays = dual.arrays
        self.choice = self.arrays.choice(chosen)
        self.random = np.random.default_rng(seed)
        self.size = float(FIRST_SIZE)
        self.looked_at = self.improved = 0
        self.optimal = False  # whether a neighbourhood of all nodes held nothing better

    def search(self, budget: Budget, found: Callable[[dict[int, int]], None]) -> None:
        """Looks at neighbourhoods; `found` takes each better choice.

        Ends when the budget is used or `PATIENCE` of them, all searched fully, held nothing better.
        """
        fruitless = 0
        while not budget.exhausted and fruitless < PATIENCE and len(self.arrays.names):
            weights = contributions(self.dual, self.choice)
            if not weights.any():
                return
            nodes = self._draw(weights)
            self.looked_at += 1
            changed, complete = self._solve(nodes, budget)
            if changed:
                self.improved += 1
                self.choice = improve(self.arrays, self.choice, lambda: budget.exhausted)
                found(self.arrays.chosen(self.choice))
            fruitless = 0 if changed else fruitless + complete
            if complete and not changed and len(nodes) == len(self.arrays.names):
                self.optimal = True
                return
            # Easy neighbourhoods grow, those that CP-SAT could not finish shrink.
            self.size *= 1.1 if complete else 0.8
            self.size = min(max(self.size, 10.0), LARGEST_SIZE, len(self.arrays.names))

    def _draw(self, weights: Floats) -> list[int]:
        """Nodes around one drawn by weight: along edges, or sharing a tight point of time."""
        arrays, random = self.arrays, self.random
        start = int(random.choice(len(weights), p=weights / weights.sum()))
        wanted = int(self.size)
        nodes = [start]
        if random.random() < 0.4 and len(arrays.room):
            nodes += self._alive_with(start, wanted // 3)
        seen = set(nodes)
        front = list(nodes)
        while front and len(seen) < wanted:
            i = front.pop(int(random.integers(len(front))) if random.random() < 0.3 else 0)
            around = arrays.around[arrays.around_first[i] : arrays.around_first[i + 1]]
            for j in random.permutation(around)[:40].tolist():
                if j not in seen and len(seen) < wanted:
                    seen.add(j)
                    front.append(j)
        return sorted(seen)

    def _alive_with(self, start: int, count: int) -> list[int]:
        """Nodes that use memory at a tight point where `start` does (anywhere, if it does not)."""
        arrays, random = self.arrays, self.random
        slack = arrays.room - arrays.profile(self.choice)
        rows = range(arrays.node_rows[start], arrays.node_rows[start + 1])
        points = [
            int(arrays.row_start[r] + slack[arrays.row_start[r] : arrays.row_end[r]].argmin())
            for r in rows
        ]
        points.append(int(random.choice(np.argsort(slack, kind="stable")[:20])))
        point = points[int(random.integers(len(points)))]
        alive = arrays.row_node[(arrays.row_start <= point) & (point < arrays.row_end)]
        return random.permutation(alive)[:count].tolist()

    def _solve(self, nodes: list[int], budget: Budget) -> tuple[bool, bool]:
        """Whether a better choice was found, and whether the neighbourhood was searched fully."""
        arrays = self.arrays
        small = restricted(self.model, arrays, self.choice, nodes)
        whole = small.copy()
        here = {k: int(self.choice[i] - arrays.first[i]) for k, i in enumerate(nodes)}
        upper = whole.value(here)
        try:
            chosen, complete = self._best(small, upper, budget)
        except Contradiction:
            return False, True
        if chosen is None:
            return False, complete
        there = dict(enumerate(small.reconstruct(chosen)))
        if whole.value(there) >= upper or not whole.fits(there):
            return False, complete
        for k, i in enumerate(nodes):
            self.choice[i] = arrays.first[i] + there[k]
        return True, complete

    def _best(self, small: Model, upper: int, budget: Budget) -> tuple[dict[int, int] | None, bool]:
        """A choice for the reduced `small` that costs less than `upper`, if one was found."""
        stop = budget.stopper(0.0)
        if not reduce(small, stop=stop):
            return None, False
        budget.spend(2e-3 + 2e-3 * small.num_nodes)
        if not small.nodes:
            return {}, True
        arrays = flatten(small)
        prices = dict(zip(self.model.times, self.dual.prices.tolist(), strict=True))
        dual = Dual(arrays, np.array([prices[time] for time in small.times]))
        for sweep in range(10):
            dual.sweep(sweep % 2 == 0)
        budget.spend(14 * sweep_work(arrays))
        less = excluded(small, dual, float(upper - 1 - small.offset), stop)
        relaxed = less.without_memory()
        if not reduce(relaxed, stop=stop) or budget.exhausted:
            return None, False
        order = elimination_order(relaxed, TABLE_CELLS, ALL_CELLS)
        if order is not None:
            budget.spend(1e-8 * order.total_cells)
            chosen = eliminate(relaxed, order, stop)
            if chosen is None:
                return None, False
            if relaxed.value(chosen) + relaxed.offset >= upper:
                return None, True
            chosen = relaxed.before(less, chosen)
            if less.fits(chosen):
                return less.before(small, chosen), True
        cells = less.num_cells
        if cells > CP_SAT_CELLS:
            return None, False
        work, seconds = budget.left()
        answer = solve_cp_sat(less, time_limit=seconds, work_limit=min(work, CP_SAT_WORK))
        budget.spend(answer.work + 2e-5 * cells)
        complete = answer.infeasible or answer.optimal
        if answer.chosen is None:
            return None, complete
        return less.before(small, answer.chosen), complete


def contributions(dual: Dual, choice: Integers) -> Floats:
    """By how much a choice exceeds the dual's bound at each node (an edge counts for both ends)."""
    arrays = dual.arrays
    least = np.minimum.reduceat(dual.nodes, arrays.first[:-1])
    excess = dual.nodes[choice] - least
    side = arrays.high
    slots, far, cells = arrays.pairs(choice)
    kept = side.cells[cells] - dual.high[slots] - dual.low[side.cell_far_slot[cells]]
    near = arrays.owner[side.slot_node[slots]]
    excess = excess + np.bincount(near, kept, arrays.num_nodes)
    excess += np.bincount(far, kept, arrays.num_nodes)
    # Paying for room that stays unused: shared by the nodes that are alive there.
    idle = dual.prices * (arrays.room - arrays.profile(choice))
    alive = np.bincount(arrays.row_node, arrays.in_rows(idle), arrays.num_nodes)
    share = idle.sum() / alive.sum() if alive.sum() > 0 else 0.0
    return np.maximum(excess + share * alive, 0.0)


def restricted(model: Model, arrays: Arrays, choice: Integers, nodes: list[int]) -> Model:
    """The model of some nodes, numbered from 0, when all others keep their choice."""
    small = object.__new__(Model)
    small.__dict__.update(model.__dict__)  # the limit, the times and the check are the same
    names = [int(arrays.names[i]) for i in nodes]
    place = {u: k for k, u in enumerate(names)}
    small.num_nodes = len(names)
    small.shift, small.offset, small.trail = 0, 0, []
    small.dirty_nodes, small.dirty_edges = set(range(len(names))), set()
    small.edges = [{} for _ in names]
    small.costs = []
    strategy = (choice - arrays.first[:-1]).tolist()
    for k, u in enumerate(names):
        costs = model.cost_of(u)
        around = arrays.around[arrays.around_first[nodes[k]] : arrays.around_first[nodes[k] + 1]]
        for j in around.tolist():
            v = int(arrays.names[j])
            if v not in place:
                costs = saturated(costs + model.edges[u][v][:, strategy[j]])
            elif place[v] > k:
                small.edges[k][place[v]] = model.edges[u][v]
                small.edges[place[v]][k] = model.edges[v][u]
                small.dirty_edges.add((k, place[v]))
        small.costs.append(costs)
    small.memory = [model.memory[u] for u in names]
    used = arrays.profile(choice).astype(np.int64)
    for i in nodes:
        for row in range(arrays.node_rows[i], arrays.node_rows[i + 1]):
            own = int(arrays.usage[arrays.row_first[row] + strategy[i]])
            used[arrays.row_start[row] : arrays.row_end[row]] -= own
    small.base = model.base + used
    return small
