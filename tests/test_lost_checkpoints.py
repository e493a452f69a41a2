"""A warning where `jax.checkpoint(prevent_cse=False)` saves nothing."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.base.errors import AutoparWarning

LAYERS, WIDTH = 3, 8


def _planned(form: str, **options: Any) -> None:
    """Plans a step whose layers are `form`, each with a checkpoint."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(jnp.sin(x @ w)), None

    block = jax.checkpoint(layer, **options)

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        if form == "scan":
            return jax.lax.scan(block, x, weights)[0].sum()
        for w in weights:
            x, _ = block(x, w)
        return x.sum()

    def step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(weights, batch)
        return weights - gradient, value

    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)
    autopar.plan(jax.jit(step), weights, batch, cluster="1x2 h100", progress=False)


def test_layers_one_by_one_are_told_with_their_line() -> None:
    with pytest.warns(AutoparWarning, match="prevent_cse=False lets XLA") as told:
        _planned("unrolled", prevent_cse=False)
    assert len(told) == 1
    assert "test_lost_checkpoints.py" in str(told[0].message)


@pytest.mark.parametrize(
    ("form", "options"), [("scan", {"prevent_cse": False}), ("unrolled", {}), ("scan", {})]
)
def test_what_is_computed_again_is_not_told(form: str, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoparWarning)
        _planned(form, **options)
