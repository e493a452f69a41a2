"""`solve`: the order in which the solver tries its methods.

1. Without the memory limit: reduce, then eliminate nodes exactly. If that is practical and the
   optimum fits into memory, it is the answer; most problems of a compiler's stage end here.
2. With memory: reduce, then dual ascent with prices, which gives bounds and feasible choices.
3. If the model is not too large: the best prices, by linear programs over what is near the
   optimum, and a choice by branch and bound there.
4. What the bound excludes goes, the rest is reduced again; what is left may be small enough for an
   exact model, or worth another ascent.
5. Large-neighbourhood search on the best choice until the limit.

It is long because the parts of the budget stand beside the steps that they bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.passes.solver.arrays import Arrays, flatten
from autopar.passes.solver.ascent import SMALL_STEP, STEP, ascend
from autopar.passes.solver.budget import Budget, OutOfTime, Stop
from autopar.passes.solver.certificate import certified_bound
from autopar.passes.solver.cp_sat import solve_cp_sat
from autopar.passes.solver.dual import Dual
from autopar.passes.solver.elimination import EliminationOrder, eliminate, elimination_order
from autopar.passes.solver.exclude import excluded
from autopar.passes.solver.flat import Flat
from autopar.passes.solver.model import Contradiction, Model
from autopar.passes.solver.neighbourhood import Neighbourhoods
from autopar.passes.solver.peak import smallest_peak
from autopar.passes.solver.polish import polish
from autopar.passes.solver.problem import Integers, Problem
from autopar.passes.solver.reduce import reduce
from autopar.passes.solver.solution import Infeasible, Solution, TooDear, relative_gap

TABLE_CELLS = 20_000_000
ALL_CELLS = 200_000_000
DEFAULT_WORK = 20.0
RELAX_FIRST_NODES = 5_000
"""Problems up to this size are first tried without memory from the start."""

EXACT_CELLS = 60_000
"""Models of at most so many edge cells are given to CP-SAT as a whole."""

ELIMINATION_WORK = 1e-8
"""The work per table cell of an elimination."""

FREE_PART = 0.05
"""The most that an elimination without memory may take where there is a memory limit."""

REDUCTION_WORK = 2e-5
"""The work of looking at one node or edge in a reduction."""

FIRST_PART = 0.75
"""The part of the limits at which the reduction before the first choice ends at the latest."""

REDUCTION_PART = 0.5
"""The part of the limits at which the reduction of the whole problem ends at the latest."""

PEAK_FLATS = 5.0
"""How many times as long as the flat arrays one step of that search takes before it can stop."""

PEAK_WORK = 2.0
"""The work for each step of the search for the smallest peak of an infeasible problem."""

SWEEPS = 240
FEW_CELLS = 200_000
"""Models of fewer edge cells are polished, so passes need not make the prices exact."""

FEW_SWEEPS = 60
LATER_SWEEPS = 10
"""How many passes are made before the first and before later polishes."""

FIRST_SWEEPS = 10
RESERVE_OF_FLAT = 0.5
RESERVE_OF_START = 0.2
"""The parts of the time for the flat arrays, and for the model too, kept for taking it down."""

RESERVE = 3.0
"""How many times as long as the check of one assignment is kept for the end of the time limit."""

POLISH_PART = 0.6
"""The part of what is left that a polish may use for its linear programs."""

ROUNDS = 6

EXACT_WORK = 5e-5
"""The work per edge cell before CP-SAT's own search begins."""

SMALL_CELLS = 500
"""Models of at most so many edge cells are given to CP-SAT though they may be reduced further."""

Progress = Callable[[int | None, int | None, float], None]
"""Called with the best cost, the lower bound and the seconds so far."""

Take = Callable[[Model, dict[int, int]], bool]
"""Takes note of a choice for a model; says whether it is the best so far, or as good."""


def solve(
    problem: Problem,
    *,
    time_limit: float | None = None,
    work_limit: float | None = None,
    enough_gap: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
    finds_peak: bool = True,
    at_most: int | None = None,
) -> Solution:
    """Finds the cheapest assignment that fits, with a proven bound on what it may lack.

    Args:
        problem: what to solve.
        time_limit: seconds of wall clock after which the best solution so far is returned.
        work_limit: deterministic work, about a second each; without a time limit the result depends
            on it and on nothing else. By default 20 if there is no time limit.
        enough_gap: a solution is good enough that is proven to lack at most this part of its cost.
        seed: of the randomised parts.
        progress: called whenever the best cost or the bound has changed.
        finds_peak: whether the error of a problem that is proven to have no solution says the
            smallest peak usage, which takes several times as long as to prove that.
        at_most: a cost; the search ends when every solution is proven to cost more. What is found
            before that may do so too.

    Raises:
        Infeasible: if there is no solution, or none was found within the limits.
        TooDear: every solution costs more than `at_most`.
    """
    if work_limit is None:
        work_limit = DEFAULT_WORK if time_limit is None else math.inf
    budget = Budget(work_limit, math.inf if time_limit is None else time_limit)
    search = _Solve(problem, budget, seed, progress, enough_gap, at_most)
    try:
        search.run()
    except Contradiction:
        if search.best is None:
            raise search.infeasible(proven=True, finds_peak=finds_peak) from None
        search.bound = search.best_cost
    except OutOfTime:
        search.offers.flush()
    return search.solution()


