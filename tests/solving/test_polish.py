"""Prices and choices from programs over the core: what they must equal, bound and keep."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_instances import brute_force, grid, make, problems

from autopar.passes.solver import Problem
from autopar.passes.solver.arrays import Arrays, flatten
from autopar.passes.solver.ascent import Ascent
from autopar.passes.solver.budget import Budget
from autopar.passes.solver.certificate import certified_bound
from autopar.passes.solver.dual import Dual
from autopar.passes.solver.linear import Core, best_in_core, relaxation
from autopar.passes.solver.model import Contradiction, Model
from autopar.passes.solver.polish import polish
from autopar.passes.solver.problem import Integers
from autopar.passes.solver.reduce import reduce
from autopar.passes.solver.time_axis import compress_time


def everything(dual: Dual) -> tuple[Integers, Integers]:
    core = Core(dual)
    core.look()
    return core.cheapest(10**9, None)


def some_choice(arrays: Arrays) -> Integers:
    """What uses least of memory: it always fits."""
    return np.array(
        [
            first + arrays.usage[arrays.row_first[row] : arrays.row_first[row] + count].argmin()
            for first, count, row in zip(
                arrays.first[:-1], np.diff(arrays.first), arrays.node_rows[:-1], strict=True
            )
        ],
        np.int64,
    )


def test_the_relaxation_of_a_chain_is_exact() -> None:
    random = np.random.default_rng(0)
    problem = make(
        random.integers(0, 9, (7, 3)).tolist(),
        {(k, k + 1): random.integers(0, 9, (3, 3)).tolist() for k in range(6)},
    )
    model = Model(problem)
    dual = Dual(flatten(model))
    relaxed = relaxation(dual, *everything(dual))
    assert relaxed.value is not None and relaxed.choice is not None
    assert model.offset + relaxed.value == pytest.approx(brute_force(problem)[0])


@pytest.mark.parametrize("tightness", [0.3, 0.6, 0.85])
def test_the_relaxation_gives_the_best_prices_and_messages(tightness: float) -> None:
    problem = grid(3, 3, 3, seed=7, tightness=tightness)
    least, _ = brute_force(problem)
    assert least is not None
    model = Model(problem)
    compress_time(model)
    arrays = flatten(model)
    dual = Dual(arrays)
    relaxed = relaxation(dual, *everything(dual))
    assert relaxed.value is not None and relaxed.prices is not None
    assert relaxed.prices.any()
    # No prices and messages give more than the relaxation's value, and its own give that.
    for scale in (0.0, 0.5, 2.0):
        other = Dual(arrays, relaxed.prices * scale)
        assert max(other.sweep(k % 2 == 0) for k in range(20)) <= relaxed.value + 1e-6
    dual.set_prices(relaxed.prices)
    dual.add_messages(relaxed.low, relaxed.high)
    assert dual.sweep(True) == pytest.approx(relaxed.value)
    assert np.ceil(relaxed.value - 1e-6) <= certified_bound(dual) <= least - model.offset


@settings(max_examples=60, deadline=None)
@given(problem=problems(max_nodes=5), cells=st.integers(1, 30))
def test_bounds_after_a_core_are_bounds(problem: Problem, cells: int) -> None:
    least, _ = brute_force(problem)
    if least is None:
        return
    model = Model(problem)
    try:
        reduce(model)
    except Contradiction:
        return
    if not model.nodes:
        return
    dual = Dual(flatten(model))
    core = Core(dual)
    core.look()
    relaxed = relaxation(dual, *core.cheapest(cells, None))
    if relaxed.prices is not None:
        dual.set_prices(relaxed.prices)
        dual.add_messages(relaxed.low, relaxed.high)
    dual.sweep(True)
    assert model.offset + certified_bound(dual) <= least


def test_a_core_keeps_the_choice_that_it_must() -> None:
    problem = grid(4, 6, 4, seed=0, tightness=0.5)
    model = Model(problem)
    compress_time(model)
    arrays = flatten(model)
    dual = Dual(arrays)
    core = Core(dual)
    core.look()
    choice = some_choice(arrays)
    strategies, pairs = core.cheapest(20, choice)
    assert len(pairs) < 100
    relaxed = relaxation(dual, strategies, pairs)
    assert relaxed.value is not None
    assert relaxed.value <= arrays.costs_of(choice) + 1e-6


@pytest.mark.parametrize("tightness", [0.3, 0.6, 0.85])
def test_branch_and_bound_over_all_equals_brute_force(tightness: float) -> None:
    problem = grid(3, 3, 3, seed=7, tightness=tightness)
    model = Model(problem)
    compress_time(model)
    arrays = flatten(model)
    dual = Dual(arrays, np.full(len(arrays.room), 0.7))
    dual.sweep(True)
    choice, solved, _ = best_in_core(dual, *everything(dual), some_choice(arrays), branches=1000)
    assert solved and choice is not None
    assert (arrays.profile(choice) <= arrays.room).all()
    assert model.offset + arrays.costs_of(choice) == brute_force(problem)[0]


def test_polish_improves_bound_and_choice() -> None:
    problem = grid(4, 8, 4, seed=4, tightness=0.6)
    model = Model(problem)
    reduce(model)
    arrays = flatten(model)
    dual = Dual(arrays)
    before = max(dual.sweep(k % 2 == 0) for k in range(20))
    costs: list[float] = []

    def found(choice: Integers) -> float:
        assert model.fits(arrays.chosen(choice))
        costs.append(arrays.costs_of(choice))
        return min(costs)

    start = some_choice(arrays)
    cost = arrays.costs_of(start)
    result = Ascent(dual, Budget(5.0), found, upper=cost, choice=start, cost=cost)
    polish(result, until=0.8)
    assert before < result.bound <= min(costs) < arrays.costs_of(start)
    assert result.bound == pytest.approx(certified_bound(dual), abs=1.0)
    assert result.choice is not None and arrays.costs_of(result.choice) == min(costs)


def test_an_earlier_state_is_restored_as_it_was() -> None:
    problem = replace(grid(3, 4, 3, seed=1, tightness=0.5))
    model = Model(problem)
    compress_time(model)
    dual = Dual(flatten(model))
    bound = max(dual.sweep(k % 2 == 0) for k in range(10))
    state = dual.state()
    dual.set_prices(np.full(len(dual.prices), 1e30))  # swallows all that was there
    dual.sweep(True)
    dual.restore(state)
    assert dual.sweep(True) >= bound - 1e-6
