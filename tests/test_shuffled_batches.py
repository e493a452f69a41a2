"""Steps that take the rows of their batch by number: shuffled, reversed, drawn with repetitions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

Index = Callable[[jax.Array, jax.Array], jax.Array]
INDICES: dict[str, Index] = {
    "shuffled": lambda key, y: jax.random.permutation(key, y.shape[0]),
    "reversed": lambda key, y: jnp.arange(y.shape[0])[::-1],
    "bootstrap": lambda key, y: jax.random.randint(key, y.shape, 0, y.shape[0]),
}
WIDTHS = (16, 256, 256, 256, 8)


def step_with(index: Index) -> Callable[..., Any]:
    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        for w in params[:-1]:
            x = jnp.tanh(x @ w)
        logs = jax.nn.log_softmax(x @ params[-1])
        return -jnp.take_along_axis(logs, y[:, None], 1).mean()

    def step(state: Any, x: Any, y: Any) -> Any:
        params, key = state
        key, used = jax.random.split(key)
        rows = index(used, y)
        loss, grads = jax.value_and_grad(loss_fn)(params, x[rows], y[rows])
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), key), loss

    return step


def state_and_batch(examples: int) -> tuple[Any, Any, Any]:
    numbers = np.random.default_rng(0)
    shapes = itertools.pairwise(WIDTHS)
    params = [(numbers.normal(size=shape) / 4).astype("f") for shape in shapes]
    x = numbers.normal(size=(examples, WIDTHS[0])).astype("f")
    return (params, jax.random.key(3)), x, numbers.integers(0, WIDTHS[-1], examples).astype("i")


@pytest.mark.parametrize("name", INDICES)
def test_they_are_divided_like_others(name: str) -> None:
    """Among devices, whose gradients are added, and into microbatches, which need less memory."""
    made = [
        autopar.plan(
            step_with(INDICES[name]), *state_and_batch(8192), method="data", microbatches=count
        )
        for count in (1, 4)
    ]
    for plan in made:
        added = [x for x in plan.stages[0].collectives if x.purpose == "gradient"]
        assert added and {x.kind for x in added} == {"all-reduce"}
        weights = sum(4 * a * b for a, b in itertools.pairwise(WIDTHS))
        assert sum(x.bytes * x.times for x in added) <= 1.1 * weights
    whole, parts = (plan.estimates.peak_bytes_per_device for plan in made)
    assert parts < 0.7 * whole


@pytest.mark.parametrize("name", INDICES)
def test_numbers_are_those_of_jit(name: str) -> None:
    step = step_with(INDICES[name])
    ours = autopar.parallelize(step, method="data", microbatches=2, donate_argnums=())
    state, x, y = state_and_batch(64)
    other = state
    for _ in range(2):
        state, loss = ours(state, x, y)
        other, expected = jax.jit(step)(other, x, y)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(state[0]), jax.tree.leaves(other[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_row_that_is_taken_alone_is_no_batch() -> None:
    def step(w: Any, x: Any) -> Any:
        grad = jax.grad(lambda w: jnp.mean((x @ w - (x[0] @ w)) ** 2))(w)
        return w - 0.1 * grad

    w, x = np.ones((8, 4), "f"), np.arange(128, dtype="f").reshape(16, 8) / 64
    ours = autopar.parallelize(step, microbatches=2, donate_argnums=())
    np.testing.assert_allclose(ours(w, x), jax.jit(step)(w, x), rtol=1e-5)