@dataclass
class _Solve:
    """The state of one call of `solve`: the best assignment and bound so far, in the problem."""

    problem: Problem
    budget: Budget
    seed: int
    progress: Progress | None
    enough_gap: float = 0.0
    at_most: int | None = None
    best: tuple[int, ...] | None = None
    best_cost: int | None = None
    bound: int | None = None
    smallest_peak: tuple[int, tuple[int, int]] | None = None
    stats: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        start = self.budget.seconds
        self.flat = Flat(self.problem)
        self.flat_seconds = self.budget.seconds - start
        self.budget.keep(RESERVE_OF_FLAT * self.budget.seconds)
        self.offers = _Offers(self)

    def run(self) -> None:
        problem = self.problem
        model: Model | None = None
        if problem.usage_limit is None or problem.num_nodes <= RELAX_FIRST_NODES:
            model = self.reduced(with_memory=False)
            if not self.budget.exhausted and (self.try_elimination(model) or self.closed):
                return
        if model is None or problem.usage_limit is not None:
            model = self.reduced(with_memory=True)
        self.stats["reduced_nodes"] = len(model.nodes)
        self.stats["seconds_reduced"] = self.budget.seconds
        if not model.nodes:
            self.offer(model, {})
            self.bound = self.best_cost
            return
        chosen, dual = self.rounds(model)
        if not self.closed and not self.budget.exhausted and chosen is not None:
            neighbourhoods = Neighbourhoods(model, dual, chosen, self.seed)
            self.offers.model = model
            neighbourhoods.search(self.budget, self.offers.take)
            self.offers.flush()
            self.stats["neighbourhoods"] = neighbourhoods.looked_at
            self.stats["neighbourhoods_improved"] = neighbourhoods.improved
            if neighbourhoods.optimal:
                self.bound = self.best_cost
            elif not self.budget.exhausted:
                left = excluded(model, dual, self.upper(model), self.stopper())
                if not self.eliminated(left, self.offer):
                    self.exact(left, self.offer, 1.0)

    def reduced(self, with_memory: bool) -> Model:
        """The problem's model, reduced as far as the budget allows.

        On the way, as soon as no forbidden pair is left that a strategy cannot avoid, a large
        problem whose time is limited gets its first choice.
        """
        model = Model(
            self.problem, with_memory=with_memory, flat=self.flat, check=self.budget.check
        )
        self.budget.keep(RESERVE_OF_START * self.budget.seconds)
        if self.problem.num_nodes > RELAX_FIRST_NODES and self.budget.time_limit < math.inf:
            if not reduce(model, dominance=False, stop=self.stopper(FIRST_PART)):
                return model
            self.first_choice(model)
            model.dirty_nodes.update(model.nodes)
        reduce(model, stop=self.stopper(REDUCTION_PART))
        return model

    def first_choice(self, model: Model) -> None:
        """Offers what a few passes over a model give, at little cost beside what follows."""
        if model.nodes:
            arrays = flatten(model)
            found = self.finder(arrays, model, self.offer)
            ascend(Dual(arrays), FIRST_SWEEPS, self.budget, found)

    def finder(self, arrays: Arrays, model: Model, take: Take) -> Callable[[Integers], float]:
        """What an ascent calls with a choice: `take`, then the best cost in the model's terms."""

        def found(choice: Integers) -> float:
            take(model, arrays.chosen(choice))
            return self.upper(model)

        return found

    def stopper(self, until: float = 1.0) -> Stop:
        return self.budget.stopper(REDUCTION_WORK, until)

    @property
    def closed(self) -> bool:
        """Whether the best solution is proven to be good enough."""
        if self.best_cost is None or self.bound is None:
            return False
        return self.best_cost - self.bound <= self.tolerance

    @property
    def tolerance(self) -> float:
        """By how much the bound may miss the best cost."""
        return self.enough_gap * abs(self.best_cost or 0)

    def try_elimination(self, model: Model) -> bool:
        """Whether the model's optimum without memory was found and fits: it is the answer then."""
        has_limit = self.problem.usage_limit is not None
        left = min(self.budget.left(self.budget.used + FREE_PART if has_limit else 1.0))
        best = self.optimum_without_memory(model, left)
        if best is None or not self.offer(model, best[0]):
            return False
        self.stats |= {"method": "elimination", "largest_table": best[1].largest_cells}
        return True

    def optimum_without_memory(
        self, model: Model, left: float
    ) -> tuple[dict[int, int], EliminationOrder] | None:
        """The model's optimum if memory is no matter; None if `left` does not suffice for it."""
        order = elimination_order(model, TABLE_CELLS, int(min(ALL_CELLS, left / ELIMINATION_WORK)))
        if order is None:
            return None
        self.budget.spend(ELIMINATION_WORK * order.total_cells)
        chosen = eliminate(model, order, self.budget.stopper(0.0))
        if chosen is None:
            return None
        self.raise_bound(model, model.value(chosen))
        return chosen, order

    def rounds(self, model: Model) -> tuple[dict[int, int] | None, Dual]:
        """Ascents on smaller and smaller models; the best choice for the first, and its dual."""
        current = model
        prices: dict[tuple[int, int], float] = {}
        best: dict[int, int] | None = None
        first: Dual | None = None

        def take(current: Model, chosen: dict[int, int]) -> bool:
            nonlocal best
            accepted = self.offer(current, chosen)
            if accepted:
                best = current.before(model, chosen)
            return accepted

        for turn in range(ROUNDS):
            arrays = flatten(current)
            dual = Dual(arrays, np.array([prices.get(time, 0.0) for time in current.times]))
            first = first or dual
            upper = min(self.upper(current), current.largest_cost() + 2.0)
            few = len(arrays.low.cells) < FEW_CELLS
            used = self.budget.used
            until = max(0.6, used + 0.5 * (1.0 - used))
            result = ascend(
                dual,
                SWEEPS,
                self.budget,
                self.finder(arrays, current, take),
                upper=upper,
                until=until,
                known=self.best is not None,
                step=SMALL_STEP if turn and few else STEP,
                enough=(LATER_SWEEPS if turn else FEW_SWEEPS) if few else None,
                tolerance=lambda: self.tolerance / 2**model.shift,
                worthless=self.in_terms_of(current, self.at_most),
            )
            is_enough = result.gap <= self.tolerance / 2**model.shift or result.is_worthless
            if few and not is_enough and not self.budget.exhausted and len(arrays.room):
                until = max(until, self.budget.used + POLISH_PART * (1.0 - self.budget.used))
                polish(result, until)
            bound = certified_bound(dual)
            if bound > current.largest_cost():
                raise Contradiction
            self.raise_bound(current, bound)
            # In the problem's units: by so much the cost falls if the limit rises by one.
            self.stats["price_of_memory"] = float(dual.prices.sum()) * 2.0**current.shift
            if self.closed or self.budget.exhausted:
                break
            prices = dict(zip(current.times, dual.prices.tolist(), strict=True))
            if self.best_cost is None:
                if not self.eliminated(current, take):
                    self.exact(current, take)
                break
            cells = len(arrays.low.cells)
            current = excluded(current, dual, self.upper(current), self.stopper())
            if self.budget.used >= 1.0:
                break
            left = current.num_cells
            self.stats["excluded_nodes"] = len(current.nodes)
            self.stats["excluded_cells"] = left
            shrunk = left <= 0.8 * cells
            if (shrunk or not dual.prices.any()) and self.eliminated(current, take):
                break
            if shrunk and left > SMALL_CELLS and turn < ROUNDS - 1:
                continue
            if self.exact(current, take) or not shrunk:
                break
        assert first is not None
        return best, first

    def eliminated(self, model: Model, take: Take) -> bool:
        """Whether the model's optimum without memory fits, or closes the gap: it is solved then."""
        relaxed = model.without_memory()
        if not reduce(relaxed, stop=self.stopper()):
            return False
        best = self.optimum_without_memory(relaxed, min(self.budget.left()))
        if best is None or not (take(relaxed, best[0]) or self.closed):
            return False
        self.bound = self.best_cost
        self.stats["method"] = "ascent and elimination"
        return True

    def exact(self, model: Model, take: Take, part: float = 0.2) -> bool:
        """Whether the model, small by now, was solved exactly with a part of the budget."""
        cells = model.num_cells
        work, seconds = self.budget.share(part)
        if cells > EXACT_CELLS or EXACT_WORK * cells > min(work, seconds):
            return False
        answer = solve_cp_sat(model, time_limit=seconds, work_limit=work, seed=self.seed)
        self.budget.spend(answer.work + EXACT_WORK * cells)
        self.stats["cp_sat_cells"] = cells
        if answer.chosen is not None:
            take(model, answer.chosen)
        if answer.infeasible:
            raise Contradiction
        self.raise_bound(model, answer.bound)
        return self.closed

    def upper(self, model: Model) -> float:
        """The best cost in a model's terms."""
        return self.in_terms_of(model, self.best_cost)

    def in_terms_of(self, model: Model, cost: int | None) -> float:
        """A cost in a model's terms; None: an infinite one."""
        return np.inf if cost is None else float((cost >> model.shift) - model.offset)

    def raise_bound(self, model: Model, bound: int) -> None:
        """Takes note of a model's bound; with the best cost so far it is the problem's."""
        bound = (model.offset + bound) << model.shift
        if self.bound is None or bound > self.bound:
            self.bound = bound
        if self.best_cost is not None:
            self.bound = min(self.bound, self.best_cost)
        self.report()
        if self.at_most is not None and self.bound > self.at_most:
            raise TooDear(self.bound, self.at_most)

    def offer(self, model: Model, chosen: dict[int, int]) -> bool:
        """Whether a choice is allowed and fits and is the best so far, or as good."""
        start = self.budget.seconds
        accepted = self.consider(model.reconstruct(chosen))
        self.budget.keep(RESERVE * (self.budget.seconds - start))
        return accepted

    def consider(self, assignment: tuple[int, ...]) -> bool:
        """The same for an assignment of the problem."""
        array = np.array(assignment, np.int64)
        cost = self.flat.cost(array)
        if cost is None:
            return False
        peak = self.flat.peak(array)
        limit = self.problem.usage_limit
        if self.smallest_peak is None or peak[0] < self.smallest_peak[0]:
            self.smallest_peak = peak
        if limit is not None and peak[0] > limit:
            return False
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
            # The search for the smallest peak may come upon an assignment that fits.
            error = self.infeasible(proven=False)
            if self.best is None or self.best_cost is None:
                raise error
        bound = self.best_cost if self.bound is None else min(self.bound, self.best_cost)
        self.stats["seconds"] = self.budget.seconds
        self.stats["work"] = round(self.budget.work, 6)
        return Solution(
            self.best, self.best_cost, bound, relative_gap(self.best_cost, bound), self.stats
        )

    def feasible(self, problem: Problem) -> tuple[tuple[int, ...] | None, bool]:
        """An assignment of a related problem, or None and whether it is proven to have none."""
        search = _Solve(problem, Budget(PEAK_WORK, self.budget.left()[1]), self.seed, None)
        try:
            search.run()
        except Contradiction:
            return search.best, search.best is None
        except OutOfTime:
            pass
        if search.best is not None:
            self.consider(search.best)
        return search.best, False

    def out_of_time(self) -> bool:
        """Whether there is no time for another problem; work does not bind what errors report."""
        return not self.budget.fits(PEAK_FLATS * self.flat_seconds)

    def infeasible(self, proven: bool, finds_peak: bool = True) -> Infeasible:
        """The error to raise: with the smallest peak usage, which takes a search of its own."""
        peak = None
        if finds_peak:
            peak = smallest_peak(self.problem, self.feasible, self.out_of_time)
        if peak is not None and (self.smallest_peak is None or peak.usage <= self.smallest_peak[0]):
            self.smallest_peak = peak.usage, peak.interval
        limit = self.problem.usage_limit
        what = f"No assignment keeps within the usage limit of {limit}."
        if self.smallest_peak is None:
            if not proven:
                what = "No assignment was found in time."
            elif limit is None or (finds_peak and not self.out_of_time()):
                what = "Every assignment is forbidden."
            return Infeasible(what, proven=proven)
        usage, interval = self.smallest_peak
        lower_bound = None if peak is None else peak.lower_bound
        if not proven:
            what = f"No assignment within the usage limit of {limit} was found in time."
        exact = usage == lower_bound
        return Infeasible(
            what,
            why=f"the smallest peak usage {'is' if exact else 'found is'} {usage}, "
            f"in the interval {interval}",
            hint=f"raise the limit by {usage - limit}" if limit is not None else None,
            smallest_usage=usage,
            interval=interval,
            proven=proven,
            lower_bound=lower_bound,
        )


class _Offers:
    """Passes better and better choices of a model on, at intervals: to check one takes a while."""

    def __init__(self, search: _Solve) -> None:
        self.search = search
        self.model: Model | None = None
        self.pending: dict[int, int] | None = None
        self.wait = 0.0
        self.last = search.budget.seconds

    def take(self, chosen: dict[int, int]) -> None:
        self.pending = chosen
        if self.search.budget.seconds - self.last >= self.wait:
            self.flush()

    def flush(self) -> None:
        """Offers the last choice, unless that was done."""
        if self.pending is not None and self.model is not None:
            start = self.search.budget.seconds
            self.search.offer(self.model, self.pending)
            self.pending = None
            self.last = self.search.budget.seconds
            self.wait = 20.0 * (self.last - start)
