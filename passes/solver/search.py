"""`solve`: the order in which the solver tries its methods."""

from __future__ import annotations

import time
from typing import Any

from autopar.passes.solver.elimination import eliminate, elimination_order
from autopar.passes.solver.model import Contradiction, Model
from autopar.passes.solver.plain import solve_cp_sat
from autopar.passes.solver.problem import Problem, evaluate, is_allowed, peak_usage
from autopar.passes.solver.reduce import reduce
from autopar.passes.solver.solution import Infeasible, Solution, relative_gap

TABLE_CELLS = 20_000_000
ALL_CELLS = 200_000_000
DEFAULT_WORK = 60.0


def solve(
    problem: Problem,
    *,
    time_limit: float | None = None,
    work_limit: float | None = None,
    seed: int = 0,
) -> Solution:
    """Finds the cheapest assignment that fits, with a proven bound on what it may lack.

    Args:
        problem: what to solve.
        time_limit: seconds of wall clock after which the best solution so far is returned.
        work_limit: deterministic work, about a second each; the result depends on it and on
            nothing else. By default 60 if there is no time limit.
        seed: of the randomised parts.

    Raises:
        Infeasible: if there is no solution, or none was found within the limits.
    """
    start = time.monotonic()
    if work_limit is None and time_limit is None:
        work_limit = DEFAULT_WORK
    stats: dict[str, Any] = {}
    try:
        model = Model(problem, with_memory=False)
        chosen = _exact(model, stats)
        if chosen is not None and _fits(problem, model.reconstruct(chosen)):
            return _solution(problem, model, chosen, model.value(chosen), stats)
        bound = None if chosen is None else (model.offset + model.value(chosen)) << model.shift
        model = Model(problem)
        reduce(model)
        stats["reduced_nodes"] = len(model.nodes)
    except Contradiction as contradiction:
        raise _infeasible(problem, model, contradiction) from None
    left = None if time_limit is None else time_limit - (time.monotonic() - start)
    answer = solve_cp_sat(model, time_limit=left, work_limit=work_limit, seed=seed)
    stats["method"] = "cp-sat"
    if answer.chosen is None:
        if answer.infeasible:
            raise _infeasible(problem, model, Contradiction())
        raise Infeasible("no solution was found within the limits")
    return _solution(problem, model, answer.chosen, answer.bound, stats, bound)


def _exact(model: Model, stats: dict[str, Any]) -> dict[int, int] | None:
    """Reduces a model without memory and returns its optimal choice, if that is practical."""
    reduce(model)
    stats["relaxed_nodes"] = len(model.nodes)
    order = elimination_order(model, TABLE_CELLS, ALL_CELLS)
    if order is None:
        return None
    stats["method"] = "elimination"
    stats["largest_table"] = order.largest_cells
    return eliminate(model, order)


def _fits(problem: Problem, assignment: tuple[int, ...]) -> bool:
    return problem.usage_limit is None or (
        peak_usage(problem, assignment)[0] <= problem.usage_limit
    )


def _solution(
    problem: Problem,
    model: Model,
    chosen: dict[int, int],
    bound: int,
    stats: dict[str, Any],
    other_bound: int | None = None,
) -> Solution:
    assignment = model.reconstruct(chosen)
    cost = evaluate(problem, assignment)
    assert is_allowed(problem, assignment) and _fits(problem, assignment)
    bound = (model.offset + bound) << model.shift
    if other_bound is not None:
        bound = max(bound, other_bound)
    bound = min(cost, bound)
    return Solution(assignment, cost, bound, relative_gap(cost, bound), stats)


def _infeasible(problem: Problem, model: Model, reason: Contradiction) -> Infeasible:
    if reason.usage is not None and reason.point is not None:
        return Infeasible(
            f"every assignment uses at least {reason.usage} at {model.times[reason.point]}, "
            f"the limit is {problem.usage_limit}",
            smallest_usage=reason.usage,
            interval=model.times[reason.point],
            proven=True,
            lower_bound=reason.usage,
        )
    return Infeasible("every assignment is forbidden or exceeds the usage limit", proven=True)
