"""Barriers that users write (`jax.lax.optimization_barrier`), also around plain numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_jit import equals_plain_jit

import autopar


def step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        y, two = jax.lax.optimization_barrier((x @ weights, 2.0))
        return jnp.mean((y * two) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return weights - gradients, value


@pytest.mark.parametrize(
    "options",
    [
        {"method": "data"},
        {"logical_mesh": (2, 4)},
        {"method": "zero3", "microbatches": 2},
        {"stages": 2, "microbatches": 2},
    ],
    ids=str,
)
def test_a_barrier_around_a_number(options: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    weights, x = (random.normal(size=(16, 16)).astype(np.float32) for _ in range(2))
    equals_plain_jit(step, weights, x, **options)


def test_layers_that_are_computed_again_are_priced() -> None:
    """What passes a barrier, part by part, takes no time: not to start with few rows either."""

    def layer(x: Any, w: Any) -> Any:
        y = x @ w[0]
        mean, power = jnp.mean(y, -1, keepdims=True), jnp.mean(y**2, -1, keepdims=True)
        return x + jnp.tanh((y - mean) * jax.lax.rsqrt(power - mean**2 + 1e-5)) @ w[1]

    def train_step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for w in weights:
                y = jax.checkpoint(layer)(y, w)
            return jnp.mean(jnp.mean(y, 1) ** 2)  # so what passes is a gradient that was broadcast

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), value

    weights = [jax.ShapeDtypeStruct((2, 512, 512), jnp.float32)] * 4
    x = jax.ShapeDtypeStruct((64, 8, 512), jnp.float32)
    cluster = autopar.Cluster.preset("p3.16xlarge", nodes=2)
    plan = autopar.plan(train_step, weights, x, cluster=cluster, stages="auto", microbatches=8)
    assert plan.num_microbatches == 8
