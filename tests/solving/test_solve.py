"""`solve` against brute force and against plain models, and what it promises about limits."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from benchmark_modules import evaluate, is_allowed, peak_usage, plain_model
from hypothesis import given, settings
from solver_instances import assignments, brute_force, grid, make, problems, transformer

from autopar.passes.solver import FORBIDDEN, Infeasible, Problem, TooDear, solve


@settings(max_examples=150, deadline=None)
@given(problem=problems())
def test_equals_brute_force(problem: Problem) -> None:
    least, peak = brute_force(problem)
    if least is None:
        with pytest.raises(Infeasible) as caught:
            solve(problem)
        assert caught.value.proven
        assert caught.value.smallest_usage == caught.value.lower_bound == peak
        return
    solution = solve(problem)
    assert solution.cost == solution.lower_bound == least
    assert solution.gap == 0
    check(problem, solution.assignment, solution.cost)


def check(problem: Problem, assignment: tuple[int, ...], cost: int) -> None:
    assert is_allowed(problem, assignment)
    assert evaluate(problem, assignment) == cost
    if problem.usage_limit is not None:
        assert peak_usage(problem, assignment)[0] <= problem.usage_limit


@pytest.mark.parametrize("tightness", [0.3, 0.6, 0.85])
def test_equals_brute_force_where_memory_binds(tightness: float) -> None:
    problem = grid(3, 3, 3, seed=7, tightness=tightness)
    solution = solve(problem)
    assert solution.cost == solution.lower_bound == brute_force(problem)[0]
    assert solution.cost > solve(replace(problem, usage_limit=None)).cost


@pytest.mark.parametrize("tightness", [0.3, 0.6, 0.85])
def test_ends_where_every_solution_is_proven_to_cost_too_much(tightness: float) -> None:
    """And not where one costs as much as it may: then it is the same as without a limit of cost."""
    problem = grid(3, 5, 3, seed=3, tightness=tightness)
    best = solve(problem)
    assert best.gap == 0
    within = solve(problem, at_most=best.cost)
    assert (within.assignment, within.cost) == (best.assignment, best.cost)
    for most in (0, best.cost // 2):
        with pytest.raises(TooDear) as caught:
            solve(problem, at_most=most)
        assert caught.value.proven and most < caught.value.lower_bound_of_cost <= best.cost
    for most in (int(0.9 * best.cost), best.cost - 1):  # what is found first may be proven best
        try:
            assert solve(problem, at_most=most).cost == best.cost
        except TooDear as error:
            assert most < error.lower_bound_of_cost <= best.cost


@pytest.mark.parametrize("engine", ["cp-sat", "highs"])
def test_equals_the_plain_model(engine: str) -> None:
    problem = grid(3, 5, 3, seed=3, tightness=0.6)
    mine = solve(problem)
    theirs = plain_model.plain(problem, engine=engine)  # type: ignore[arg-type]
    check(problem, mine.assignment, mine.cost)
    assert mine.cost == theirs.cost == mine.lower_bound


def test_without_time_the_plain_model_has_no_solution() -> None:
    problem = grid(3, 5, 3, seed=3, tightness=0.6)
    with pytest.raises(Infeasible, match="no solution in time") as caught:
        plain_model.plain(problem, time_limit=0.0)
    assert not caught.value.proven


def test_a_frustrated_grid_has_a_bounded_gap() -> None:
    problem = grid(6, 12, 4, seed=1, tightness=0.5)
    solution = solve(problem, work_limit=0.7)
    check(problem, solution.assignment, solution.cost)
    assert solution.lower_bound <= solution.cost
    assert solution.gap < 0.04


def test_a_thousand_nodes_of_a_transformer_are_solved_exactly() -> None:
    problem = transformer(layers=48, strategies=16)
    assert problem.num_nodes > 1000
    free = solve(problem)
    assert free.gap == 0
    check(problem, free.assignment, free.cost)
    peak = peak_usage(problem, free.assignment)[0]
    assert solve(replace(problem, usage_limit=peak)).cost == free.cost


def with_little_memory(problem: Problem, assignment: tuple[int, ...]) -> Problem:
    """Half way between what an assignment needs and what the smallest strategies would."""
    peak, _ = peak_usage(problem, assignment)
    smallest = tuple(np.full_like(usage, usage.min()) for usage in problem.usages)
    least, _ = peak_usage(replace(problem, usages=smallest), assignment)
    return replace(problem, usage_limit=(peak + least) // 2)


def test_a_transformer_with_little_memory() -> None:
    problem = transformer(layers=3, strategies=6)
    free = solve(problem)
    tight = with_little_memory(problem, free.assignment)
    solution = solve(tight, work_limit=2)
    check(tight, solution.assignment, solution.cost)
    assert free.cost <= solution.lower_bound <= solution.cost
    assert solution.gap < 0.005


def test_memory_that_binds_hard_leaves_a_small_gap() -> None:
    problem = transformer(layers=24, strategies=12)
    assert problem.num_nodes > 500
    free = solve(problem)
    tight = with_little_memory(problem, free.assignment)
    solution = solve(tight, work_limit=2)
    check(tight, solution.assignment, solution.cost)
    assert solution.cost > 1.2 * free.cost
    assert solution.gap < 0.005


def test_a_gap_that_is_enough_ends_the_search() -> None:
    problem = transformer(layers=24, strategies=12)
    free = solve(problem)
    peak, _ = peak_usage(problem, free.assignment)
    tight = replace(problem, usage_limit=int(0.8 * peak))
    thorough = solve(tight, work_limit=2)
    quick = solve(tight, work_limit=2, enough_gap=0.02)
    check(tight, quick.assignment, quick.cost)
    assert quick.gap <= 0.02
    assert quick.lower_bound <= thorough.cost
    assert quick.stats["work"] < thorough.stats["work"]


@pytest.mark.parametrize("work_limit", [0.02, 0.2, 1.0])
def test_a_work_limit_is_hardly_overspent(work_limit: float) -> None:
    problem = grid(6, 20, 6, seed=2, tightness=0.6)
    solution = solve(problem, work_limit=work_limit)
    check(problem, solution.assignment, solution.cost)
    assert solution.stats["work"] < 1.1 * work_limit + 0.05


def test_the_same_work_gives_the_same_solution() -> None:
    problem = grid(4, 8, 4, seed=5, tightness=0.7)
    first, second = (solve(problem, work_limit=0.5, seed=3) for _ in range(2))
    assert first.assignment == second.assignment
    assert first.lower_bound == second.lower_bound
    assert first.stats["work"] == second.stats["work"]


def test_a_time_limit_returns_what_there_is() -> None:
    problem = grid(6, 20, 6, seed=2, tightness=0.6)
    start = time.monotonic()
    solution = solve(problem, time_limit=2.0)
    check(problem, solution.assignment, solution.cost)
    assert solution.stats["seconds"] <= time.monotonic() - start
    assert 0 < solution.lower_bound <= solution.cost


def test_without_time_the_error_says_that_nothing_is_proven() -> None:
    problem = grid(6, 20, 6, seed=2, tightness=0.6)
    with pytest.raises(Infeasible, match="in time") as caught:
        solve(problem, time_limit=1e-6)
    assert not caught.value.proven


@pytest.mark.parametrize("tightness", [0.0, 0.6])
def test_hardly_any_work_gives_a_feasible_choice(tightness: float) -> None:
    problem = grid(6, 12, 4, seed=1, tightness=tightness)
    first = solve(problem, work_limit=1e-4)
    check(problem, first.assignment, first.cost)
    assert first.lower_bound <= solve(problem, work_limit=0.3).cost <= first.cost


def test_a_large_problem_is_solved_exactly() -> None:
    # More nodes than are tried without memory first: it gets a choice before it is fully reduced.
    count = 5002
    random = np.random.default_rng(0)
    problem = make(
        random.integers(0, 9, (count, 2)).tolist(),
        {(k, k + 1): random.integers(0, 9, (2, 2)).tolist() for k in range(count - 1)},
        usages=[[1, 2] if k % 500 == 0 else [0, 0] for k in range(count)],
        intervals=[(k, k + 1200) for k in range(count)],
        limit=5,
    )
    solution = solve(problem)
    check(problem, solution.assignment, solution.cost)
    assert solution.gap == 0
    assert solve(replace(problem, usage_limit=None)).cost <= solution.cost


def test_progress_improves_steadily() -> None:
    seen: list[tuple[int | None, int | None]] = []
    problem = grid(4, 8, 4, seed=4, tightness=0.7)
    solution = solve(problem, work_limit=0.5, progress=lambda c, b, _: seen.append((c, b)))
    costs = [cost for cost, _ in seen if cost is not None]
    bounds = [bound for _, bound in seen if bound is not None]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == solution.cost
    assert max(bounds) == solution.lower_bound


def test_trivial_problems() -> None:
    assert solve(make([])).assignment == ()
    assert solve(make([[5]])).cost == 5
    assert solve(make([[5, -3], [0]])).assignment == (1, 0)
    assert solve(make([[1, 0]], usages=[[0, 1]], limit=0)).assignment == (0,)


def test_costs_near_the_largest_integers() -> None:
    large = FORBIDDEN - 1
    problem = make(
        [[large, large - 1], [large - 7, large], [0, large]],
        {(0, 1): [[0, large], [large, 3]], (1, 2): [[large, 0], [1, large]]},
    )
    solution = solve(problem)
    least = min(evaluate(problem, assignment) for assignment in assignments(problem))
    # Such sums do not fit into 64 bits: costs are rounded inside, the bound stays a bound.
    assert solution.lower_bound <= least <= solution.cost
    assert solution.gap < 1e-9


def test_nothing_is_allowed() -> None:
    with pytest.raises(Infeasible, match="forbidden") as caught:
        solve(make([[0, 0], [0]], {(0, 1): [[FORBIDDEN], [FORBIDDEN + 5]]}))
    assert caught.value.proven
    assert caught.value.smallest_usage is None


def test_too_little_memory_names_the_peak() -> None:
    problem = make(
        [[0, 0], [0, 0]],
        {(0, 1): [[FORBIDDEN, 0], [0, FORBIDDEN]]},
        usages=[[3, 9], [4, 8]],
        intervals=[(0, 5), (2, 7)],
        limit=10,
    )
    with pytest.raises(Infeasible) as caught:
        solve(problem)
    error = caught.value
    assert error.proven
    assert error.smallest_usage == error.lower_bound == 11
    assert error.interval == (2, 5)
    assert "limit of 10" in str(error)


def test_the_peak_is_only_looked_for_if_asked() -> None:
    problem = make([[0, 0]], {}, usages=[[3, 9]], intervals=[(0, 5)], limit=2)
    with pytest.raises(Infeasible) as caught:
        solve(problem, finds_peak=False)
    assert caught.value.proven
    assert caught.value.lower_bound is None
    assert "limit of 2" in str(caught.value)


def test_a_large_infeasible_problem_is_proven_infeasible() -> None:
    problem = grid(6, 12, 4, seed=1, tightness=0.5)
    least, interval = peak_usage(problem, [int(usage.argmin()) for usage in problem.usages])
    with pytest.raises(Infeasible) as caught:
        solve(replace(problem, usage_limit=least - 1))
    assert caught.value.proven
    assert caught.value.smallest_usage == least
    assert caught.value.interval == interval


def test_the_solver_does_not_import_jax_and_ortools_only_when_it_is_used() -> None:
    code = "import autopar.passes.solver.search, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "autopar.passes.solver.search" in loaded
    assert loaded & {"jax", "ortools"} == set()


def test_an_elimination_that_costs_more_than_the_work_left_is_not_begun() -> None:
    """It would use up the work, and leave the first choice that comes to mind."""
    rng, size = np.random.default_rng(0), 14
    nodes = [rng.integers(0, 100, size).tolist() for _ in range(9)]
    distance = 1000 * np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
    edges = {
        (u, v): (distance + rng.integers(0, 50, distance.shape)).tolist()
        for u in range(9)
        for v in range(u + 1, min(u + 6, 9))
    }
    problem = make(nodes, edges)
    best = solve(problem)
    assert best.stats["method"] == "elimination"
    work = 0.5 * best.stats["work"]
    hurried = solve(problem, work_limit=work)
    assert "method" not in hurried.stats
    assert hurried.stats["work"] <= 1.05 * work
    assert hurried.cost <= 1.05 * best.cost
    check(problem, hurried.assignment, hurried.cost)
