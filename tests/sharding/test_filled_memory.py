"""The memory between a plan that fits and one that does not, filled up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
