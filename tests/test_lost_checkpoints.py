"""A warning where `jax.checkpoint(prevent_cse=False)` saves nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.base.errors import AutoparWarning

LAYERS, WIDTH, ROWS = 3, 8, 16
EVERYTHING = jax.checkpoint_policies.everything_saveable


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(jnp.sin(x @ w)), None


def linear(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return x @ w, None


def planned(form: str, of: Callable[..., Any] = layer, **options: Any) -> None:
    """Plans a step whose layers are `form`, each with a checkpoint."""
    block = jax.checkpoint(of, **options)

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        if form == "scan":
            return jax.lax.scan(block, x, weights)[0].sum()
        if form == "around a scan":
            scanned = jax.checkpoint(lambda x: jax.lax.scan(of, x, weights)[0], **options)
            return scanned(x).sum()
        for w in weights:
            x, _ = block(x, w)
        return x.sum()

    def step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        if form != "accumulated":
            value, gradient = jax.value_and_grad(loss)(weights, batch)
            return weights - gradient, value

        def add(total: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            value, gradient = jax.value_and_grad(loss)(weights, rows)
            return total + gradient, value

        parts = batch.reshape(4, ROWS // 4, WIDTH)
        total, values = jax.lax.scan(add, jnp.zeros_like(weights), parts)
        return weights - total, values.sum()

    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    autopar.plan(jax.jit(step), weights, batch, cluster="1x2 h100", progress=False)


@pytest.mark.parametrize("form", ["unrolled", "accumulated"])
def test_layers_one_by_one_are_told_with_their_line(form: str) -> None:
    with pytest.warns(AutoparWarning, match="prevent_cse=False lets XLA") as told:
        planned(form, prevent_cse=False)
    assert len(told) == 1
    assert "test_lost_checkpoints.py" in str(told[0].message)
    assert "(layer)" in str(told[0].message)


@pytest.mark.parametrize(
    ("form", "of", "options"),
    [
        ("scan", layer, {"prevent_cse": False}),
        ("unrolled", layer, {}),
        ("around a scan", layer, {"prevent_cse": False}),
        ("unrolled", linear, {"prevent_cse": False}),
        ("unrolled", layer, {"prevent_cse": False, "policy": EVERYTHING}),
    ],
)
def test_what_is_computed_again_or_never_was_is_not_told(
    form: str, of: Callable[..., Any], options: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoparWarning)
        planned(form, of, **options)
