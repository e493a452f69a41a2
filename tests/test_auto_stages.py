"""`stages="auto"` on a cluster of several nodes, run on this machine's devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.errors import MemoryLimitError

DEPTH, WIDTH, ROWS = 4, 512, 64
BATCH = np.random.default_rng(1).normal(size=(2, ROWS, WIDTH)).astype(np.float32)


def init(key: jax.Array) -> Any:
    w = jax.random.normal(key, (DEPTH, 2, WIDTH, WIDTH)) / WIDTH**0.5
    return {"layers": w, "head": jnp.eye(WIDTH)}


def init_apart(key: jax.Array) -> Any:
    """The same with one leaf per layer."""
    params = init(key)
    return {**params, "layers": list(params["layers"])}


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return x + jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]), None


def train_step(params: Any, x: Any, y: Any) -> Any:
    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        if isinstance(params["layers"], list):
            for w in params["layers"]:
                x, _ = layer(x, w)
        else:
            x, _ = jax.lax.scan(layer, x, params["layers"])
        return jnp.mean((x @ params["head"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def cluster(nodes: int = 2) -> autopar.Cluster:
    """This machine's devices as nodes that a slow link joins: stages send the least over it."""
    local = autopar.Cluster.local()
    slow = dataclasses.replace(local.inter_node, bandwidth=1e8)
    return dataclasses.replace(local, num_nodes=nodes, devices_per_node=8 // nodes, inter_node=slow)


@pytest.mark.parametrize("make", [init, init_apart])
def test_the_chosen_stages_compute_the_same(make: Any) -> None:
    state, expected = make(jax.random.key(0)), make(jax.random.key(0))
    options: dict[str, Any] = {"cluster": cluster(), "microbatches": 8, "method": "data"}
    step = autopar.compile(train_step, state, *BATCH, stages="auto", **options)
    plan = step.plan
    assert plan.pipeline is not None
    assert sum({s.mesh: s.num_devices for s in plan.stages}.values()) == 8
    assert {bool(c.note) for c in plan.candidates} == {True, False}, "one mesh was considered too"
    assert plan.estimates.step_seconds == min(c.step_seconds or 0 for c in plan.candidates)
    plain = jax.jit(train_step)
    for _ in range(3):
        state, loss = step(state, *BATCH)
        expected, expected_loss = plain(expected, *BATCH)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_stages_are_chosen_anew_for_memory() -> None:
    """With less memory there are other stages; then nothing."""
    arguments = (train_step, init_apart(jax.random.key(0)), *BATCH)
    options: dict[str, Any] = {"cluster": cluster(4), "stages": "auto", "microbatches": 8}
    options["method"] = "zero2"
    free = autopar.plan(*arguments, **options)
    most = max(stage.peak_bytes_per_device for stage in free.stages)
    plan = autopar.plan(*arguments, **options, memory_limit=most * 19 // 20)
    assert max(stage.peak_bytes_per_device for stage in plan.stages) <= most * 19 // 20
    assert plan.pipeline.boundaries != free.pipeline.boundaries
    with pytest.raises(MemoryLimitError, match="No plan keeps within"):
        autopar.plan(*arguments, **options, memory_limit=most // 4)
