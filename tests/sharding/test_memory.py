"""Peaks of memory, counted by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autopar.passes.planner.compiler import Compiled
from autopar.passes.sharding.peak_memory import MemoryPeak, peak
from sharding.steps import compiled, graph_of, linear_shapes, linear_step, shaped, sharded

STEP_VALUE = "(a value of the step)"


def peak_of(made: Compiled) -> MemoryPeak:
    labels = made.graph.inputs
    names = {v: x.path for v, x in zip(made.graph.jaxpr.invars, labels, strict=True)}
    found = peak(sharded(made), names, [label.donated for label in labels])
    assert found.bytes == made.plan.estimates.peak_bytes_per_device
    assert sum(size for _, size in found.alive) == found.bytes
    return found


def test_data_parallelism() -> None:
    made = compiled(graph_of(linear_step, *linear_shapes()), method="data", microbatches=1)
    # At the transposition of the gradient: weights, sum, gradient and its transpose are whole
    # (8 x 8 floats), two rows of 8 floats of each part of the batch are kept for the caller.
    assert peak_of(made) == MemoryPeak(
        4 * 256 + 2 * 64,
        (
            (f"float32[8,8] {STEP_VALUE}", 256),
            (f"float32[8,8] {STEP_VALUE}", 256),
            ("state[0]", 256),
            ("state[1]", 256),
            ("batch[0]", 64),
            ("batch[1]", 64),
        ),
    )


def test_zero3() -> None:
    made = compiled(graph_of(linear_step, *linear_shapes()), method="zero3", microbatches=1)
    # At the forward product: gathered weights, a slice of one row of weights and sum, two rows of
    # the batch's parts and of the product.
    assert peak_of(made) == MemoryPeak(
        256 + 2 * 32 + 3 * 64,
        (
            ("state[0]", 256),
            ("batch[0]", 64),
            ("batch[1]", 64),
            (f"float32[16,8] {STEP_VALUE}", 64),
            ("state[0]", 32),
            ("state[1]", 32),
        ),
    )


def test_elementwise_chains_take_no_memory() -> None:
    def step(weights: Any, x: Any) -> Any:
        for _ in range(4):
            x = jnp.tanh(x) * 2
        return weights - x.sum()

    graph = graph_of(step, shaped(8), shaped(64, 8), batch_argnums=(1,), donate_argnums=())
    # The batch's eight rows, the weights, which the caller keeps, their new values and the sum.
    assert peak_of(compiled(graph, method="data", microbatches=1)).bytes == 256 + 2 * 32 + 4


def test_what_the_caller_keeps_is_alive_to_the_end() -> None:
    def step(weights: Any, x: Any) -> Any:
        return jnp.sort(jnp.sort(weights)) + x.sum()

    def needed(**options: Any) -> int:
        graph = graph_of(step, shaped(64, 64), shaped(8, 64), batch_argnums=(1,), **options)
        return peak_of(compiled(graph, method="data", microbatches=1)).bytes

    # One sort after the other: two of three matrices at a time where the weights are donated,
    # beside a row of the batch; what is added to the last one is added in place.
    assert needed(donate_argnums=(0,)) == 2 * 64 * 64 * 4 + 64 * 4
    assert needed(donate_argnums=()) == 3 * 64 * 64 * 4 + 64 * 4


def test_a_loop_needs_its_body_beside_its_operands() -> None:
    def step(weights: Any, x: Any) -> Any:
        def body(hidden: Any, _: None) -> Any:
            return jnp.tanh(hidden @ weights), None

        hidden, _ = jax.lax.scan(body, x, None, length=3)
        return weights - x.T @ hidden

    graph = graph_of(step, shaped(8, 8), shaped(64, 8))
    found = peak_of(compiled(graph, method="data", microbatches=1))
    # Weights, the device's rows of the batch, the loop's result; inside, a product, over which its
    # tanh is written.
    assert found.bytes == 256 + 256 + 256 + 256


def peak_bytes(step: Any, *shapes: Any) -> int:
    graph = graph_of(step, *shapes, batch_argnums=(1,))
    return peak_of(compiled(graph, method="data", microbatches=1)).bytes


def test_what_is_read_far_away_is_computed_again_where_that_is_quicker() -> None:
    def needed(function: Any) -> int:
        def step(weights: Any, x: Any) -> Any:
            first = jnp.sort(x)
            cheap, y = function(first), jnp.sort(first)
            near = jnp.sort(y + cheap)
            for _ in range(40):
                near = jnp.sort(near)
            return weights + jnp.sum(near * cheap * first, axis=0)

        return peak_bytes(step, shaped(64, 64), shaped(64, 64, 64))

    value = 8 * 64 * 64 * 4
    as_it_is = needed(lambda x: x)
    assert needed(lambda x: x * x + 1.0) == as_it_is
    assert needed(jnp.exp) == as_it_is
    assert needed(jax.lax.erf) == as_it_is + value, "dearer than a write and a read"


def test_a_scatter_writes_into_what_it_changes() -> None:
    def needed(again: bool) -> int:
        def step(weights: Any, x: Any) -> Any:
            table = jnp.sort(weights)
            found = jnp.sort(table.at[2].add(1.0).sum(0)) + x.sum()
            return weights.at[0].set(found + table[1] if again else found)

        return peak_bytes(step, shaped(64, 64), shaped(8, 64))

    # The weights, which are changed in place, and the table, once or as it was and is.
    matrix = 64 * 64 * 4
    assert 2 * matrix <= needed(again=False) < 2.2 * matrix
    assert 3 * matrix <= needed(again=True) < 3.2 * matrix
