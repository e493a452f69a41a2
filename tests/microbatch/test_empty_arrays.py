"""Arrays without elements depend on nothing: what meets them is split as if they were not there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

ROWS, TIMES, WIDTH, LAYERS = 16, 4, 32, 3


def recurrence(h: jax.Array, w: jax.Array) -> jax.Array:
    """A recurrence by `associative_scan`, with one decay for all features: as in Mamba 2."""
    update = jnp.tanh(h @ w)
    decay = jax.nn.sigmoid(update[..., :1])

    def joined(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    return h + jax.lax.associative_scan(joined, (decay, update), axis=1)[1]


def of_nothing(h: jax.Array, w: jax.Array) -> jax.Array:
    """What is summed over nothing, and put beside."""
    update = jnp.tanh(h @ w)
    nothing = update[:, :0].sum(-1)[..., None]
    return h + jnp.pad(nothing, ((0, 0), (TIMES, 0), (0, 0))) * update


def step(layer: Any, is_scan: bool, w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        if is_scan:
            h, _ = jax.lax.scan(lambda h, w: (jax.checkpoint(layer)(h, w), None), x, w)
        else:
            h = x
            for each in w:
                h = layer(h, each)
        return jnp.mean(h**2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


@pytest.mark.parametrize("is_scan", [False, True])
@pytest.mark.parametrize("layer", [recurrence, of_nothing])
def test_microbatches_give_the_same_numbers(layer: Any, is_scan: bool) -> None:
    random = np.random.default_rng(0)
    w = jnp.asarray(random.normal(size=(LAYERS, WIDTH, WIDTH)) / 8, jnp.float32)
    x = jnp.asarray(random.normal(size=(ROWS, TIMES, WIDTH)), jnp.float32)

    def own(w: jax.Array, x: jax.Array) -> Any:
        return step(layer, is_scan, w, x)

    made = autopar.compile(own, w, x, microbatches=4, donate_argnums=())
    for one, other in zip(made(w, x), jax.jit(own)(w, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert made.plan.num_microbatches == 4


@pytest.mark.parametrize("size", [0, 2])
def test_a_carry_that_only_a_callback_reads_is_carried(size: int) -> None:
    """Without elements, what else reads it is made of nothing; or the carry is replaced."""
    seen = []

    def own(w: jax.Array, x: jax.Array) -> Any:
        def layer(carry: Any, w: jax.Array) -> Any:
            h, beside = carry
            jax.debug.callback(lambda values: seen.append(values.shape), beside)
            return (jnp.tanh(h @ w), beside * 2 if not size else jnp.ones(size)), None

        (h, beside), _ = jax.lax.scan(layer, (x, jnp.zeros(size)), w)
        return jnp.mean(h**2), beside

    w, x = jnp.ones((LAYERS, WIDTH, WIDTH)) / WIDTH, jnp.ones((ROWS, WIDTH))
    made = autopar.compile(own, w, x, microbatches=1, donate_argnums=())
    for one, other in zip(made(w, x), jax.jit(own)(w, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    jax.effects_barrier()
    assert set(seen) == {(size,)}
