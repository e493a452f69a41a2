"""Stages of more devices than a microbatch has rows: fewer microbatches are tried."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import Plan


def plan_of(rows: int, **options: Any) -> Plan:
    """Of layers whose products are long beside all that moves, in two stages of eight devices."""

    def train_step(params: list[jax.Array], x: jax.Array, y: jax.Array) -> Any:
        def loss(params: list[jax.Array]) -> jax.Array:
            h = x
            for w in params:
                h = jnp.tanh(h @ w)
            return jnp.mean((h - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, gradients, strict=True)], value

    params = [jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)] * 4
    batch = [jax.ShapeDtypeStruct((rows, 2048, 1024), jnp.bfloat16)] * 2
    asked: dict[str, Any] = {"cluster": "2x8 h100", "stages": 2, **options}
    return autopar.plan(train_step, params, *batch, **asked)


@pytest.mark.parametrize("method", ["data", "zero3", "auto"])
def test_devices_of_a_stage_share_the_rows(method: str) -> None:
    plan = plan_of(16, method=method)
    four_each = plan_of(16, method=method, microbatches=8)
    assert plan.num_microbatches < 8
    assert plan.estimates.step_seconds < 0.8 * four_each.estimates.step_seconds
    assert "quickest of those tried" in str(plan)


def test_where_devices_share_the_rows_there_are_four_for_each_mesh() -> None:
    plan = plan_of(64, method="data")
    assert plan.num_microbatches == 8
    assert "four for each" in str(plan)


def test_what_is_asked_for_stays() -> None:
    assert plan_of(16, method="data", microbatches=8).num_microbatches == 8
