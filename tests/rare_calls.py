"""Small train steps that say a plain thing in a rare way; they join those of `odd_steps`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from odd_steps import Made, floats, sgd, step, whole


@step
def several_arrays_put_at_once() -> Made:
    """What each device has summands of, the largest of all, and what no batch is in."""

    def train_step(w: Any, x: Any, y: Any) -> Any:
        h = jnp.tanh(x @ w)
        gradient, mean = jax.device_put((x.T @ (h - y) / x.shape[0], h.mean(0)))
        metrics = jax.device_put({"mean": h.mean(), "most": jnp.abs(h).max(), "sum": w.sum()})
        return w - 0.1 * gradient, mean, metrics

    rows = 4096  # with fewer, no device has a part of what is put
    return train_step, (floats(256, 512) / 16, floats(rows, 256), floats(rows, 512))


@whole
def solved_by_conjugate_gradients() -> Made:
    """A natural gradient; the solver puts what it is given onto devices, in one call."""

    def train_step(params: Any, x: Any, y: Any) -> Any:
        def predict(params: Any) -> Any:
            return jnp.tanh(x @ params["a"]) @ params["b"]

        def loss(params: Any) -> Any:
            return jnp.mean((predict(params) - y) ** 2)

        def product(v: Any) -> Any:
            _, tangent = jax.jvp(predict, (params,), (v,))
            (found,) = jax.vjp(predict, params)[1](tangent / x.shape[0])
            return jax.tree.map(lambda f, v: f + 0.5 * v, found, v)

        value, gradient = jax.value_and_grad(loss)(params)
        step, _ = jax.scipy.sparse.linalg.cg(product, gradient, maxiter=3)
        return jax.tree.map(lambda p, s: p - 0.1 * s, params, step), value

    params = {"a": floats(8, 8) / 4, "b": floats(8, 4) / 4}
    return train_step, (params, floats(16, 8), floats(16, 4))


@step
def solved_without_a_transpose() -> Made:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w) @ w) ** 2)

    def train_step(w: Any, x: Any) -> Any:
        gradient = jax.grad(loss)(w, x)
        solved = lax.custom_linear_solve(lambda v: 2 * v, gradient, lambda _, b: b / 2)
        return w - 0.1 * solved, solved.sum()

    return train_step, (floats(8, 8), floats(16, 8))


@whole
def normalized_over_a_mapped_axis() -> Made:
    """Statistics of the batch as `flax.linen.BatchNorm(axis_name=)` and Equinox compute them."""

    def loss(w: Any, x: Any, y: Any) -> Any:
        def example(row: Any) -> Any:
            h = row @ w
            mean = lax.pmean(h, "batch")
            variance = lax.psum((h - mean) ** 2, "batch") / lax.psum(1, "batch")
            least = lax.pmin(lax.stop_gradient(h), "batch")
            return (h - mean) / jnp.sqrt(variance + 1e-3) + least

        return jnp.mean((jax.vmap(example, axis_name="batch")(x) - y) ** 2)

    return sgd(loss), (floats(8, 8), floats(16, 8), floats(16, 8))
