"""Small train steps, each about one thing that real models do and examples seldom show.

Every function returns a step of (parameters, *batch) and its arguments; batches have 16 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental.ode import odeint

Made = tuple[Callable[..., Any], tuple[Any, ...]]
STEPS: dict[str, Callable[[], Made]] = {}
ONE_MICROBATCH: set[str] = set()
"""Steps that no exact split into microbatches exists of."""


def step(make: Callable[[], Made]) -> Callable[[], Made]:
    STEPS[make.__name__] = make
    return make


def whole(make: Callable[[], Made]) -> Callable[[], Made]:
    ONE_MICROBATCH.add(make.__name__)
    return step(make)


def floats(*shape: int) -> Any:
    return np.random.default_rng(len(shape) + sum(shape)).normal(size=shape).astype(np.float32)


def integers(high: int, *shape: int) -> Any:
    return np.random.default_rng(high).integers(0, high, size=shape).astype(np.int32)


def sgd(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Gradient descent, which shows a gradient that is scaled wrongly."""

    def train_step(params: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return train_step


# Inner functions that close over arrays.


@step
def closed_over_arrays() -> Made:
    means, mask = jnp.asarray(floats(8)), integers(2, 8, 8)

    @jax.jit
    def normal(x: Any) -> Any:
        return x - means

    @jax.jit
    def layer(w: Any, x: Any) -> Any:
        return jnp.tanh(normal(x) @ (w * mask))

    def loss(w: Any, x: Any, y: Any) -> Any:
        h, _ = lax.scan(lambda c, _: (layer(w, c), None), normal(x), None, length=3)
        h = jax.checkpoint(lambda h: layer(w, h) * means)(h)
        h = lax.cond(w.sum() > 0, normal, lambda h: h * means, h)
        h = lax.fori_loop(0, 2, lambda _, h: normal(h), h)
        return jnp.mean((h - y) ** 2)

    return jax.jit(sgd(loss)), (floats(8, 8), floats(16, 8), floats(16, 8))


@whole
def ordinary_differential_equation() -> Made:
    """Its steps are as long as the whole batch allows."""
    scale = jnp.asarray(floats(8))

    def loss(w: Any, x: Any, y: Any) -> Any:
        out = odeint(lambda h, t, w: jnp.tanh(h @ w) * scale, x, jnp.linspace(0.0, 1.0, 3), w)
        return jnp.mean((out[-1] - y) ** 2)

    return sgd(loss), (floats(8, 8), floats(16, 8), floats(16, 8))


@step
def differential_equations() -> Made:
    """Every row takes steps of its own, and as many of them as it needs."""
    scale = jnp.asarray(floats(8))

    def loss(w: Any, x: Any, y: Any) -> Any:
        times = jnp.linspace(0.0, 1.0, 3)
        solve = lambda x: odeint(lambda h, t, w: jnp.tanh(h @ w) * scale, x, times, w)  # noqa: E731
        return jnp.mean((jax.vmap(solve)(x)[:, -1] - y) ** 2)

    return sgd(loss), (floats(8, 8), floats(16, 8), floats(16, 8))


@step
def loops_by_row() -> Made:
    def halved(x: Any) -> Any:
        body = lambda c: (0.7 * c[0], c[1] + 1)  # noqa: E731
        return lax.while_loop(lambda c: (c[1] < 9) & (jnp.sum(c[0] ** 2) > 0.3), body, (x, 0))

    def loss(w: Any, x: Any, y: Any) -> Any:
        h, count = lax.stop_gradient(jax.vmap(halved)(x @ w))
        return jnp.mean((jnp.tanh(x @ w) + h * count[:, None] - y) ** 2)

    return sgd(loss), (floats(8, 8), floats(16, 8), floats(16, 8))


# Indexing, pairwise recursions, solves.


@step
def picked_actions() -> Made:
    def loss(w: Any, x: Any, actions: Any, y: Any) -> Any:
        q = jnp.tanh(x @ w[0]) @ w[1]
        return jnp.mean((q[jnp.arange(x.shape[0]), actions] - y) ** 2)

    params = (floats(8, 16), floats(16, 8))
    return sgd(loss), (params, floats(16, 8), integers(8, 16), floats(16))


@step
def picked_tokens() -> Made:
    def loss(w: Any, x: Any, tokens: Any) -> Any:
        logits = jax.nn.log_softmax(x @ w)
        rows, columns = jnp.arange(16)[:, None], jnp.arange(8)[None]
        last = x[jnp.arange(16), tokens[:, 0] % 8] @ w
        return -jnp.mean(logits[rows, columns, tokens]) + jnp.mean(last**2)

    return sgd(loss), (floats(8, 8), floats(16, 8, 8), integers(8, 16, 8))


@step
def rows_written() -> Made:
    def loss(w: Any, x: Any, columns: Any, y: Any) -> Any:
        h = (x @ w).at[jnp.arange(16), columns].add(y * w[0, 0])
        return jnp.mean(h.at[jnp.arange(16), columns - 1].set(0.5) ** 2)

    return sgd(loss), (floats(8, 8), floats(16, 8), integers(8, 16), floats(16))


@step
def associative_scan() -> Made:
    def join(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    def loss(w: Any, x: Any, y: Any) -> Any:
        _, h = lax.associative_scan(join, (jax.nn.sigmoid(x @ w), x), axis=1)
        return jnp.mean((h - y) ** 2)

    return sgd(loss), (floats(8, 8), floats(16, 6, 8), floats(16, 6, 8))


@step
def cumulative_products() -> Made:
    def loss(w: Any, x: Any, y: Any) -> Any:
        h = jax.nn.sigmoid(x @ w)
        return jnp.mean((jnp.cumprod(h, axis=1) + lax.cummax(h, axis=1) - y) ** 2)

    return sgd(loss), (floats(8, 8), floats(16, 6, 8), floats(16, 6, 8))


@step
def solved_systems() -> Made:
    def loss(w: Any, x: Any, y: Any) -> Any:
        a = jax.vmap(lambda x: jnp.outer(x, x) @ w @ w.T + 3 * jnp.eye(8))(x)
        h = jnp.linalg.solve(a, y[..., None])[..., 0] + jnp.linalg.inv(a).sum(-1)
        same = jnp.linalg.solve(w @ w.T + jnp.eye(8), y.T).T  # of one matrix
        return jnp.mean(h**2) + jnp.mean((same * x) ** 2)

    return sgd(loss), (floats(8, 8), floats(16, 8), floats(16, 8))


@step
def matrices_of_layers() -> Made:
    """As Shampoo and SOAP have them: factors of several matrices at a time."""

    def train_step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.mean(jnp.tanh(jnp.einsum("bi,lij->lbj", x, weights)) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        outer = gradients @ gradients.mT + 1e-3 * jnp.eye(8)
        basis, _ = jnp.linalg.qr(outer)
        values, vectors = jnp.linalg.eigh(outer)
        scaled = (vectors * values[:, None] ** -0.5) @ vectors.mT @ gradients
        solved = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(outer), True), gradients)
        return weights - 0.1 * scaled - 0.01 * solved, value, basis @ basis.mT

    return train_step, (0.3 * floats(2, 8, 8), floats(16, 8))


@step
def counts_of_layers() -> Made:
    """How many rows each layer sends where, as mixtures of experts report it."""

    def train_step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            def layer(h: Any, w: Any) -> Any:
                made = h @ w
                chosen = jax.nn.one_hot(jnp.argmax(made, axis=-1), 8)
                return jnp.tanh(made) + h, chosen.sum(0)

            h, counts = lax.scan(layer, x, weights)
            return jnp.mean(h**2), counts

        (value, counts), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        biases = 0.1 * jnp.sign(counts.mean(-1, keepdims=True) - counts)
        return weights - 0.1 * gradients, value, counts, biases

    return train_step, (floats(3, 8, 8), floats(16, 8))


# Complex numbers, windows, random numbers.


@step
def spectra() -> Made:
    def loss(w: Any, x: Any, y: Any) -> Any:
        spectrum = jnp.fft.fft(x @ w, axis=1) * jnp.exp(1j * w[0])
        h = jnp.fft.ifft(spectrum, axis=1).real + jnp.abs(jnp.fft.fft(x))
        return jnp.mean((h - y) ** 2)

    return sgd(loss), (floats(8, 8), floats(16, 4, 8), floats(16, 4, 8))


# Few bits.


@step
def float8_products() -> Made:
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2

    def product(a: Any, b: Any, dims: tuple[int, int]) -> Any:
        numbers = (((dims[0],), (dims[1],)), ((), ()))
        return lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)

    @jax.custom_vjp
    def matmul(x: Any, w: Any) -> Any:
        return forward(x, w)[0]

    def forward(x: Any, w: Any) -> Any:
        scale = jnp.max(jnp.abs(w)) / 448
        x8, w8 = jnp.clip(2 * x, -448, 448).astype(e4m3), (w / scale).astype(e4m3)
        return product(x8, w8, (1, 0)) * scale / 2, (x8, w8, scale)

    def backward(kept: Any, g: Any) -> Any:
        x8, w8, scale = kept
        g8 = g.astype(e5m2)
        return product(g8, w8, (1, 1)) * scale, product(x8, g8, (0, 0)) / 2

    matmul.defvjp(forward, backward)

    def loss(w: Any, x: Any, y: Any) -> Any:
        return jnp.mean((matmul(jnp.tanh(matmul(x, w[0])), w[1]) - y) ** 2)

    return sgd(loss), ((floats(8, 16), floats(16, 8)), floats(16, 8), floats(16, 8))


