"""Softmaxes of few rows on an H200: two kernels, whose exponentials are there in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.passes.sharding.compiler_rules import SPLIT_ROWS

LENGTH, WIDTH, LAYERS = 1024, 64, 6
FEW, MANY = SPLIT_ROWS // LENGTH, SPLIT_ROWS // LENGTH + 1
"""Heads with as many rows as are split, and with more."""


def scores_of(device: str, heads: int, dtype: Any = jnp.bfloat16, wide: Any = jnp.float32) -> float:
    """What a step of one device needs, in bytes for each of its scores: of layers without remat."""

    def attention(x: Any, weights: Any) -> Any:
        q, k, v = (jnp.einsum("td,dhk->htk", x, w) for w in weights)
        scores = jnp.einsum("hqk,htk->hqt", q, k, preferred_element_type=dtype)
        probabilities = jax.nn.softmax(scores.astype(wide) * 0.125).astype(x.dtype)
        return x + jnp.einsum("hqt,htk->qhk", probabilities, v).sum(1)

    def step(weights: Any, x: Any) -> Any:
        def loss_fn(weights: Any) -> jax.Array:
            y = x
            for w in weights:
                y = attention(y, w)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        grads = jax.grad(loss_fn)(weights)
        return jax.tree.map(lambda p, g: p - g, weights, grads)

    weights = LAYERS * [3 * [jax.ShapeDtypeStruct((WIDTH, heads, WIDTH), jnp.bfloat16)]]
    x = jax.ShapeDtypeStruct((LENGTH, WIDTH), jnp.bfloat16)
    plan = autopar.plan(step, weights, x, cluster=f"1x1 {device}", microbatches=1)
    return plan.estimates.peak_bytes_per_device / (LAYERS * heads * LENGTH**2)


def test_literals_are_no_scores() -> None:
    def step(w: Any, x: Any) -> Any:
        scale = jnp.exp(np.float32(-0.5)) * jax.lax.exp(2.0)
        return jax.grad(lambda w: jnp.sum(jax.nn.softmax((1.0 - x) @ w * scale) ** 2))(w)

    shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16), (32, 8)))
    assert autopar.plan(step, *shapes, cluster="1x1 h200").estimates.step_seconds > 0


def test_exponentials_of_few_rows_are_there_in_float32() -> None:
    plain, split = scores_of("h100", FEW), scores_of("h200", FEW)
    # Scores and probabilities of 2 bytes each; then exponentials of 4 beside the probabilities.
    assert 3.9 < plain < 5.5
    assert 1.5 < split - plain < 2.5


@pytest.mark.parametrize(
    "heads, dtype, wide",
    [
        (MANY, jnp.bfloat16, jnp.float32),
        (FEW, jnp.float32, jnp.float32),
        (FEW, jnp.bfloat16, jnp.bfloat16),
    ],
    ids=["more-rows", "wide-scores", "narrow-softmax"],
)
def test_others_are_as_on_an_h100(heads: int, dtype: Any, wide: Any) -> None:
    assert scores_of("h200", heads, dtype, wide) == scores_of("h100", heads, dtype, wide)
