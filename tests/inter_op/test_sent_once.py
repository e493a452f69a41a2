"""What passes between stages once a step, in a step with weights that layers share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.base.options import Options
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.sent_once import OnceSent, sent_once
from autopar.passes.trace.trace import trace

WIDTH, LAYERS = 256, 4
MATRIX = 4 * WIDTH * WIDTH  # bytes


def step(weights: dict[str, jax.Array], x: jax.Array) -> Any:
    """One block for all layers, each with a matrix of its own as well."""

    def loss(weights: dict[str, jax.Array]) -> jax.Array:
        y = x
        for layer in range(LAYERS):
            y = jnp.tanh(y @ weights["shared"]) @ weights[f"own{layer}"]
        return jnp.mean(y * y)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def test_a_shared_weight_passes_once_to_a_stage_and_its_gradient_once_back() -> None:
    names = ["shared", *(f"own{layer}" for layer in range(LAYERS))]
    weights = {name: jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32") for name in names}
    graph = trace(step, (weights, jax.ShapeDtypeStruct((64, WIDTH), "float32"))).graph
    cluster = autopar.Cluster.preset("p3.16xlarge")
    search = LayoutSearch.of(graph, Options(stages="auto"), cluster, lambda message: None)
    split = search.split(4, is_pipeline=True)
    layers = split.layers.found.layers
    assert len(layers) % LAYERS == 0
    cuts = tuple(range(len(layers) // LAYERS, len(layers), len(layers) // LAYERS))
    found = sent_once(split.cut_at(cuts), lambda stage: stage)
    weight = OnceSent(0, (1, 2, 3), MATRIX, is_awaited=True)
    gradient = OnceSent(0, (1, 2, 3), MATRIX, is_awaited=False)
    assert {each for each in found if each.bytes >= MATRIX} == {weight, gradient}
