"""Scans whose bodies have `jax.checkpoint`, undone on request; and masks that JAX takes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn, Literal
from scanned_losses import (
    LENGTH,
    LOSSES,
    ROWS,
    WIDTH,
    arguments,
    attention_block,
    block,
    evaluated,
    norm,
    stacked_bytes,
    step_of,
)
from sharding.steps import graph_of

import autopar
from autopar.passes.graph.graph import Graph, makers_of, variables, walk
from autopar.passes.graph.microbatched import LoopPhase
from autopar.passes.graph.sunk_constants import LARGE, with_sunk_constants
from autopar.passes.recompute.attention_statistics import ATTENTION
from autopar.passes.recompute.override import without_checkpoints
from autopar.passes.recompute.scan_stacks import with_lean_stacks

Wrapped = Callable[[Any], Any]


def saving_products(function: Any) -> Any:
    return jax.checkpoint(function, policy=jax.checkpoint_policies.dots_saveable)


def twice(function: Any) -> Any:
    return jax.checkpoint(jax.checkpoint(function))


def plain(function: Any) -> Any:
    return function


WAYS = [jax.checkpoint, saving_products, twice]


def turned(x: Any) -> Any:
    """Rotary positions: a table made of nothing, by functions that are not cheap."""
    angles = jnp.arange(LENGTH)[:, None] / 10.0 ** jnp.arange(WIDTH // 2)
    one, other = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [one * jnp.cos(angles) - other * jnp.sin(angles), other * jnp.cos(angles) + one], -1
    )


def masked(w: Any, x: Any) -> Any:
    y = turned(norm(x, w["scale"]))
    q, k, v = jnp.split(y @ w["qkv"], 3, axis=-1)
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores.shape)
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.full(scores.shape, -1e9)))
    x = x + weights @ v
    return x + jax.nn.silu(norm(x, w["scale"]) @ w["up"]) @ w["down"]


def decoder(wrapped: Wrapped) -> Any:
    def loss_fn(w: Any, x: Any, key: Any) -> Any:
        h, sizes = jax.lax.scan(
            lambda h, weights: ((y := wrapped(masked)(weights, h)), jnp.mean(y * y)), x, w
        )
        return jnp.mean(h * h) + jnp.sum(sizes)

    return loss_fn


def with_dropout(wrapped: Wrapped) -> Any:
    def loss_fn(w: Any, x: Any, key: Any) -> Any:
        def layer(carry: Any, weights: Any) -> Any:
            h, key = carry
            key, own = jax.random.split(key)
            return (wrapped(block)(weights, h, own), key), None

        (h, _), _ = jax.lax.scan(layer, (x, key), w, reverse=True)
        return jnp.mean(h * h)

    return loss_fn


def conditioned(wrapped: Wrapped) -> Any:
    """Layers that close over what the step makes: the forward scan's part of that is outside."""

    def loss_fn(w: Any, x: Any, key: Any) -> Any:
        given = x.mean(1) @ w["qkv"][0, :, :WIDTH]

        def layer(h: Any, weights: Any) -> Any:
            shift, scale, gate = jnp.split(jax.nn.silu(given) @ weights["qkv"], 3, axis=-1)
            y = norm(h, weights["scale"]) * (1 + scale[:, None]) + shift[:, None]
            y = jax.nn.gelu(y @ weights["up"]) @ weights["down"]
            return h + jnp.sin(given)[:, None] * gate[:, None] * y

        h, _ = jax.lax.scan(lambda h, weights: (wrapped(layer)(h, weights), None), x, w)
        return jnp.mean(h * h)

    return loss_fn