@step
def float8_state() -> Made:
    def train_step(state: Any, x: Any, y: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

        w = state["w"].astype(jnp.float32) * state["scale"]
        value, gradient = jax.value_and_grad(loss)(w)
        w -= 0.1 * gradient
        scale = jnp.max(jnp.abs(w)) / 448
        return {"w": (w / scale).astype(jnp.float8_e4m3fn), "scale": scale}, value

    w = jnp.asarray(floats(8, 8)).astype(jnp.float8_e4m3fn)
    return train_step, ({"w": w, "scale": np.float32(1)}, floats(16, 8), floats(16, 8))


@step
def int4_weights() -> Made:
    def train_step(state: Any, x: Any, y: Any) -> Any:
        def loss(adapter: Any) -> Any:
            w = state["low"].astype(jnp.float32) * state["scale"]
            w += state["high"].astype(jnp.float32)
            return jnp.mean((jnp.tanh(x @ w) @ adapter - y) ** 2)

        value, gradient = jax.value_and_grad(loss)(state["adapter"])
        return {**state, "adapter": state["adapter"] - 0.1 * gradient}, value

    state = {
        "low": jnp.asarray(integers(15, 8, 8) - 8).astype(jnp.int4),
        "high": jnp.asarray(integers(15, 8, 8)).astype(jnp.uint4),
        "scale": floats(8),
        "adapter": floats(8, 8),
    }
    return train_step, (state, floats(16, 8), floats(16, 8))


@step
def small_numbers_that_move() -> Made:
    """Elements of two and four bits, which the next step has in other places."""

    def train_step(state: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            signs = state["signs"].astype(jnp.float32) - state["halves"].astype(jnp.float32)
            return jnp.mean(jnp.tanh((x * signs) @ w) ** 2)

        value, gradient = jax.value_and_grad(loss)(state["w"])
        moved = {name: jnp.roll(state[name], 1, axis=0) for name in ("signs", "halves")}
        return {"w": state["w"] - 0.1 * gradient, **moved}, value

    state = {
        "w": floats(8, 8),
        "signs": jnp.asarray(integers(2, 16, 8)).astype(jnp.int2),
        "halves": jnp.asarray(integers(3, 16, 8) / 2).astype(jnp.float4_e2m1fn),
    }
    return train_step, (state, floats(16, 8))


@step
def int8_products() -> Made:
    @jax.custom_vjp
    def matmul(x: Any, w: Any) -> Any:
        return forward(x, w)[0]

    def forward(x: Any, w: Any) -> Any:
        rows = jnp.max(jnp.abs(x), axis=1, keepdims=True) / 127
        columns = jnp.max(jnp.abs(w), axis=0, keepdims=True) / 127
        quantized = (jnp.round(x / rows).astype(jnp.int8), jnp.round(w / columns).astype(jnp.int8))
        product = lax.dot(*quantized, preferred_element_type=jnp.int32)
        return product.astype(jnp.float32) * rows * columns, (x, w)

    matmul.defvjp(forward, lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

    def loss(w: Any, x: Any, y: Any) -> Any:
        return jnp.mean((matmul(jnp.tanh(matmul(x, w[0])), w[1]) - y) ** 2)

    return sgd(loss), ((floats(8, 16), floats(16, 8)), floats(16, 8), floats(16, 8))


# Steps that are skipped, or gathered over several calls.


def optimized(transformation: Any, *, finite: bool = True) -> Made:
    def train_step(state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ params[0]) @ params[1] - y) ** 2)

        params, kept = state
        value, gradient = jax.value_and_grad(loss)(params)
        updates, kept = transformation.update(gradient, kept, params)
        return (optax.apply_updates(params, updates), kept), value

    params, x = [floats(8, 16), floats(16, 8)], floats(16, 8)
    if not finite:
        x[5, 3] = np.inf
    return train_step, ((params, jax.jit(transformation.init)(params)), x, floats(16, 8))


@step
def applied_if_finite() -> Made:
    return optimized(optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3), finite=False)


