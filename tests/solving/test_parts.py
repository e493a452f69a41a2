"""The parts alone: reductions keep an optimum, bounds are bounds, exclusion keeps the better."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from benchmark_modules import evaluate, is_allowed, peak_usage
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_instances import brute_force, grid, make, problems

from autopar.passes.solver import FORBIDDEN, Problem
from autopar.passes.solver.arrays import flatten, interleaved
from autopar.passes.solver.budget import Budget, OutOfTime
from autopar.passes.solver.certificate import certified_bound
from autopar.passes.solver.dual import Chooser, Dual
from autopar.passes.solver.elimination import eliminate, elimination_order
from autopar.passes.solver.exclude import excluded
from autopar.passes.solver.flat import Flat
from autopar.passes.solver.model import INFINITE, Contradiction, Model
from autopar.passes.solver.neighbourhood import Neighbourhoods
from autopar.passes.solver.primal import improve, repair
from autopar.passes.solver.reduce import reduce
from autopar.passes.solver.time_axis import compress_time


def least_left(model: Model) -> int | None:
    """The least cost of what is left of a model, by trying all choices."""
    costs = []
    for strategies in itertools.product(*(range(len(model.cost_of(u))) for u in model.nodes)):
        chosen = dict(zip(model.nodes, strategies, strict=True))
        if model.fits(chosen) and model.value(chosen) < INFINITE:
            costs.append(model.offset + model.value(chosen))
    return min(costs, default=None)


@settings(max_examples=60, deadline=None)
@given(problem=problems(max_nodes=5))
def test_reductions_keep_an_optimum(problem: Problem) -> None:
    least, _ = brute_force(problem)
    model = Model(problem)
    try:
        reduce(model)
    except Contradiction:
        assert least is None
        return
    assert least_left(model) == least


def test_reconstruction_gives_the_cost_that_the_model_states() -> None:
    problem = grid(4, 6, 4, seed=0, tightness=0.4)
    model = Model(problem)
    reduce(model)
    random = np.random.default_rng(0)
    for _ in range(20):
        chosen = {u: int(random.integers(len(model.cost_of(u)))) for u in model.nodes}
        assignment = model.reconstruct(chosen)
        assert evaluate(problem, assignment) == model.offset + model.value(chosen)
        assert problem.usage_limit is not None
        fits = peak_usage(problem, assignment)[0] <= problem.usage_limit
        assert fits == model.fits(chosen)


def test_ties_merge_and_chains_are_eliminated() -> None:
    tie = [[0, FORBIDDEN], [FORBIDDEN, 0]]
    problem = make(
        [[1, 2], [0, 5], [3, 1], [0, 0]],
        {(0, 1): tie, (1, 2): [[4, 0], [0, 4]], (2, 3): [[1, 2], [3, 1]]},
    )
    model = Model(problem)
    reduce(model)
    assert model.nodes == []
    assert model.offset == brute_force(problem)[0]


def test_dominance_respects_memory() -> None:
    # The second strategy costs more and uses less: it must stay. The third one is worse in both.
    problem = make([[0, 1, 2]], usages=[[9, 3, 9]], limit=8)
    model = Model(problem)
    reduce(model)
    assert model.reconstruct(dict.fromkeys(model.nodes, 0)) == (1,)


@settings(max_examples=40, deadline=None)
@given(problem=problems(), seed=st.integers(0, 99), scale=st.sampled_from([0.0, 0.1, 3.0]))
def test_certified_bounds_are_bounds(problem: Problem, seed: int, scale: float) -> None:
    least, _ = brute_force(problem)
    if least is None:
        return
    model = Model(problem)
    compress_time(model)
    arrays = flatten(model)
    if not arrays.num_nodes:
        return
    random = np.random.default_rng(seed)
    dual = Dual(arrays, random.random(len(arrays.room)) * scale)
    bounds = [dual.sweep(index % 2 == 0) for index in range(6)]
    assert all(b >= a - 1e-6 * abs(a) for a, b in itertools.pairwise(bounds))
    assert model.offset + certified_bound(dual) <= least
    # Any messages are valid, so also wrong ones.
    dual.low += random.integers(-3, 4, len(dual.low))
    dual.high += random.integers(-3, 4, len(dual.high))
    assert model.offset + certified_bound(dual) <= least


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_exclusion_keeps_everything_better(seed: int, memory: bool) -> None:
    problem = grid(3, 3, 3, seed=seed, tightness=0.5)
    if not memory:
        problem = replace(problem, usage_limit=None)
    least, _ = brute_force(problem)
    assert least is not None
    model = Model(problem)
    if memory:
        reduce(model)
    dual = Dual(flatten(model))
    for index in range(30):
        dual.sweep(index % 2 == 0)
    smaller = excluded(model, dual, float(least + 5 - model.offset))
    if not memory:  # with memory, prices of zero need not exclude anything
        assert len(smaller.nodes) < len(model.nodes)
    assert least_left(smaller) == least


def test_elimination_of_a_grid_equals_brute_force() -> None:
    problem = replace(grid(3, 3, 3, seed=1, tightness=0.5), usage_limit=None)
    model = Model(problem)
    order = elimination_order(model, 10**6, 10**7)
    assert order is not None
    best = eliminate(model, order)
    assert best is not None
    assert model.offset + model.value(best) == brute_force(problem)[0]
    assert elimination_order(model, 20, 10**7) is None


def test_repair_and_improvement_fit_and_never_cost_more() -> None:
    problem = grid(5, 10, 4, seed=2, tightness=0.6)
    model = Model(problem)
    reduce(model)
    arrays = flatten(model)
    chooser = Chooser(arrays)
    Dual(arrays).sweep(True, chooser)
    assert (arrays.profile(chooser.choice) > arrays.room).any()
    repaired, fits = repair(arrays, chooser.choice, lambda: False)
    assert fits
    assert model.fits(arrays.chosen(repaired))
    improved = improve(arrays, repaired, lambda: False)
    assert model.fits(arrays.chosen(improved))
    assert arrays.costs_of(improved) <= arrays.costs_of(repaired)
    assert arrays.costs_of(improved) == model.value(arrays.chosen(improved))


@pytest.mark.parametrize(("tightness", "expected"), [(0.0, True), (0.6, False)])
def test_repair_without_time_says_whether_a_choice_fits(tightness: float, expected: bool) -> None:
    problem = grid(5, 10, 4, seed=2, tightness=tightness)
    model = Model(problem)
    reduce(model)
    arrays = flatten(model)
    chooser = Chooser(arrays)
    Dual(arrays).sweep(True, chooser)
    choice, fits = repair(arrays, chooser.choice, lambda: True)
    assert fits == expected and (choice == chooser.choice).all()


def test_neighbourhoods_improve_a_poor_choice() -> None:
    problem = grid(5, 10, 4, seed=3, tightness=0.5)
    model = Model(problem)
    reduce(model)
    dual = Dual(flatten(model))
    for index in range(20):
        dual.sweep(index % 2 == 0)
    # What uses least always fits, and is dear.
    start = {
        u: int(model.memory[u][0].usage.sum(axis=0).argmin()) if model.memory[u] else 0
        for u in model.nodes
    }
    costs = [model.value(start)]
    search = Neighbourhoods(model, dual, start, seed=0)

    def better(chosen: dict[int, int]) -> None:
        assert model.fits(chosen)
        costs.append(model.value(chosen))

    search.search(Budget(1.0), better)
    assert search.improved == len(costs) - 1 > 0
    assert costs == sorted(costs, reverse=True)


def test_the_interleaved_order_has_all_nodes_and_few_levels() -> None:
    count = 2000
    problem = make([[0, 1]] * count, {(k, k + 1): [[0, 2], [3, 0]] for k in range(count - 1)})
    assert sorted(interleaved(list(range(count)))) == list(range(count))
    assert flatten(Model(problem)).num_levels < 100


@settings(max_examples=60, deadline=None)
@given(problem=problems(max_nodes=5), steps=st.integers(0, 40))
def test_reductions_that_end_early_keep_an_optimum(problem: Problem, steps: int) -> None:
    least, _ = brute_force(problem)
    left = iter(range(steps))
    model = Model(problem)
    try:
        whole = reduce(model, stop=lambda: next(left, None) is None)
        assert least_left(model) == least
        if not whole:
            reduce(model)
    except Contradiction:
        assert least is None
        return
    assert least_left(model) == least


@settings(max_examples=60, deadline=None)
@given(problem=problems(), data=st.data())
def test_flat_arrays_evaluate_like_the_problem(problem: Problem, data: st.DataObject) -> None:
    assignment = tuple(data.draw(st.integers(0, len(c) - 1)) for c in problem.node_costs)
    flat, array = Flat(problem), np.array(assignment, np.int64)
    cost = evaluate(problem, assignment) if is_allowed(problem, assignment) else None
    assert flat.cost(array) == cost
    assert flat.peak(array)[0] == peak_usage(problem, assignment)[0]


def test_usages_beyond_64_bits_add_up_exactly() -> None:
    large = 2**62
    problem = make([[0]] * 5, usages=[[large]] * 5)
    flat = Flat(problem)
    assert flat.peak(np.zeros(5, np.int64)) == (5 * large, (0, 1))
    assert peak_usage(problem, (0,) * 5) == (5 * large, (0, 1))


def test_a_budget_says_when_the_time_is_over() -> None:
    Budget(0.0).check()
    Budget(time_limit=60.0).check()
    with pytest.raises(OutOfTime):
        Budget(time_limit=0.0).check()
    assert Budget(2.0).fits(1e9) and not Budget(time_limit=60.0).fits(61.0)
    assert Budget(2.0).left(0.5) == (1.0, math.inf)
    assert min(Budget(2.0, 0.0).left(0.5)) == 0.0
    problem = grid(3, 3, 3, seed=0, tightness=0.5)
    with pytest.raises(OutOfTime):
        Model(problem, check=Budget(time_limit=0.0).check)
