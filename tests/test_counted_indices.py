"""Gathers and scatters along their own index: a batch where the index counts, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core

from autopar.passes.graph.counted_indices import with_batches
from autopar.passes.graph.graph import Input, Output, check, from_closed_jaxpr, walk

Q = np.arange(8 * 6 * 5, dtype=np.float32).reshape(8, 6, 5)
ACTIONS = np.array([0, 5, -1, 2, -6, 3, 5, 1])
COUNT = np.arange(8)

Function = Callable[[Any, Any], Any]


def batches(function: Function) -> list[tuple[int, ...]]:
    """The operand's batch dimensions of every gather and scatter, which compute what they did."""
    closed = jax.make_jaxpr(function)(Q, ACTIONS)
    labels = [Input("q", "state"), Input("a", "batch")]
    graph = with_batches(from_closed_jaxpr(closed, labels, [Output("result")]))
    check(graph)
    (expected,) = jex_core.jaxpr_as_fun(closed)(Q, ACTIONS)
    flat = jex_core.ClosedJaxpr(graph.jaxpr, ())
    (got,) = jex_core.jaxpr_as_fun(flat)(Q, ACTIONS, *graph.constants)
    np.testing.assert_array_equal(got, expected)
    return [
        eqn.params["dimension_numbers"].operand_batching_dims
        for eqn in walk(graph.jaxpr)
        if eqn.primitive.name.startswith(("gather", "scatter"))
    ]


SAME: dict[str, tuple[Function, tuple[int, ...]]] = {
    "rows": (lambda q, a: q[jnp.arange(8), a], (0,)),
    "rows of a constant": (lambda q, a: q[COUNT, a], (0,)),
    "rows by 16 bits": (lambda q, a: q[jnp.arange(8, dtype=jnp.int16), a], (0,)),
    "rows, dropped": (lambda q, a: q.at[jnp.arange(8), a].get(mode="drop"), (0,)),
    "rows, filled": (lambda q, a: q.at[jnp.arange(8), a + 3].get(mode="fill", fill_value=7), (0,)),
    "rows, clipped": (lambda q, a: q.at[jnp.arange(8), a + 3].get(mode="clip"), (0,)),
    "second dimension": (lambda q, a: q.transpose(1, 0, 2)[a, jnp.arange(8)], (1,)),
    "a column": (lambda q, a: q[jnp.arange(8)[:, None], a[:, None]], (0,)),
    "two counts": (
        lambda q, a: q[jnp.arange(8)[:, None], jnp.arange(6)[None], a[:, None] % 5],
        (0, 1),
    ),
    "windows": (lambda q, a: q.reshape(8, 6, 1, 5)[jnp.arange(8), a], (0,)),
    "three coordinates": (lambda q, a: q[a, jnp.arange(6)[:, None], a % 5], (1,)),
    "set": (lambda q, a: q.at[jnp.arange(8), a].set(-1.0), (0,)),
    "add": (lambda q, a: q.at[jnp.arange(8), a].add(q[:, 0]), (0,)),
    "max": (lambda q, a: q.at[jnp.arange(8)[:, None], a[None] + a[:, None]].max(99.0), (0,)),
}


@pytest.mark.parametrize("name", SAME)
def test_a_count_is_a_batch(name: str) -> None:
    function, expected = SAME[name]
    assert set(batches(function)) == {expected}


OTHER: dict[str, Function] = {
    "backwards": lambda q, a: q[jnp.arange(8)[::-1], a],
    "from one": lambda q, a: q[jnp.arange(8) + 1, a],
    "from one down": lambda q, a: q[jnp.arange(8) - 1, a],
    "every second": lambda q, a: q[jnp.arange(0, 16, 2), a],
    "half": lambda q, a: q[jnp.arange(4), a[:4]],
    "another constant": lambda q, a: q[COUNT[::-1], a],
    "repeated": lambda q, a: q[jnp.repeat(jnp.arange(4), 2), a],
    "a smaller clip": lambda q, a: q[jnp.clip(jnp.arange(8), 0, 6), a],
    "nothing counts": lambda q, a: q[a, a],
    "only counts": lambda q, a: q[jnp.arange(8)],
}


@pytest.mark.parametrize("name", OTHER)
def test_what_only_looks_like_a_count(name: str) -> None:
    assert set(batches(OTHER[name])) <= {()}


def test_the_same_dimension_counts_once() -> None:
    square = lambda q, a: q[:6][jnp.arange(6), jnp.arange(6), a[:6] % 5]  # noqa: E731
    assert batches(square) == [(0,)]


def test_gradients_and_bodies() -> None:
    def loss(q: Any, a: Any) -> Any:
        def body(total: Any, actions: Any) -> Any:
            picked = q[jnp.arange(8), actions]
            return total + jnp.sum(picked**2), None

        return jax.lax.scan(body, 0.0, jnp.stack([a, a + 1]))[0]

    assert batches(jax.grad(loss)) == [(0,), (0,)]


def test_one_body_is_given_other_indices() -> None:
    """What is known of a body's inputs in one loop says nothing of them in another."""

    @jax.jit
    def total(q: Any, rows: Any, a: Any) -> Any:
        return jax.lax.scan(lambda t, _: (t + q[rows, a].sum(), None), 0.0, None, length=2)[0]

    step = lambda q, a: total(q, jnp.arange(8), a) + total(q, a, a)  # noqa: E731
    assert sorted(batches(step)) == [(), (0,)]