@step
def several_steps() -> Made:
    skip = optax.skip_not_finite
    many = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=1, should_skip_update_fn=skip)
    return optimized(many.gradient_transformation(), finite=False)


@step
def zeroed_and_clipped() -> Made:
    clip = optax.chain(optax.adaptive_grad_clip(0.1), optax.clip_by_global_norm(1.0))
    return optimized(optax.chain(optax.zero_nans(), clip, optax.sgd(0.1)))


@step
def scaled_loss() -> Made:
    """The scale of the loss is halved where a gradient is not finite, and the step is skipped."""

    def train_step(state: Any, x: Any, y: Any) -> Any:
        w, scale = state["w"], state["scale"]

        def loss(w: Any) -> Any:
            return scale * jnp.mean((jnp.tanh(x @ w) - y) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        gradient /= scale
        finite = jnp.isfinite(gradient).all()
        w = jax.lax.select(finite, w - 0.1 * gradient, w)
        return {"w": w, "scale": jnp.where(finite, scale * 2, scale / 2)}, value / scale

    x = floats(16, 8)
    x[7, 7] = np.nan
    state = {"w": floats(8, 8), "scale": np.float32(1024)}
    return train_step, (state, x, floats(16, 8))


# Numbers that are none.


@step
def not_a_number() -> Made:
    """Statistics of activations, some of which are NaN or infinite."""

    def train_step(w: Any, x: Any, labels: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean(jnp.where(jnp.isfinite(x), x, 0) @ w))(w)
        h = x @ w
        statistics = {
            "largest": jnp.abs(h).max(),
            "low": h.astype(jnp.bfloat16).min(),
            "columns": h.max(0),
            "labels": jax.ops.segment_max(h, labels, 4),
            "scaled": (h / jnp.abs(h).max(1, keepdims=True)).min(0),
            "integers": labels.max(),
            "softmax": jax.nn.softmax(h).sum(),
        }
        return w - 0.1 * gradient, statistics

    x = floats(16, 8)
    x[5, 3], x[9, 2], x[11, 1] = np.nan, np.inf, -np.inf
    labels = np.array([0, 1, 2, 3] * 4, np.int32)
    labels[5] = labels[1] = 3
    return train_step, (np.abs(floats(8, 8)), x, labels)


# What is chosen by the platform that a step runs on.


@step
def platforms() -> Made:
    """A diagonal has another form inside of TPU kernels."""

    def loss(w: Any, x: Any, y: Any) -> Any:
        pairs = jnp.diagonal((x @ w)[:, :, None] * x[:, None, :], axis1=1, axis2=2)
        h = lax.platform_dependent(pairs, cpu=jnp.sin, default=jnp.cos)
        return jnp.mean((h - y) ** 2) + jnp.sum(jnp.diagonal(w) ** 2)

    return sgd(loss), (floats(8, 8), floats(16, 8), floats(16, 8))


# What is computed of little.


@step
def chains_of_integers() -> Made:
    """Every link reads the one before it twice: there are more paths than can be walked."""

    def loss(w: Any, x: Any, lengths: Any) -> Any:
        places = jnp.arange(x.shape[0] * 64)
        seeds = jnp.broadcast_to(lengths[:, None], (x.shape[0], 64))
        for _ in range(48):
            places = (places * places + places + 1) % 101
            seeds = (seeds * seeds + seeds + 1) % 103
        h = x @ w
        mask = places[: x.shape[0], None] % 2 + seeds[:, : h.shape[1]] % 3
        return jnp.mean((h * mask) ** 2)

    return sgd(loss), (floats(8, 8), floats(16, 8), integers(9, 16))
