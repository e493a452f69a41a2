"""The memory between a plan that fits and one that does not, filled up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.passes.sharding import integer_program
from autopar.passes.sharding.integer_program import counted_rows, to_problem
from autopar.passes.sharding.memory_price import MemoryPrices
from autopar.passes.sharding.memory_rows import memory_rows, rows_peak
from autopar.passes.solver import solve
from sharding.steps import Passes, graph_of, shaped

LAYERS, WIDTH = 4, 64


def alike_step(state: Any, batch: Any) -> Any:
    """Momentum of layers that are alike, side by side: no cost joins them."""

    def loss(weights: Any) -> Any:
        return sum(jnp.mean(jnp.tanh(x @ w) ** 2) for x, w in zip(batch, weights, strict=True))

    gradients = jax.grad(loss)([w for w, _ in state])
    momenta = [0.9 * m + g for (_, m), g in zip(state, gradients, strict=True)]
    return [(w - 0.1 * m, m) for (w, _), m in zip(state, momenta, strict=True)]


def test_of_layers_that_are_alike_some_are_as_quick_as_with_more_memory() -> None:
    layer = shaped(WIDTH, WIDTH), shaped(WIDTH, WIDTH)
    graph = graph_of(alike_step, [layer] * LAYERS, [shaped(8 * WIDTH, WIDTH)] * LAYERS)
    built = Passes(graph, (4,)).build()
    rows = memory_rows(built)
    prices = MemoryPrices(built, rows)
    small, quick = prices.solved(1.0, solve), prices.solved(0.0, solve)
    least, most = (rows_peak(built, rows, x.assignment) for x in (small, quick))
    assert least < most and quick.cost < small.cost
    found = [prices.filled(small, quick, int(limit)) for limit in np.linspace(least, most, 9)]
    for limit, plan in zip(np.linspace(least, most, 9), found, strict=True):
        assert rows_peak(built, rows, plan.assignment) <= int(limit)
        assert plan.cost == prices.cost(plan.assignment)
    costs = [plan.cost for plan in found]
    assert costs == sorted(costs, reverse=True)
    assert found[-1].assignment == quick.assignment
    assert len({*costs} - {small.cost, quick.cost}) >= 2  # neither all layers nor none
    # What does not fit at all stays as it is, and gets no larger.
    beyond = prices.filled(small, quick, least // 2)
    assert rows_peak(built, rows, beyond.assignment) <= least


@pytest.mark.parametrize("price", [1e-12, 1e-9])
def test_plans_that_are_the_same_are_left_as_they_are(price: float) -> None:
    graph = graph_of(alike_step, [(shaped(8, 8), shaped(8, 8))], [shaped(16, 8)])
    built = Passes(graph, (4,)).build()
    prices = MemoryPrices(built, memory_rows(built))
    plan = prices.solved(price, solve)
    assert prices.filled(plan, plan, 0) == plan


def test_the_solver_is_asked_about_the_rows_that_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is negligible together is not: it is left to the account of the lowered program."""
    layer = shaped(WIDTH, WIDTH), shaped(WIDTH, WIDTH)
    small = [(shaped(WIDTH, 8), shaped(WIDTH, 8))] * 32
    batch = [shaped(8 * WIDTH, WIDTH)] * (LAYERS + 32)
    built = Passes(graph_of(alike_step, [layer] * LAYERS + small, batch), (4,)).build()
    rows = memory_rows(built)
    quick = solve(to_problem(built, None))
    limit = rows_peak(built, rows, quick.assignment) * 3 // 4
    monkeypatch.setattr(integer_program, "NEGLIGIBLE_SHARE", limit // 10_000)
    counted = counted_rows(built, rows, limit)
    assert 0 < len(counted) < len(rows)
    found = solve(to_problem(built, limit, rows))
    assert rows_peak(built, counted, found.assignment) <= limit
    assert rows_peak(built, rows, found.assignment) > limit
