"""What a unit's forward pass takes of its time, as its pieces say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.base.options import Options
from autopar.passes.planner.layer_units import units_of
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.stage_costs import joined
from autopar.passes.planner.unit_costs import UnitCosts
from autopar.passes.trace.trace import trace

WIDTH = 2048


def block(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
    return x + jnp.tanh(x @ weights[0]) @ weights[1]


def losses(run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for own in weights:
            x = run(x, own)
        return jnp.mean(x * x)

    return loss


def train_step(run: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(weights: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(losses(run))(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    return step


def evaluated(weights: Any, x: jax.Array) -> Any:
    return weights, losses(block)(weights, x)


@pytest.mark.parametrize(
    ("step", "least", "most"),
    [
        (train_step(block), 0.31, 0.36),  # two products forward, four backward
        (train_step(jax.checkpoint(block)), 0.26, 0.3),  # and the first one again
        (evaluated, 1.0, 1.0),
    ],
    ids=["kept", "checkpointed", "evaluated"],
)
def test_what_a_checkpoint_computes_again_is_no_part_of_the_forward_pass(
    step: Callable[..., Any], least: float, most: float
) -> None:
    cluster = autopar.Cluster.preset("p3.16xlarge")
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")
    arguments = [(matrix, matrix)] * 6, jax.ShapeDtypeStruct((8192, WIDTH), "float32")
    graph = trace(step, arguments).graph
    search = LayoutSearch.of(graph, Options(stages="auto"), cluster, lambda message: None)
    split = search.split(4, is_pipeline=True)
    units = units_of(split)
    assert units is not None
    costs = UnitCosts(units, units.typical_graphs(split), search.options, cluster, 4)
    total = joined(costs.free_ways(1)[0][1])
    assert least <= total.forward_seconds / total.seconds <= most
