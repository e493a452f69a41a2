"""What units need with more microbatches is told by what they need with few."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.base.options import Options
from autopar.passes.planner.layer_units import units_of
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.stage_costs import UnitCost, joined
from autopar.passes.planner.unit_costs import UnitCosts
from autopar.passes.trace.trace import trace

LENGTH, WIDTH = 64, 32


def layer(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Scores of all positions, those that come later masked, as attention by hand has them."""
    scores = x @ jnp.swapaxes(x @ weight, -1, -2)
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    return x + jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ x


def train_step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(weights: list[jax.Array]) -> jax.Array:
        y = x
        for weight in weights:
            y = layer(y, weight)
        return jnp.mean(y * y)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def test_a_constant_with_rows_shrinks_with_the_batch() -> None:
    """What a mask fills in is as large as scores, though it is not made of the batch."""
    cluster = autopar.Cluster.preset("p3.16xlarge")
    shapes: Any = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * 6
    graph = trace(train_step, (shapes, jax.ShapeDtypeStruct((256, LENGTH, WIDTH), "float32"))).graph
    search = LayoutSearch.of(graph, Options(stages="auto"), cluster, lambda message: None)

    def needs(count: int) -> UnitCost:
        split = search.split(count, is_pipeline=True)
        units = units_of(split)
        assert units is not None
        costs = UnitCosts(units, units.typical_graphs(split), search.options, cluster, count)
        ((_, way),) = costs.ways(1)
        return joined(way)

    few, many = needs(4), needs(16)
    scores = 4 * 64 * LENGTH * LENGTH  # bytes, of one of four microbatches
    assert few.bytes_working > scores and few.bytes_rowless < scores / 4
    told = few.with_rows(1 / 4)
    assert abs(told.bytes_working - many.bytes_working) <= 0.1 * many.bytes_working