def in_parts(wrapped: Wrapped) -> Any:
    """A scan over layers, each a scan over parts of its rows; both have checkpoints."""

    def loss_fn(w: Any, x: Any, key: Any) -> Any:
        def layer(weights: Any, h: Any) -> Any:
            part = wrapped(lambda rows: rows + jnp.tanh(rows @ weights["up"]) @ weights["down"])
            _, parts = jax.lax.scan(lambda c, rows: (c, part(rows)), 0, h.reshape(4, -1, WIDTH))
            return attention_block(weights, parts.reshape(h.shape), key)

        h, _ = jax.lax.scan(lambda h, weights: (wrapped(layer)(weights, h), None), x, w)
        return jnp.mean(h * h)

    return loss_fn


def products(graph: Graph) -> int:
    return sum(eqn.primitive.name == "dot_general" for eqn in walk(graph.jaxpr))


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrapped", WAYS)
@pytest.mark.parametrize("model", [decoder, with_dropout, conditioned])
def test_nothing_is_computed_twice(model: Any, wrapped: Wrapped) -> None:
    before = graph_of(step_of(model(wrapped)), *arguments())
    undone = without_checkpoints(before)
    unannotated = graph_of(step_of(model(plain)), *arguments())
    assert products(undone) == products(unannotated)
    assert products(before) > products(undone) or wrapped is saving_products
    lean = [stacked_bytes(with_lean_stacks(x).jaxpr) for x in (undone, unannotated)]
    assert lean[0] <= (1.02 if model is conditioned else 1) * lean[1]
    leaves = jax.tree.leaves(arguments())
    assert_equal(evaluated(undone, leaves), evaluated(before, leaves))


def test_scans_in_scans_run_again() -> None:
    """What an inner scan makes is not known of the outer one, but all before it is."""
    before = graph_of(step_of(in_parts(jax.checkpoint)), *arguments())
    undone = without_checkpoints(before)
    assert products(undone) <= products(before)
    leaves = jax.tree.leaves(arguments())
    assert_equal(evaluated(undone, leaves), evaluated(before, leaves))


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_what_has_no_checkpoint_stays(loss_fn: Any) -> None:
    before = graph_of(step_of(loss_fn), *arguments())
    undone = without_checkpoints(before)
    assert products(undone) <= products(before)
    leaves = jax.tree.leaves(arguments())
    assert_equal(evaluated(undone, leaves), evaluated(before, leaves))


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 1},
        {"microbatches": 2},
        {"microbatches": 2, "stages": 2, "schedule": "1f1b"},
    ],
)
@pytest.mark.parametrize("model", [decoder, with_dropout, conditioned, in_parts])
def test_steps_with_scans_whose_checkpoints_are_undone(model: Any, options: Any) -> None:
    step_fn = step_of(model(jax.checkpoint))
    asked: dict[str, Any] = {"batch_argnums": (1,), "donate_argnums": (), "remat": "override"}
    step = autopar.compile(step_fn, *arguments(), **asked, **options)
    assert_equal(step.gather(step(*arguments())), jax.jit(step_fn)(*arguments()))


@pytest.mark.parametrize("wrapped", [jax.checkpoint, plain])
def test_attention_by_cudnn_is_computed_once(wrapped: Wrapped) -> None:
    """The forward scan makes the statistics that the gradient reads, and nobody else does."""

    def layer(h: Any, weights: Any) -> Any:
        heads = (h @ weights["qkv"]).astype(jnp.bfloat16).reshape(ROWS, LENGTH, 3, 2, -1)
        q, k, v = (heads[:, :, i] for i in range(3))
        mixed = jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
        return h + mixed.reshape(h.shape).astype(h.dtype)

    def loss_fn(w: Any, x: Any, own: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, weights: (own(layer)(h, weights), None), x, w)
        return jnp.mean(h * h)

    def train_step(w: Any, x: Any) -> Any:
        gradients = jax.grad(loss_fn)(w, x, wrapped)
        w = jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients)
        return w, loss_fn(w, x, plain)  # an inference with the new weights

    with autopar.tracing_for(autopar.Cluster.preset("dgx-h100")):
        graph = graph_of(train_step, *arguments()[:2])
    undone = without_checkpoints(graph)
    forward = [eqn for eqn in walk(undone.jaxpr) if eqn.primitive.name == ATTENTION]
    assert [eqn.params["is_training"] for eqn in forward] == [True, False]
    assert [len(eqn.outvars) for eqn in forward] == [2, 1]
    assert products(undone) <= products(graph)


