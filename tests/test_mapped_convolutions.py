"""Convolutions under `jax.vmap`: examples, tasks and models are groups of features, and are cut.

`jax.vmap` brings what it maps over into the batch of a convolution, or, where kernels are mapped
too, into its features, as that many groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_jit import equals_plain_jit

import autopar

ROWS, MODELS = 16, 8
IMAGES = ("NHWC", "HWIO", "NHWC")
CHANNELS_FIRST = ("NCHW", "OIHW", "NCHW")
SIGNALS = ("NHC", "HIO", "NHC")
_rng = np.random.default_rng(0)

Params = dict[str, Any]
Net = Callable[[Params, Any], Any]
Built = tuple[Callable[..., Any], Any, Any]


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(_rng.normal(size=shape) / 4, jnp.float32)


def net_of(numbers: tuple[str, str, str] = IMAGES, groups: int = 1, stride: int = 1) -> Net:
    """Two convolutions, the first in groups or with a stride, and a product."""
    spatial = tuple(i for i, letter in enumerate(numbers[0]) if letter not in "NC")

    def net(params: Params, x: Any) -> Any:
        steps = (stride,) * len(spatial), (1,) * len(spatial)
        for name, strides, count in zip("ab", steps, (groups, 1), strict=True):
            x = jax.lax.conv_general_dilated(
                x,
                params[name],
                strides,
                "SAME",
                dimension_numbers=numbers,
                feature_group_count=count,
            )
            x = jnp.tanh(x)
        return x.mean(spatial) @ params["c"]

    return net


def params_of(*first: int, second: tuple[int, ...] = (3, 3, 8, 8)) -> Params:
    return {"a": normal(*first), "b": normal(*second), "c": normal(8, 3)}


def images(*rows: int) -> jax.Array:
    return normal(*rows, 6, 6, 4)


def private(net: Net, params: Params, x: Any) -> Built:
    """DP-SGD without its noise: gradients of every example, clipped one by one, summed."""

    def step(params: Params, batch: Any) -> Any:
        def loss(params: Params, x: Any, y: Any) -> Any:
            return jnp.mean((net(params, x[None]) - y) ** 2)

        losses, grads = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(params, *batch)
        squares = [jnp.sum(g.reshape(len(g), -1) ** 2, 1) for g in jax.tree.leaves(grads)]
        factors = jnp.minimum(1.0, 0.1 / jnp.sqrt(sum(squares)))
        clipped = jax.tree.map(lambda g: jnp.einsum("b,b...->...", factors, g), grads)
        updated = jax.tree.map(lambda p, g: p - g / len(factors), params, clipped)
        return updated, losses.mean()

    return step, params, (x, normal(ROWS, 3))


def meta(net: Net, params: Params) -> Built:
    """MAML: each task adapts the kernels by its own gradient before it is judged."""

    def inner(params: Params, x: Any, y: Any) -> Any:
        return jnp.mean((net(params, x) - y) ** 2)

    def step(params: Params, batch: Any) -> Any:
        def judged(params: Params, x: Any, y: Any) -> Any:
            grads = jax.grad(inner)(params, x[:3], y[:3])
            return inner(jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), x[3:], y[3:])

        def outer(params: Params) -> Any:
            return jnp.mean(jax.vmap(judged, (None, 0, 0))(params, *batch))

        value, grads = jax.value_and_grad(outer)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, params, (images(ROWS, 5), normal(ROWS, 5, 3))


def ensemble(net: Net, params: Params) -> Built:
    """Models side by side, which see the same examples."""
    models = jax.tree.map(lambda p: normal(MODELS, *p.shape), params)

    def step(models: Params, batch: Any) -> Any:
        def loss(models: Params) -> Any:
            judged = jax.vmap(net, (0, None))(models, batch[0])
            return jnp.sum(jnp.mean((judged - batch[1]) ** 2, (1, 2)))

        value, grads = jax.value_and_grad(loss)(models)
        return jax.tree.map(lambda p, g: p - 0.1 * g, models, grads), value

    return step, models, (images(ROWS), normal(ROWS, 3))


STEPS: dict[str, Callable[[], Built]] = {
    "private": lambda: private(net_of(), params_of(3, 3, 4, 8), images(ROWS)),
    "private strided": lambda: private(net_of(stride=2), params_of(3, 3, 4, 8), images(ROWS)),
    "private depthwise": lambda: private(net_of(groups=4), params_of(3, 3, 1, 8), images(ROWS)),
    "private channels first": lambda: private(
        net_of(CHANNELS_FIRST), params_of(8, 4, 3, 3, second=(8, 8, 3, 3)), normal(ROWS, 4, 6, 6)
    ),
    "private signals": lambda: private(
        net_of(SIGNALS), params_of(3, 4, 8, second=(3, 8, 8)), normal(ROWS, 8, 4)
    ),
    "meta": lambda: meta(net_of(), params_of(3, 3, 4, 8)),
    "meta in groups": lambda: meta(net_of(groups=2), params_of(3, 3, 2, 8)),
    "meta depthwise": lambda: meta(net_of(groups=4), params_of(3, 3, 1, 8)),
    "ensemble": lambda: ensemble(net_of(), params_of(3, 3, 4, 8)),
    "ensemble depthwise": lambda: ensemble(net_of(groups=4), params_of(3, 3, 1, 8)),
}


@pytest.mark.parametrize("name", STEPS)
def test_examples_stay_on_their_devices(name: str) -> None:
    compiled = equals_plain_jit(*STEPS[name](), method="data", microbatches=1)
    (stage,) = compiled.plan.stages
    assert {c.kind for c in stage.collectives} == {"all-reduce"}, compiled.plan
    assert all(c.purpose != "activation" for c in stage.collectives), compiled.plan


@pytest.mark.parametrize("name", STEPS)
def test_in_microbatches(name: str) -> None:
    number = list(STEPS).index(name)
    method = ("auto", "zero2", "data", "zero3")[number % 4]
    count = 4 if method == "auto" else 2
    compiled = equals_plain_jit(*STEPS[name](), method=method, microbatches=count)
    assert compiled.plan.num_microbatches == count


@pytest.mark.parametrize("name", ["private", "meta depthwise", "ensemble"])
def test_in_stages(name: str) -> None:
    equals_plain_jit(*STEPS[name](), stages=2, microbatches=2)


def test_models_are_cut() -> None:
    """Each device has its model: nothing but the sum of their losses is added over devices."""
    compiled = equals_plain_jit(*STEPS["ensemble"](), method="shard", pins={"models/*": ("x",)})
    (stage,) = compiled.plan.stages
    assert {(c.kind, c.purpose) for c in stage.collectives} == {("all-reduce", "scalar")}


def test_64_gpus_share_the_examples() -> None:
    step, params, _ = STEPS["private depthwise"]()
    batch = tuple(jax.ShapeDtypeStruct((16384, *s), np.float32) for s in ((6, 6, 4), (3,)))
    plan = autopar.plan(step, params, batch, cluster="8x8 h100", stages=1, microbatches=1)
    (stage,) = plan.stages
    assert {c.kind for c in stage.collectives} == {"all-reduce"}, plan
    assert all(c.purpose != "activation" for c in stage.collectives), plan
