"""Barriers that users write (`jax.lax.optimization_barrier`), also around plain numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_jit import equals_plain_jit


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
