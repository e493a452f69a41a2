"""A train step of two stages that is small, and fails where its state asks for it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.ray_executable import RayExecutable


def train_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + jnp.log(layer["scale"] + x**2))
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def init(layers: int = 6, width: int = 8) -> Any:
    keys = jax.random.split(jax.random.key(0), layers)
    return [
        {"w": jax.random.normal(key, (width, width)) / 4, "scale": jnp.ones(width)} for key in keys
    ]


BATCH = {
    "x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32),
}


def layers_step(params: Any, x: Any) -> Any:
    """A step whose layers are a scan, so that its leaves have rows on several stages."""

    def loss_fn(params: Any) -> Any:
        y, _ = jax.lax.scan(lambda y, p: (jnp.tanh(y @ p["w"] + p["b"]), None), x, params)
        return jnp.mean(y**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def on_actors(runtime: autopar.Ray, stages: int = 2) -> RayExecutable:
    step = autopar.compile(
        train_step,
        init(),
        BATCH,
        stages=stages,
        microbatches=4,
        method="data",
        schedule="1f1b" if stages > 1 else "auto",
        cluster=autopar.Cluster.preset(
            "cpu", devices_per_node=2 * stages if stages == 2 else stages
        ),
        runtime=runtime,
    )
    assert isinstance(step, RayExecutable)
    return step


def check_one_step(step: RayExecutable) -> None:
    """A step from a new state gives the right numbers."""
    (state, loss), (wanted, wanted_loss) = step(init(), BATCH), jax.jit(train_step)(init(), BATCH)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
