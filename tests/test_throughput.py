"""Tokens a second, model FLOP/s utilization and cost of a plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar

VOCABULARY, WIDTH, BATCH, LENGTH = 128, 32, 16, 8
CLUSTER = autopar.Cluster.preset("h100", devices_per_node=4)


def _plan(
    dtype: Any = jnp.bfloat16, *, checkpoint: bool = False, rows: int = BATCH, **options: Any
) -> autopar.Plan:
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ w.astype(dtype)) @ w.astype(dtype))

    applied = jax.checkpoint(layer) if checkpoint else layer

    def step(state: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], Any]:
        def loss(state: dict[str, jax.Array]) -> jax.Array:
            x = state["table"].astype(dtype)[batch]
            for i in range(3):
                x = applied(x, state[f"w{i}"])
            return jnp.mean(x.astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    state = {f"w{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(3)}
    state["table"] = jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32)
    return autopar.plan(step, state, batch, **{"cluster": CLUSTER, **options})


def test_model_flops_are_those_of_the_products() -> None:
    product = 2 * BATCH * LENGTH * WIDTH * WIDTH
    # Two products a layer; the backward pass has two for each.
    assert _plan().estimates.model_flops == {"bfloat16": 18 * product}
    assert _plan(jnp.float32).estimates.model_flops == {"float32": 18 * product}


def test_what_is_computed_again_or_split_or_cut_does_not_count() -> None:
    plain = _plan().estimates.model_flops
    assert _plan(checkpoint=True).estimates.model_flops == plain
    assert _plan(microbatches=4).estimates.model_flops == plain
    assert _plan(stages=2, microbatches=4, remat="full").estimates.model_flops == plain


def test_one_sequence_has_tokens() -> None:
    plan = _plan(rows=1)
    done = plan.throughput
    assert (done.examples, done.tokens) == (1, LENGTH)
    slow = dataclasses.replace(done, step_seconds=800.0)
    assert str(slow).startswith("0.01 tokens/s, 0.00125 examples/s")


def test_rates_follow_from_the_step(tmp_path: Path) -> None:
    plan = _plan()
    done = plan.throughput
    step = plan.estimates.step_seconds
    assert (done.examples, done.tokens) == (BATCH, BATCH * LENGTH)
    assert done.tokens_per_second == pytest.approx(BATCH * LENGTH / step)
    assert done.examples_per_second == pytest.approx(BATCH / step)
    peak = 4 * CLUSTER.device.peak_flops_for("bfloat16")
    assert done.model_flops_utilization == pytest.approx(done.model_flops / peak / step)
    assert done.model_flops_per_device_second == pytest.approx(done.model_flops / 4 / step)
    assert "tokens/s" in str(plan)
    assert "MFU" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json").throughput == done


def test_the_peak_is_that_of_the_dtype() -> None:
    narrow, wide = (_plan(dtype).throughput for dtype in (jnp.bfloat16, jnp.float32))
    peaks = [CLUSTER.device.peak_flops_for(dtype) for dtype in ("bfloat16", "float32")]
    assert wide.peak_seconds / narrow.peak_seconds == pytest.approx(peaks[0] / peaks[1])


def test_cost_follows_from_the_price() -> None:
    plan = _plan()
    assert plan.throughput.cost_per_million() is None
    cost = plan.throughput.cost_per_million(2.5)
    assert cost == pytest.approx(1e6 / plan.throughput.tokens_per_second * 4 * 2.5 / 3600)  # type: ignore[operator]
    priced = dataclasses.replace(CLUSTER, price_per_device_hour=2.5)
    assert _plan(cluster=priced).throughput.cost_per_million() == cost
    assert "per million tokens" in str(_plan(cluster=priced))
    with pytest.raises(autopar.AutoparError, match="price_per_device_hour=-1"):
        plan.throughput.cost_per_million(-1)
    with pytest.raises(autopar.AutoparError, match="price_per_device_hour is -1"):
        dataclasses.replace(CLUSTER, price_per_device_hour=-1.0)


def test_a_step_without_tokens_has_examples() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), x.mean()

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 4), (64, 8))]
    done = autopar.plan(step, *shapes, cluster=CLUSTER).throughput
    assert (done.examples, done.tokens, done.tokens_per_second) == (64, None, None)
    assert "examples/s" in str(done)
