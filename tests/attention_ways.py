"""Attention written in several ways, in a small decoder that is trained, and its plans."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.base.line_times import LineTime

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Shapes = dict[str, Any]


def by_hand(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def written_out(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def by_jax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def capped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = 50 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 50)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def dropping(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(keep, weights / 0.9, 0), v)


def scores_of(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def mixed_by(weights: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def scaled_by_head(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = scores_of(q, k) * v[0, 0, :, 0][None, :, None, None] + v[0, 0, 0, 0]
    return mixed_by(jax.nn.softmax(scores / jnp.sqrt(q.shape[-1]).astype(q.dtype)), v)


def with_a_sink(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = scores_of(q, k).astype(jnp.float32)
    largest = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    weights = weights / (weights.sum(-1, keepdims=True) + jnp.exp(-largest))
    return mixed_by(weights.astype(v.dtype), v)


def at_least_zero(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return mixed_by(jax.nn.softmax(jnp.maximum(scores_of(q, k), 0)), v)


def gated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    gates = jnp.arange(q.shape[1], dtype=q.dtype)[:, None] * v[0, :, 0, 0]
    return mixed_by(jax.nn.softmax(scores_of(q, k) * gates), v)


def zeroed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    return mixed_by(jax.nn.softmax(jnp.where(mask, scores_of(q, k), 0)), v)


def squared(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(scores_of(q, k))
    return mixed_by(weights * weights, v)


def over_queries(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return mixed_by(jax.nn.softmax(scores_of(q, k), axis=-2), v)


def turned_weights(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return mixed_by(jax.nn.softmax(scores_of(q, k)).swapaxes(-1, -2), v)


def with_a_loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(scores_of(q, k))
    return mixed_by(weights, v) + (weights.astype(jnp.float32) ** 2).mean().astype(v.dtype)


def with_a_loss_of_sums(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = scores_of(q, k)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    sums = weights.sum(-1, keepdims=True)
    return mixed_by(weights / sums, v) + jnp.log(sums).mean()


def biased(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return mixed_by(jax.nn.softmax(scores_of(q, k) + v[0, :, 0, 0]), v)


def grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q = q.reshape(*q.shape[:2], 2, -1, q.shape[-1])
    weights = jax.nn.softmax(jnp.einsum("bqghd,bkhd->bghqk", q, k[:, :, : q.shape[3]]))
    return jnp.einsum("bghqk,bkhd->bqghd", weights, v[:, :, : q.shape[3]])


def line_of(fn: Callable[..., Any], words: str) -> str:
    """The line of a function that has these words, as a plan names it."""
    lines, first = inspect.getsourcelines(fn)
    (number,) = [i for i, line in enumerate(lines) if words in line]
    return f"{Path(inspect.getsourcefile(fn) or '').name}:{first + number}"


def step_with(attention: Attention, *, remat: bool = False, depth: int = 64) -> Callable[..., Any]:
    """Of a small decoder of two layers, trained by SGD."""

    def block(x: jax.Array, layer: Shapes) -> jax.Array:
        q, k, v = (x @ layer[name] for name in "qkv")
        apart = (*x.shape[:2], -1, depth)
        mixed = attention(q.reshape(apart), k.reshape(apart), v.reshape(apart))
        x = x + mixed.reshape(x.shape)
        return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]

    def loss_of(params: Shapes, batch: Shapes) -> jax.Array:
        x = params["embed"][batch["tokens"]]
        for layer in params["layers"]:
            x = (jax.checkpoint(block) if remat else block)(x, layer)
        logits = (x @ params["embed"].T).astype(jnp.float32)
        weights = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(weights, batch["targets"][..., None], -1).mean()

    def step(params: Shapes, batch: Shapes) -> tuple[Shapes, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def shapes_of(
    length: int = 1024, width: int = 256, dtype: Any = jnp.bfloat16
) -> tuple[Shapes, Any]:
    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    layer = {name: shape(width, width) for name in "qkv"}
    layer |= {"up": shape(width, 4 * width), "down": shape(4 * width, width)}
    tokens = jax.ShapeDtypeStruct((8, length), jnp.int32)
    params = {"embed": shape(1024, width), "layers": [layer, layer]}
    return params, {"tokens": tokens, "targets": tokens}


def planned(step: Callable[..., Any], shapes: tuple[Shapes, Any], **options: Any) -> autopar.Plan:
    return autopar.plan(step, *shapes, progress=False, **{"cluster": "1xh100", **options})


def line_at(plan: autopar.Plan, source: str) -> LineTime:
    (line,) = [line for line in plan.hot_lines.lines if line.source == source]
    return line


def advised(plan: autopar.Plan) -> list[str]:
    return [advice.about for advice in plan.hot_lines.advice]


def scanned(checkpoint: str) -> Callable[..., Any]:
    """A step over a stack of layers, with `jax.checkpoint` around each or around the scan."""

    def body(x: jax.Array, w: Shapes) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w["a"]) @ w["b"] + x, None

    def scan(x: jax.Array, ws: Shapes) -> jax.Array:
        each = jax.checkpoint(body) if checkpoint == "layer" else body
        return jax.lax.scan(each, x, ws)[0]

    def step(ws: Shapes, x: jax.Array) -> tuple[Shapes, jax.Array]:
        run = jax.checkpoint(scan) if checkpoint == "scan" else scan
        loss, grads = jax.value_and_grad(lambda ws: (run(x, ws) ** 2).mean())(ws)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), loss

    return step


def stacked(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


STACK = {"a": stacked(8, 1024, 4096), "b": stacked(8, 4096, 1024)}, stacked(8192, 1024)
