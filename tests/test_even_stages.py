"""Automatic stages of small programs: no slower than what is asked for by the number of stages."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.errors import MemoryLimitError
from autopar.passes.planner import even_stages
from autopar.passes.planner.stage_pricing import sizes_of

pytestmark = pytest.mark.usefixtures("solved_once")

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


def seconds_of(depth: int, width: int, rows: int, **options: Any) -> float:
    params = depth * [jax.ShapeDtypeStruct((2, width, width), jnp.float32)]
    batch = 2 * [jax.ShapeDtypeStruct((rows, width), jnp.float32)]
    return autopar.plan(train_step, params, *batch, **options).estimates.step_seconds


@pytest.mark.parametrize(
    ("sizes", "where", "microbatches"),
    [
        ((2, 2048, 256), ("p3.16xlarge", 2, 8), 1),
        ((2, 512, 256), ("dgx-h100", 3, 2), 4),
        ((4, 4096, 1024), ("dgx-h100", 4, 1), "auto"),
    ],
    ids=["one microbatch", "three nodes of two", "four nodes"],
)
def test_even_stages_may_be_quicker(
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int],
    where: tuple[str, int, int],
    microbatches: int | str,
) -> None:
    name, nodes, devices = where
    on = autopar.Cluster.preset(name, nodes=nodes, devices_per_node=devices)
    asked: dict[str, Any] = {"cluster": on, "microbatches": microbatches}
    automatic = seconds_of(*sizes, **asked)
    assert automatic <= seconds_of(*sizes, stages=2, **asked)
    monkeypatch.setattr(even_stages, "SMALL_PROGRAM", 0)
    assert automatic < 0.95 * seconds_of(*sizes, **asked)


def test_the_search_alone_finds_numbers_of_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of them, by a schedule that divides the backward pass, on as many stages as nodes."""
    monkeypatch.setattr(even_stages, "SMALL_PROGRAM", 0)
    on = {"cluster": autopar.Cluster.preset("dgx-h100", nodes=8, devices_per_node=1)}
    even = min(seconds_of(12, 2048, 4096, stages=stages, **on) for stages in (2, 4, 8))
    assert seconds_of(12, 2048, 4096, **on) <= 1.02 * even


@pytest.mark.parametrize("rows", [1, 2, 7, 13])
def test_batches_that_microbatches_hardly_divide(rows: int) -> None:
    on = {"cluster": cluster(2, 4)}
    assert seconds_of(2, WIDTH, rows, **on) <= seconds_of(2, WIDTH, rows, stages=1, **on)


def test_what_fits_nowhere_is_not_tried_in_even_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(even_stages, "_planned", lambda *asked: pytest.fail("tried"))
    with pytest.raises(MemoryLimitError):
        seconds_of(2, WIDTH, 32, cluster=cluster(2, 4), memory_limit=1000)


def test_even_stages_have_as_many_microbatches_as_fit() -> None:
    asked: dict[str, Any] = {"cluster": cluster(2, 1), "memory_limit": 6_200_000}
    automatic = seconds_of(2, WIDTH, 2048, **asked)
    assert automatic <= seconds_of(2, WIDTH, 2048, stages=2, **asked)
    assert automatic < 0.95 * seconds_of(2, WIDTH, 2048, stages=1, **asked)


def test_one_layer_in_two_stages_computes_the_same() -> None:
    params = init(1)
    step = autopar.compile(train_step, params, *BATCH, cluster=cluster(2, 4), microbatches=4)
    assert len(step.plan.stages) == 2
    expected = jax.device_get(jax.jit(train_step)(params, *BATCH))
    made = jax.device_get(step(init(1), *BATCH))
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_sizes_of_submeshes_that_are_searched() -> None:
    six = autopar.Cluster.preset("dgx-h100", nodes=6)
    assert sizes_of(six) == [1, 2, 4, 8, 16, 24, 32, 48]
    three = autopar.Cluster.preset("dgx-h100", nodes=3, devices_per_node=2)
    assert sizes_of(three) == [1, 2, 4, 6]
