"""`solve`: the order in which the solver tries its methods.

1. Without the memory limit: reduce, then eliminate nodes exactly. If that is practical and the
   optimum fits into memory, it is the answer; most problems of a compiler's stage end here.
2. With memory: reduce, then dual ascent with prices, which gives bounds and feasible choices.
3. What the bound excludes goes, the rest is reduced again; what is left may be small enough for an
   exact model, or worth another ascent.
4. Large-neighbourhood search on the best choice until the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.passes.solver.arrays import Arrays, flatten
from autopar.passes.solver.ascent import ascend
from autopar.passes.solver.budget import Budget
from autopar.passes.solver.certificate import certified_bound
from autopar.passes.solver.dual import Dual
from autopar.passes.solver.elimination import eliminate, elimination_order
from autopar.passes.solver.exclude import excluded
from autopar.passes.solver.model import Contradiction, Model
from autopar.passes.solver.neighbourhood import Neighbourhoods
from autopar.passes.solver.peak import smallest_peak
from autopar.passes.solver.plain import solve_cp_sat
from autopar.passes.solver.problem import Integers, Problem, evaluate, is_allowed, peak_usage
from autopar.passes.solver.reduce import reduce
from autopar.passes.solver.solution import Infeasible, Solution, relative_gap

TABLE_CELLS = 20_000_000
ALL_CELLS = 200_000_000
DEFAULT_WORK = 20.0
RELAX_FIRST_NODES = 5_000
"""Problems up to this size are first tried without memory from the start."""

EXACT_CELLS = 60_000
"""Models of at most so many edge cells are given to CP-SAT as a whole."""

PEAK_WORK = 2.0
"""The work for each step of the search for the smallest peak of an infeasible problem."""

SWEEPS = 240
ROUNDS = 4

Progress = Callable[[int | None, int | None, float], None]
"""Called with the best cost, the lower bound and the seconds so far."""


def solve(
    problem: Problem,
    *,
    time_limit: float | None = None,
    work_limit: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Solution:
    """Finds the cheapest assignment that fits, with a proven bound on what it may lack.

    Args:
        problem: what to solve.
        time_limit: seconds of wall clock after which the best solution so far is returned.
        work_limit: deterministic work, about a second each; without a time limit the result depends
            on it and on nothing else. By default 20 if there is no time limit.
        seed: of the randomised parts.
        progress: called whenever the best cost or the bound has changed.

    Raises:
        Infeasible: if there is no solution, or none was found within the limits.
    """
    if work_limit is None and time_limit is None:
        work_limit = DEFAULT_WORK
    search = _Search(problem, Budget(work_limit, time_limit), seed, progress)
    try:
        search.run()
    except Contradiction:
        if search.best is None:
            raise search.infeasible(proven=True) from None
        search.bound = search.best_cost
    return search.solution()


@dataclass
class _Search:
    """The state of one call of `solve`: the best assignment and bound so far, in the problem."""

    problem: Problem
    budget: Budget
    seed: int
    progress: Progress | None
    best: tuple[int, ...] | None = None
    best_cost: int | None = None
    bound: int | None = None
    smallest_peak: tuple[int, tuple[int, int]] | None = None
    stats: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        problem = self.problem
        if problem.usage_limit is None or problem.num_nodes <= RELAX_FIRST_NODES:
            model = Model(problem, with_memory=False)
            reduce(model)
            if self.try_elimination(model) or self.closed:
                return
        model = Model(problem)
        reduce(model)
        self.stats["reduced_nodes"] = len(model.nodes)
        self.stats["seconds_reduced"] = self.budget.seconds
        if not model.nodes:
            self.offer(model, {})
            self.bound = self.best_cost
            return
        chosen, dual = self.rounds(model)
        if not self.closed and not self.budget.exhausted and chosen is not None:
            neighbourhoods = Neighbourhoods(model, dual, chosen, self.seed)
            neighbourhoods.search(self.budget, lambda found: self.offer(model, found))
            self.stats["neighbourhoods"] = neighbourhoods.looked_at
            self.stats["neighbourhoods_improved"] = neighbourhoods.improved
            if neighbourhoods.optimal:
                self.bound = self.best_cost
            elif not self.budget.exhausted:
                self.exact(excluded(model, dual, self.upper(model)), 1.0)

    @property
    def closed(self) -> bool:
        return self.best_cost is not None and self.bound == self.best_cost

    def try_elimination(self, model: Model) -> bool:
        """Whether the model's optimum without memory was found and fits: it is the answer then."""
        order = elimination_order(model, TABLE_CELLS, ALL_CELLS)
        if order is None:
            return False
        self.budget.spend(1e-8 * order.total_cells)
        chosen = eliminate(model, order)
        self.raise_bound(model, model.value(chosen))
        if not self.offer(model, chosen):
            return False
        self.stats["method"] = "elimination"
        self.stats["largest_table"] = order.largest_cells
        return True

    def rounds(self, model: Model) -> tuple[dict[int, int] | None, Dual]:
        """Ascents on smaller and smaller models; the best choice for the first, and its dual."""
        current = model
        prices: dict[tuple[int, int], float] = {}
        best: dict[int, int] | None = None
        first: Dual | None = None
        for _ in range(ROUNDS):
            arrays = flatten(current)
            dual = Dual(arrays, np.array([prices.get(time, 0.0) for time in current.times]))

            def found(choice: Integers, arrays: Arrays = arrays, current: Model = current) -> float:
                nonlocal best
                chosen = arrays.chosen(choice)
                if self.offer(current, chosen):
                    assignment = current.reconstruct(chosen, len(model.trail))
                    best = {u: assignment[u] for u in model.nodes}
                return self.upper(current)

            first = first or dual
            upper = min(self.upper(current), current.largest_cost() + 2.0)
            ascend(dual, SWEEPS, self.budget, found, upper=upper, until=0.6)
            bound = certified_bound(dual)
            if bound > current.largest_cost():
                raise Contradiction
            self.raise_bound(current, bound)
            if self.closed or self.budget.exhausted:
                break
            prices = dict(zip(current.times, dual.prices.tolist(), strict=True))
            if self.best_cost is None:
                self.exact(current)
                break
            cells = len(arrays.low.cells)
            current = excluded(current, dual, self.upper(current))
            left = sum(m.size for u in current.nodes for m in current.edges[u].values()) // 2
            self.stats["excluded_nodes"] = len(current.nodes)
            self.stats["excluded_cells"] = left
            if self.exact(current) or left > 0.8 * cells:
                break
        assert first is not None
        return best, first

    def exact(self, model: Model, part: float = 0.2) -> bool:
        """Whether the model, small by now, was solved exactly with a part of the budget."""
        relaxed = model.copy()
        relaxed.forget_memory()
        relaxed.dirty_nodes.update(relaxed.nodes)
        reduce(relaxed)
        order = elimination_order(relaxed, TABLE_CELLS, ALL_CELLS)
        if order is not None:
            chosen = eliminate(relaxed, order)
            self.raise_bound(relaxed, relaxed.value(chosen))
            if self.offer(relaxed, chosen) or self.closed:
                self.bound = self.best_cost
                self.stats["method"] = "ascent and elimination"
                return True
        cells = sum(m.size for u in model.nodes for m in model.edges[u].values()) // 2
        if cells > EXACT_CELLS:
            return False
        work, seconds = self.budget.share(part)
        answer = solve_cp_sat(model, time_limit=seconds, work_limit=work, seed=self.seed)
        self.budget.spend(answer.deterministic_time + 2e-5 * cells)
        self.stats["cp_sat_cells"] = cells
        if answer.chosen is not None:
            self.offer(model, answer.chosen)
        if answer.infeasible:
            raise Contradiction
        self.raise_bound(model, answer.bound)
        return self.closed

    def upper(self, model: Model) -> float:
        """The best cost in a model's terms."""
        if self.best_cost is None:
            return np.inf
        return float((self.best_cost >> model.shift) - model.offset)

    def raise_bound(self, model: Model, bound: int) -> None:
        """Takes note of a model's bound; with the best cost so far it is the problem's."""
        bound = (model.offset + bound) << model.shift
        if self.bound is None or bound > self.bound:
            self.bound = bound
        if self.best_cost is not None:
            self.bound = min(self.bound, self.best_cost)
        self.report()

    def offer(self, model: Model, chosen: dict[int, int]) -> bool:
        """Whether a choice is allowed and fits and is the best so far, or as good."""
        assignment = model.reconstruct(chosen)
        peak = peak_usage(self.problem, assignment)
        limit = self.problem.usage_limit
        if not is_allowed(self.problem, assignment):
            return False
        if self.smallest_peak is None or peak[0] < self.smallest_peak[0]:
            self.smallest_peak = peak
        if limit is not None and peak[0] > limit:
            return False
        cost = evaluate(self.problem, assignment)
        if self.best_cost is not None and cost > self.best_cost:
            return False
        if self.best is None:
            self.stats["seconds_first"] = self.budget.seconds
        if self.best_cost is None or cost < self.best_cost:
            self.best, self.best_cost = assignment, cost
            self.stats["seconds_best"] = self.budget.seconds
            self.report()
        return True

    def report(self) -> None:
        if self.progress is not None:
            self.progress(self.best_cost, self.bound, self.budget.seconds)

    def solution(self) -> Solution:
        if self.best is None or self.best_cost is None:
            raise self.infeasible(proven=False)
        bound = self.best_cost if self.bound is None else min(self.bound, self.best_cost)
        self.stats["seconds"] = self.budget.seconds
        self.stats["work"] = round(self.budget.work, 6)
        return Solution(
            self.best, self.best_cost, bound, relative_gap(self.best_cost, bound), self.stats
        )

    def feasible(self, problem: Problem) -> tuple[tuple[int, ...] | None, bool]:
        """An assignment of a related problem, or None and whether it is proven to have none."""
        search = _Search(problem, Budget(PEAK_WORK, self.budget.share(1.0)[1]), self.seed, None)
        try:
            search.run()
        except Contradiction:
            return search.best, search.best is None
        return search.best, False

    def infeasible(self, proven: bool) -> Infeasible:
        """The error to raise: with the smallest peak usage, which takes a search of its own."""
        peak = smallest_peak(self.problem, self.feasible)
        if peak is None:
            what = (
                "Every assignment is forbidden." if proven else "No assignment was found in time."
            )
            return Infeasible(what, proven=proven)
        usage, interval = peak.usage, peak.interval
        if self.smallest_peak is not None and self.smallest_peak[0] < usage:
            usage, interval = self.smallest_peak
        limit = self.problem.usage_limit
        if proven:
            what = f"No assignment keeps within the usage limit of {limit}."
        else:
            what = f"No assignment within the usage limit of {limit} was found in time."
        exact = usage == peak.lower_bound
        return Infeasible(
            what,
            why=f"the smallest peak usage {'is' if exact else 'found is'} {usage}, "
            f"in the interval {interval}",
            hint=f"raise the limit by {usage - limit}" if limit is not None else None,
            smallest_usage=usage,
            interval=interval,
            proven=proven,
            lower_bound=peak.lower_bound,
        )
