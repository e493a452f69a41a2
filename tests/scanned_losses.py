"""Losses with scans, as users write them, and their steps as graphs that can be evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxpr_as_fun

from autopar.passes.graph.graph import Graph, walk
from autopar.passes.graph.microbatched import LoopPhase
from autopar.passes.slicing.anatomy import bytes_of

DEPTH, WIDTH, HEADS, ROWS, LENGTH = 3, 16, 2, 8, 8


def parameters() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return {"scale": jnp.ones((DEPTH, WIDTH))} | {
        name: jax.random.normal(key, (DEPTH, *shape)) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def attention_block(w: Any, x: Any, key: Any) -> Any:
    y = norm(x, w["scale"])
    q, k, v = jnp.split((y @ w["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    weights = jnp.where(jax.random.bernoulli(key, 0.9, weights.shape), weights / 0.9, 0)
    return x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)


def block(w: Any, x: Any, key: Any) -> Any:
    x = attention_block(w, x, key)
    return x + jax.nn.silu(norm(x, w["scale"]) @ w["up"]) @ w["down"]


def transformer(w: Any, x: Any, key: Any) -> Any:
    """With a counter that is carried, keys, and metrics of every layer."""

    def layer(carry: Any, inputs: Any) -> Any:
        (h, count), (weights, own) = carry, inputs
        h = block(weights, h, own)
        return (h, count + 1), jnp.mean(h * h)

    (h, _), sizes = jax.lax.scan(layer, (x, 0), (w, jax.random.split(key, DEPTH)))
    return jnp.mean(h * h) + 0.1 * jnp.sum(sizes)


def checkpointed(w: Any, x: Any, key: Any) -> Any:
    def layer(h: Any, inputs: Any) -> Any:
        return jax.checkpoint(block)(inputs[0], h, inputs[1]), None

    h, _ = jax.lax.scan(layer, x, (w, jax.random.split(key, DEPTH)))
    return jnp.mean(h * h)


def recurrent(w: Any, x: Any, key: Any) -> Any:
    """Over time, backwards, of which all outputs are used, and a constant."""
    mix = w["qkv"][0, :, :WIDTH]

    def cell(h: Any, now: Any) -> Any:
        h = jnp.tanh(now @ mix + h * jax.nn.sigmoid(h * w["scale"][0]))
        return h, jnp.sin(h)

    start = jnp.zeros((ROWS, WIDTH))
    h, outputs = jax.lax.scan(cell, start, jnp.swapaxes(x, 0, 1) * 2, reverse=True)
    return jnp.mean(outputs**2) + jnp.mean(h)


def nested(w: Any, x: Any, key: Any) -> Any:
    """A scan over layers, each a scan over parts of its rows."""

    def layer(h: Any, weights: Any) -> Any:
        def part(total: Any, rows: Any) -> Any:
            y = jax.nn.silu(norm(rows, weights["scale"]) @ weights["up"]) @ weights["down"]
            return total + jnp.sum(y * y), rows + y

        total, parts = jax.lax.scan(part, 0.0, h.reshape(4, -1, LENGTH, WIDTH))
        return parts.reshape(h.shape), total

    h, totals = jax.lax.scan(layer, x, w)
    return jnp.mean(h * h) + 1e-3 * jnp.sum(totals)


def two_uses(w: Any, x: Any, key: Any) -> Any:
    """A gradient of a gradient: several scans read what one stacks."""
    inner = jax.grad(lambda x: transformer(w, x, key))(x)
    return transformer(w, x - 0.1 * inner, key) + jnp.mean(inner * inner)


def from_what_is_made(w: Any, x: Any, key: Any) -> Any:
    """Slices of what is no parameter, and what is read only there."""

    def layer(h: Any, gate: Any) -> Any:
        return jax.nn.sigmoid(h * jnp.exp(-gate)) * h, None

    h, _ = jax.lax.scan(layer, x, jnp.tanh(w["scale"] @ w["qkv"][0, :, :WIDTH]))
    return jnp.mean(h * h)


@jax.custom_vjp
def largest(y: Any) -> Any:
    return jnp.max(y, -1, keepdims=True)


largest.defvjp(
    lambda y: (m := largest(y), (y, m)),
    lambda kept, g: (jnp.where(kept[0] == kept[1], g, 0.0),),
)


def compared_with_its_maximum(w: Any, x: Any, key: Any) -> Any:
    def layer(h: Any, scale: Any) -> Any:
        y = h * scale + h * h * 0.3
        return h * 0.5 + largest(y) * 0.1, jnp.sin(y) * jnp.cos(h)

    h, others = jax.lax.scan(layer, x, w["scale"])
    return jnp.sum(h * h) + jnp.mean(others**2)


def sliced_and_whole(w: Any, x: Any, key: Any) -> Any:
    def layer(h: Any, row: Any) -> Any:
        return jnp.tanh(h * (row * 3 + 1) @ jnp.tile(w["scale"], (6, 1))[:WIDTH]), None

    mix = w["qkv"][0, :, :WIDTH]
    h, _ = jax.lax.scan(lambda h, row: (jnp.tanh(h * (row * 3 + 1) @ mix), None), x, mix)
    return jnp.sum(jax.lax.scan(layer, h, w["scale"])[0] ** 2)


@jax.custom_vjp
def both_ways(w: Any, x: Any) -> Any:
    return both_ways_forward(w, x)[0]


def both_ways_forward(w: Any, x: Any) -> Any:
    def cell(h: Any, row: Any) -> Any:
        y = jnp.tanh(h * row)
        return y, (h, row * y, jnp.sin(y))

    one, kept = jax.lax.scan(cell, x, w)
    other, kept_too = jax.lax.scan(cell, 2 * x, w, reverse=True)
    return one + other, (kept, kept_too)


def both_ways_backward(kept: Any, g: Any) -> Any:
    def cell(c: Any, slices: Any) -> Any:
        (h, y, z), (h2, y2, z2) = slices
        c = c * (y + z + y2 * z2)
        return c, jnp.sum(c * h + h2, (0, 1))

    c, gw = jax.lax.scan(cell, g, kept, reverse=True)
    return gw, c


both_ways.defvjp(both_ways_forward, both_ways_backward)


def one_backward_scan_of_two(w: Any, x: Any, key: Any) -> Any:
    return jnp.sum(both_ways(w["scale"], x) ** 2)


LOSSES = [
    compared_with_its_maximum,
    sliced_and_whole,
    one_backward_scan_of_two,
    transformer,
    checkpointed,
    recurrent,
    nested,
    two_uses,
    from_what_is_made,
]


def step_of(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def train_step(w: Any, x: Any, key: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(w, x, key)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss

    return train_step


def arguments() -> tuple[Any, Any, Any]:
    x = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, WIDTH))
    return parameters(), x, jax.random.key(2)


def evaluated(graph: Graph, leaves: list[Any]) -> list[Any]:
    closed = jax.extend.core.ClosedJaxpr(graph.jaxpr, ())
    return list(jax.jit(jaxpr_as_fun(closed))(*leaves, *graph.constants))


def stacked_bytes(jaxpr: Jaxpr) -> int:
    scans = [eqn for eqn in walk(jaxpr) if eqn.primitive.name == "scan"]
    return sum(bytes_of(outer) for eqn in scans for _, outer in LoopPhase(eqn).stacks)
