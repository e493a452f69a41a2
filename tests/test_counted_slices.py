"""Gradients that a loop accumulates by its own count, over parts of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharding.steps import graph_of

import autopar
from autopar.passes.graph.graph import walk

PARTS, ROWS = 4, 32
Parts = Callable[[int, Any], Any]


def params() -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    return {"up": jax.random.normal(keys[0], (8, 16)), "down": jax.random.normal(keys[1], (16, 3))}


def batch(axis: int = 0) -> Any:
    x = jax.random.normal(jax.random.key(1), (ROWS, 8))
    return {"x": x if axis == 0 else x.T, "y": jnp.arange(ROWS) % 3}


def by_slices(axis: int) -> Parts:
    rows = ROWS // PARTS

    def take(number: Any, batch: Any) -> Any:
        x = jax.lax.dynamic_slice_in_dim(batch["x"], number * rows, rows, axis)
        y = jax.lax.dynamic_slice_in_dim(batch["y"], number * rows, rows)
        return (x if axis == 0 else x.T), y

    return take


def loss_of(params: Any, x: Any, y: Any) -> Any:
    scores = jnp.tanh(x @ params["up"]) @ params["down"]
    return -jnp.mean(jax.nn.log_softmax(scores)[jnp.arange(len(y)), y])


def accumulating(take: Parts, loop: str = "fori") -> Any:
    def step(params: Any, batch: Any) -> Any:
        def add(number: Any, total: Any) -> Any:
            found = jax.value_and_grad(loss_of)(params, *take(number, batch))
            return jax.tree.map(jnp.add, total, found)

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        if loop == "fori":
            loss, gradients = jax.lax.fori_loop(0, PARTS, add, zeros)
        else:
            numbers = jnp.arange(PARTS)
            (loss, gradients), _ = jax.lax.scan(
                lambda total, number: (add(number, total), None), zeros, numbers
            )
        return jax.tree.map(lambda w, g: w - 0.1 * g / PARTS, params, gradients), loss / PARTS

    return step


def slices(step: Any, *args: Any, **options: Any) -> int:
    """How many are left of the traced step."""
    graph = graph_of(step, *args, **options)
    return sum(eqn.primitive.name == "dynamic_slice" for eqn in walk(graph.jaxpr))


@pytest.mark.parametrize("loop", ["fori", "numbers"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("count", [1, 4])
def test_it_is_planned_as_slices_of_the_batch(loop: str, axis: int, count: int) -> None:
    step = accumulating(by_slices(axis), loop)
    args = params(), batch(axis)
    axes: Any = (None, {"x": axis, "y": 0})
    assert not slices(step, *args, batch_axes=axes)
    options: dict[str, Any] = {"microbatches": count, "method": "data", "batch_axes": axes}
    expected = jax.jit(step)(*args)
    found = autopar.compile(step, *args, **options)(*args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def of_few_rows(number: Any, batch: Any) -> Any:
    return tuple(jax.lax.dynamic_slice_in_dim(batch[n], number * 8, 4) for n in "xy")


def one_row_further(number: Any, batch: Any) -> Any:
    return tuple(jax.lax.dynamic_slice_in_dim(batch[n], number * 8 + 1, 8) for n in "xy")


def backwards(number: Any, batch: Any) -> Any:
    return tuple(jax.lax.dynamic_slice_in_dim(batch[n], 24 - number * 8, 8) for n in "xy")


def twice_the_first(number: Any, batch: Any) -> Any:
    begin = jnp.maximum(number - 1, 0) * 8
    return tuple(jax.lax.dynamic_slice_in_dim(batch[n], begin, 8) for n in "xy")


@pytest.mark.parametrize("take", [of_few_rows, one_row_further, backwards, twice_the_first])
def test_other_parts_stay(take: Parts) -> None:
    step = accumulating(take)
    assert slices(step, params(), batch()) == 2
    args = params(), batch()
    expected = jax.jit(step)(*args)
    found = autopar.compile(step, *args, microbatches=1)(*args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_parts_along_another_dimension_stay() -> None:
    """Chunks of time hold every row of the batch."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            def add(number: Any, total: Any) -> Any:
                return total + jnp.sum(jax.lax.dynamic_slice_in_dim(x, number * 2, 2, 1) @ w)

            return jax.lax.fori_loop(0, 4, add, 0.0) ** 2

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    assert slices(step, jnp.ones((4, 2)), jnp.ones((16, 8, 4))) > 0


def test_weights_that_a_loop_takes_stay() -> None:
    """They are no parts of the batch."""

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            def layer(number: Any, x: Any) -> Any:
                return jnp.tanh(x @ jax.lax.dynamic_index_in_dim(weights, number, 0, False))

            return jnp.mean(jax.lax.fori_loop(0, 3, layer, x) ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * gradient, value

    assert slices(step, jnp.ones((3, 8, 8)), jnp.ones((16, 8))) > 0


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32])
def test_counts_that_wrap_are_no_counts(dtype: Any) -> None:
    """A row in each of 160 trips, by a carried number: eight bits are not enough for them."""

    def step(w: Any, x: Any) -> Any:
        def add(carry: Any, _: None) -> Any:
            number, total = carry
            row = jax.lax.dynamic_slice_in_dim(x, number, 1)
            return (number + 1, total + jax.grad(lambda w: jnp.sum((row @ w) ** 2))(w)), None

        (_, total), _ = jax.lax.scan(add, (dtype(0), jnp.zeros_like(w)), None, length=160)
        return w - 0.01 * total

    w, x = jnp.ones((4, 2)), jax.random.normal(jax.random.key(0), (160, 4))
    assert slices(step, w, x) == (dtype is jnp.int8)
    expected = jax.jit(step)(w, x)
    found = autopar.compile(step, w, x, microbatches=1)(w, x)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)
