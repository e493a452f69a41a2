"""What waits where the gradients of weights come last, told by units and found in real stages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.base.options import Options
from autopar.passes.planner.candidates import sliced
from autopar.passes.planner.layer_units import units_of
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.layouts import submesh
from autopar.passes.planner.mesh_choice import plan_free
from autopar.passes.planner.planned_stage import PlaceInPipeline
from autopar.passes.planner.stage_labels import label_batch
from autopar.passes.planner.unit_costs import UnitCosts
from autopar.passes.schedules.make import make_schedule
from autopar.passes.trace.trace import trace

CLUSTER = autopar.Cluster.preset("p3.16xlarge")
LAYERS, WIDTH, ROWS, COUNT, STAGES = 8, 256, 8192, 16, 4


def train_step(
    weights: Any, x: jax.Array, again: bool, is_linear: bool = False
) -> tuple[Any, jax.Array]:
    def layer(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x + (x @ weight if is_linear else jnp.sin(x @ weight))

    called = jax.checkpoint(layer) if again else layer

    def loss(weights: Any) -> jax.Array:
        if isinstance(weights, list):
            y = x
            for weight in weights:
                y = called(y, weight)
        else:
            y, _ = jax.lax.scan(lambda y, weight: (called(y, weight), None), x, weights)
        return jnp.mean(y * y)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


@pytest.mark.parametrize("is_scanned", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_units_tell_what_waits_for_the_gradients_of_weights(again: bool, is_scanned: bool) -> None:
    """The gradient of a layer's product; and where it is computed again, what it reads as well."""
    shapes: Any = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * LAYERS
    if is_scanned:
        shapes = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32")
    asked = (shapes, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"))
    graph = trace(lambda weights, x: train_step(weights, x, again), asked).graph
    options = Options(stages="auto", remat="none")
    search = LayoutSearch.of(graph, options, CLUSTER, lambda message: None)
    split = search.split(COUNT, is_pipeline=True)
    units = units_of(split)
    assert units is not None and len(units.starts) == LAYERS
    costs = UnitCosts(units, units.typical_graphs(split), options, CLUSTER, COUNT)
    ((_, way),) = costs.ways(1)
    gradient = 4 * ROWS // COUNT * WIDTH
    assert {unit.bytes_waiting for unit in way} == {(2 if again else 1) * gradient}

    _, stages = sliced(split, tuple(range(0, LAYERS, LAYERS // STAGES))[1:], split_backward=True)
    schedule = make_schedule("zb_h1", STAGES, COUNT)
    part = submesh(CLUSTER, 1)
    graphs = label_batch(stages)
    places = [PlaceInPipeline.under(schedule, number, graphs[number]) for number in (1, 2)]
    second, third = (plan_free(place, options, part, (1,)).peak.bytes for place in places)
    # The third stage has one microbatch more that waits, and one less between its passes: of that,
    # what a layer read where it is computed again, else what it made.
    assert third - second == 2 * (1 if again else 0) * gradient


@pytest.mark.parametrize("is_scanned", [False, True])
def test_what_is_received_waits_too(is_scanned: bool) -> None:
    """The gradient of a product's result is what the next unit sends, or iteration hands on."""
    shapes: Any = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * LAYERS
    if is_scanned:
        shapes = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32")
    asked = (shapes, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"))
    graph = trace(lambda weights, x: train_step(weights, x, False, True), asked).graph
    options = Options(stages="auto", remat="none")
    search = LayoutSearch.of(graph, options, CLUSTER, lambda message: None)
    split = search.split(COUNT, is_pipeline=True)
    units = units_of(split)
    assert units is not None
    costs = UnitCosts(units, units.typical_graphs(split), options, CLUSTER, COUNT)
    ((_, way),) = costs.ways(1)
    assert {unit.bytes_waiting for unit in way} == {4 * ROWS // COUNT * WIDTH}
