"""Automatic stages of small programs: no slower than what is asked for by the number of stages."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.passes.planner import even_stages

WIDTH, ROWS = 256, 32
BATCH = np.random.default_rng(1).normal(size=(2, ROWS, WIDTH)).astype(np.float32)


def init(depth: int) -> Any:
    w = np.random.default_rng(0).normal(size=(depth, 2, WIDTH, WIDTH)) / WIDTH**0.5
    return [jnp.asarray(x, jnp.float32) for x in w]


def train_step(params: Any, x: Any, y: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        made = x
        for w in params:
            made = made + jnp.tanh(made @ w[0]) @ w[1]
        return jnp.mean((made - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def cluster(nodes: int, devices: int) -> autopar.Cluster:
    """This machine's devices as nodes that a slow link joins."""
    local = autopar.Cluster.local()
    slow = dataclasses.replace(local.inter_node, bandwidth=1e9)
    return dataclasses.replace(local, num_nodes=nodes, devices_per_node=devices, inter_node=slow)


@pytest.mark.parametrize(
    ("depth", "nodes", "devices", "microbatches", "was_slower"),
    [(1, 2, 4, 4, True), (4, 2, 4, 1, True), (2, 3, 2, 4, False), (4, 4, 1, "auto", False)],
    ids=["one layer", "one microbatch", "three nodes of two", "any microbatches"],
)
def test_automatic_stages_are_no_slower_than_two(
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
    nodes: int,
    devices: int,
    microbatches: int | str,
    was_slower: bool,
) -> None:
    params = jax.eval_shape(lambda: init(depth))
    on: dict[str, Any] = {"cluster": cluster(nodes, devices), "microbatches": microbatches}

    def seconds(stages: int | str) -> float:
        plan = autopar.plan(train_step, params, *BATCH, stages=stages, **on)
        return plan.estimates.step_seconds

    automatic = seconds("auto")
    assert automatic <= min(seconds(1), seconds(2))
    if was_slower:
        monkeypatch.setattr(even_stages, "SMALL_PROGRAM", 0)
        assert automatic < seconds("auto")


def test_one_layer_in_two_stages_computes_the_same() -> None:
    params = init(1)
    step = autopar.compile(train_step, params, *BATCH, cluster=cluster(2, 4), microbatches=4)
    assert len(step.plan.stages) == 2
    expected = jax.device_get(jax.jit(train_step)(params, *BATCH))
    made = jax.device_get(step(init(1), *BATCH))
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
