"""Scans in which values only look equal, or are read otherwise than a gradient reads them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from scanned_losses import evaluated
from sharding.steps import graph_of

import autopar
from autopar.passes.graph.graph import inner_jaxprs
from autopar.passes.graph.sunk_constants import with_sunk_constants
from autopar.passes.recompute.override import without_checkpoints
from autopar.passes.recompute.scan_stacks import with_lean_stacks

SIZE = 8


def layers(body: Any, x: Any, *slices: Any) -> Any:
    return jax.lax.scan(lambda h, given: (jax.checkpoint(body)(h, *given), None), x, slices)[0]


def slices_of_positions_and_all(w: Any, x: Any) -> Any:
    """A number of the iteration, and the vector that it is of."""
    positions = jnp.arange(SIZE)

    def body(h: Any, row: Any, position: Any) -> Any:
        one, all_of_them = h * (0.1 * position), h * (0.1 * positions)
        return jnp.sin(one) * row + jnp.exp(-(all_of_them**2)) * jnp.cos(row)

    return layers(body, x[0], w, positions)


def numbers_as_metrics(w: Any, x: Any) -> Any:
    def body(h: Any, row: Any) -> Any:
        return jax.checkpoint(lambda h, row: jnp.tanh(jnp.sin(h * row) * 2))(h, row), 0.0

    h, zeros = jax.lax.scan(body, x, w)
    return h + jnp.sum(zeros)


def two_stacks(w: Any, x: Any) -> Any:
    def forward(h: Any, row: Any) -> Any:
        some = jnp.tanh(h * row)
        return h + jnp.sin(some), (some, jnp.cos(some * 3))

    return jax.lax.scan(forward, x, w)


def stacks_read_whole(w: Any, x: Any) -> Any:
    h, (some, others) = two_stacks(w, x[0])

    def reader(total: Any, given: Any) -> Any:
        return total + jnp.sum(jnp.sin(given[0]) * given[1] * others), None

    return h + jax.lax.scan(reader, 0.0, (some, w))[0]


def stacks_carried(w: Any, x: Any) -> Any:
    h, (some, others) = two_stacks(w, x[0])
    reader = lambda c, given: (c * jnp.sum(jnp.sin(given[0]) * given[1]), None)  # noqa: E731
    return h + jnp.sum(jax.lax.scan(reader, others, (some, w))[0])


@jax.jit
def two_weights(x: Any, first: Any, second: Any) -> Any:
    def body(h: Any, p: Any, q: Any) -> Any:
        return h + jnp.tanh(h * jnp.sin(q)) * p + jnp.sin(h * jnp.cos(p)) * q

    return layers(body, x, first, second)


def one_body_for_tied_weights_and_others(w: Any, x: Any) -> Any:
    """JAX keeps the body of a jitted function: the variables of both calls are the same."""
    return two_weights(x, w, w) + two_weights(x / 2, w, w * 2 + 1)


def one_body_for_numbers_and_weights(w: Any, x: Any) -> Any:
    ones = jnp.ones_like(w)
    most = two_weights(x, ones, ones) + two_weights(x / 2, w, w * 2 + 1)
    return most + two_weights(x * 0.2, ones, w * 2 + 1)


@jax.jit
def with_outputs(x: Any, *slices: Any) -> Any:
    def body(h: Any, given: Any) -> Any:
        p, r, s = given
        h = h * jnp.tanh(r * jnp.sin(jnp.cos(p))) + s
        return h, jnp.tanh(h)

    return jax.lax.scan(body, x, slices)


def one_body_reads_what_it_stacked(w: Any, x: Any) -> Any:
    table = 0.3 * jax.lax.broadcasted_iota(jnp.float32, w.shape, 0)
    h, stacked = with_outputs(x[0], table, w, w)
    return h + with_outputs(x[0], w * 2, w, stacked)[0]


@jax.custom_vjp
def watched(y: Any) -> Any:
    return jnp.sin(y)


def _watch(y: Any, g: Any) -> Any:
    jax.debug.callback(lambda size: None, jnp.sum(g * g))
    return (g * jnp.cos(y),)


watched.defvjp(lambda y: (jnp.sin(y), y), _watch)


def watched_gradients(w: Any, x: Any) -> Any:
    return layers(lambda h, row: jnp.tanh(watched(h * row) * 2), x, w)


def turned_round(w: Any, x: Any) -> Any:
    body = lambda h, p, q: jnp.tanh(h * jnp.sin(p)) + jnp.sin(q) * jnp.exp(-h * h)  # noqa: E731
    checked = jax.checkpoint(body)
    h, _ = jax.lax.scan(lambda h, s: (checked(h, *s), None), x, (w, w[::-1]), reverse=True)
    return h * layers(body, x, w[::-1], w)


STEPS = [
    slices_of_positions_and_all,
    numbers_as_metrics,
    stacks_read_whole,
    stacks_carried,
    one_body_for_tied_weights_and_others,
    one_body_for_numbers_and_weights,
    one_body_reads_what_it_stacked,
    watched_gradients,
    turned_round,
]


def step_of(model: Any) -> Any:
    def train_step(w: Any, x: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            return jnp.mean(model(w, x) ** 2)

        loss, gradient = jax.value_and_grad(loss_fn)(w)
        return w - 0.1 * gradient, loss

    return train_step


def arguments() -> tuple[Any, Any]:
    first, second = jax.random.split(jax.random.key(0))
    w = jax.random.normal(first, (SIZE, SIZE)) * 0.5
    return w, jax.random.normal(second, (SIZE, SIZE)) * 0.5


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def assert_defined(jaxpr: Jaxpr) -> None:
    """Every variable is made before it is read, inside of bodies too."""
    there = {*jaxpr.invars, *jaxpr.constvars}
    for eqn in jaxpr.eqns:
        _assert_there(eqn, there)
        there.update(eqn.outvars)
        for body in inner_jaxprs(eqn):
            assert_defined(body)
    assert all(isinstance(x, Literal) or x in there for x in jaxpr.outvars)


def _assert_there(eqn: JaxprEqn, there: set[Any]) -> None:
    missing = [x for x in eqn.invars if not isinstance(x, Literal) and x not in there]
    assert not missing, f"{eqn} reads {missing}"


@pytest.mark.parametrize("model", STEPS)
@pytest.mark.parametrize("differentiated", [False, True])
def test_rewritten_scans_give_the_same(model: Any, differentiated: bool) -> None:
    step = step_of(model) if differentiated else model
    graph = graph_of(step, *arguments())
    expected = jax.tree.leaves(jax.jit(step)(*arguments()))
    for rewritten in (with_sunk_constants, without_checkpoints, with_lean_stacks):
        graph = rewritten(graph)
        assert_defined(graph.jaxpr)
        assert_close(evaluated(graph, jax.tree.leaves(arguments())), expected)


@pytest.mark.parametrize("model", STEPS)
def test_steps_whose_checkpoints_are_undone(model: Any) -> None:
    step = step_of(model)
    asked: dict[str, Any] = {"stages": 1, "batch_argnums": (1,), "donate_argnums": ()}
    asked["microbatches"] = 1
    found = autopar.compile(step, *arguments(), remat="override", **asked)
    assert_close(found.gather(found(*arguments())), jax.jit(step)(*arguments()))
