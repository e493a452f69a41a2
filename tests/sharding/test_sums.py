"""What microbatches add up is reduced once a step, and the integer program pays for it."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar

CLUSTER = autopar.Cluster.preset("cpu", nodes=2, devices_per_node=2)


def train_step(params: Any, x: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.mark.parametrize("width", [4, 8, 64, 128])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_small_gradients_are_priced(width: int, microbatches: int) -> None:
    """Of every size: the plan's step contains its collectives, but for those of scalars."""
    params = {
        "w": jax.ShapeDtypeStruct((width, width), jnp.float32),
        "b": jax.ShapeDtypeStruct((width,), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((16, width), jnp.float32)
    plan = autopar.plan(
        train_step, params, x, cluster=CLUSTER, method="data", stages=1, microbatches=microbatches
    )
    listed = plan.stages[0].collectives
    arrays = [c.seconds * c.times for c in listed if c.bytes > 4]
    assert sorted(c.bytes for c in listed if c.bytes > 4) == [4 * width, 4 * width**2]
    assert plan.estimates.step_seconds > sum(arrays)