def test_memory_takes_back_what_was_undone() -> None:
    """A scan with `jax.checkpoint` is quicker undone, and fits where it did before."""
    width, length, rows = 1024, 512, 64
    shape = lambda *sizes: jax.ShapeDtypeStruct((8, *sizes), jnp.float32)  # noqa: E731

    def loss_fn(w: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            up, down = (w[name].astype(jnp.bfloat16) for name in ("up", "down"))
            return h + jax.nn.silu(h @ up) @ down, None

        h, _ = jax.lax.scan(jax.checkpoint(layer), x, w)
        return jnp.mean(jnp.square(h.astype(jnp.float32)))

    def train_step(w: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss

    w = {"up": shape(width, 4 * width), "down": shape(4 * width, width)}
    x = jax.ShapeDtypeStruct((rows, length, width), jnp.bfloat16)
    cluster = autopar.Cluster.preset("dgx-h100")
    asked: dict[str, Any] = {"cluster": cluster, "stages": 1, "batch_argnums": (1,)}
    respected = autopar.plan(train_step, w, x, **asked).estimates
    undone = autopar.plan(train_step, w, x, remat="override", **asked).estimates
    assert undone.step_seconds < 0.97 * respected.step_seconds
    limit = int(1.02 * respected.peak_bytes_per_device)
    assert undone.peak_bytes_per_device > limit
    within = autopar.plan(train_step, w, x, remat="override", memory_limit=limit, **asked)
    assert within.estimates.step_seconds <= 1.01 * respected.step_seconds


def scans_of(graph: Graph) -> list[JaxprEqn]:
    return [eqn for eqn in walk(graph.jaxpr) if eqn.primitive.name == "scan"]


def large_constants(graph: Graph) -> int:
    """Of the program's own scans, those that are computed from numbers alone."""
    made_by, eqns = makers_of(graph.jaxpr.eqns), graph.jaxpr.eqns
    found = 0
    for scan in scans_of(graph):
        for outer in LoopPhase(scan).consts.values():
            if isinstance(outer, Literal) or outer not in made_by or outer.aval.size < LARGE:
                continue
            found += not variables(eqns[made_by[outer]].invars)
    return found


def test_masks_are_made_where_they_are_read() -> None:
    side = 260

    def loss_fn(w: Any, x: Any, key: Any) -> Any:
        mask = jnp.tril(jnp.ones((side, side), bool))

        def outer(h: Any, scales: Any) -> Any:
            def inner(h: Any, scale: Any) -> Any:
                return jnp.sin(jnp.where(mask, h * scale, jnp.full(h.shape, 0.5))), None

            return jax.lax.scan(inner, h, scales)[0], None

        h, _ = jax.lax.scan(outer, jnp.tile(x[0, 0, :10], (side, side // 10)), w["scale"])
        return jnp.mean(h * h)

    before = graph_of(step_of(loss_fn), *arguments())
    sunk = with_sunk_constants(before)
    assert large_constants(before) > 0 == large_constants(sunk)
    assert len(scans_of(sunk)) == len(scans_of(before)) == 4
    assert with_sunk_constants(sunk) is sunk
    leaves = jax.tree.leaves(arguments())
    for found, expected in zip(evaluated(sunk, leaves), evaluated(before, leaves), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_small_tables_stay_outside() -> None:
    graph = graph_of(step_of(decoder(plain)), *arguments())
    assert ROWS * LENGTH * LENGTH < LARGE
    assert with_sunk_constants(graph) is graph
