"""Stages of more devices than a microbatch has rows: fewer microbatches are tried."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import Plan
from autopar.passes.schedules.make import make_schedule


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


@pytest.mark.parametrize("rows", [24, 40, 48])
def test_devices_share_rows_of_which_a_power_of_two_leaves_no_multiple(rows: int) -> None:
    plan = plan_of(rows, method="data")
    assert rows // plan.num_microbatches % 8 == 0
    even = plan_of(rows, method="data", microbatches=rows // 8).estimates.step_seconds
    assert plan.estimates.step_seconds <= even


def test_methods_of_stages_by_hand_are_seen() -> None:
    stages = [autopar.Stage(method="data"), autopar.Stage(method="data")]
    by_hand, plain = plan_of(8, stages=stages), plan_of(8, method="data")
    assert by_hand.num_microbatches == plain.num_microbatches < 8


def test_a_schedule_of_the_users_is_asked_for_no_other_number() -> None:
    asked = []

    def mine(num_meshes: int, num_microbatches: int) -> Any:
        asked.append(num_microbatches)
        return [list(tasks) for tasks in make_schedule("gpipe", num_meshes, num_microbatches).tasks]

    assert plan_of(16, method="data", schedule=mine).num_microbatches == 8
    assert set(asked) == {8}


def test_what_is_asked_for_stays() -> None:
    assert plan_of(16, method="data", microbatches=8).num_microbatches == 8
