"""A pooling's gradient on GPUs: the zeros that it is added to are there since a ReLU before it.

XLA:GPU of jax 0.10.2 needs two buffers more for the ReLU, for either size of windows."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import autopar

ROWS, PIXELS, CHANNELS = 8, 64, 32
ONE = ROWS * PIXELS * PIXELS * CHANNELS * 4
"""Bytes of the activations before the pooling."""


def peak(floor: float, windows: int, device: str = "dgx-h100") -> int:
    """The bytes that a step of one device needs; activations are `floor` at the least."""

    def step(filters: Any, image: Any) -> Any:
        def loss_fn(filters: Any) -> jax.Array:
            x = jax.lax.conv_general_dilated(
                image, filters[0], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jnp.maximum(jnp.sin(x), floor)
            x = nn.max_pool(x, (windows, windows), strides=(2, 2), padding="SAME")
            for w in filters[1:]:
                x = x + jnp.tanh(x @ w)
            return jnp.mean(x**2)

        loss, grads = jax.value_and_grad(loss_fn)(filters)
        return jax.tree.map(lambda p, g: p - g, filters, grads), loss

    filters = [jax.ShapeDtypeStruct((3, 3, 3, CHANNELS), jnp.float32)]
    filters += 8 * [jax.ShapeDtypeStruct((CHANNELS, CHANNELS), jnp.float32)]
    image = jax.ShapeDtypeStruct((ROWS, PIXELS, PIXELS, 3), jnp.float32)
    cluster = autopar.Cluster.preset(device, devices_per_node=1)
    plan = autopar.plan(step, filters, image, cluster=cluster, microbatches=1)
    return plan.estimates.peak_bytes_per_device


@pytest.mark.parametrize("windows", [2, 3])
def test_zeros_of_a_relu_and_its_result_are_kept(windows: int) -> None:
    assert abs(peak(0.0, windows) - peak(0.1, windows) - 2 * ONE) < 0.02 * ONE


def test_other_compilers_have_no_such_scatter() -> None:
    assert abs(peak(0.0, 3, "tpu-v5e") - peak(0.1, 3, "tpu-v5e")) < 0.02 * ONE
