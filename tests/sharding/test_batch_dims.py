"""Which dimensions hold the batch, and which state leaves meet it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autopar.passes import microbatch
from autopar.passes.graph.graph import Graph, walk
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding.batch_dims import batch_dims, parameters
from sharding.steps import graph_of, momentum_shapes, momentum_step, shaped


def dims_of(graph: Graph, *names: str) -> list[tuple[str, tuple[int, ...], list[int]]]:
    """(primitive, shape, batch dimensions) of every result of the named primitives."""
    dims = batch_dims(graph, populate(graph.jaxpr))
    return [
        (eqn.primitive.name, var.aval.shape, sorted(dims.get(var, ())))
        for eqn in walk(graph.jaxpr)
        if eqn.primitive.name in names
        for var in eqn.outvars
    ]


def test_forward_backward_and_update() -> None:
    graph = graph_of(momentum_step, *momentum_shapes())
    assert dims_of(graph, "dot_general", "transpose") == [
        ("dot_general", (16, 32), [0]),
        ("dot_general", (16, 8), [0]),
        ("dot_general", (8, 32), []),  # the batch is summed
        ("transpose", (32, 8), []),
        ("dot_general", (16, 32), [0]),
        ("dot_general", (32, 8), []),
        ("transpose", (8, 32), []),
    ]
    assert dims_of(graph, "sub")[-2:] == [("sub", (8, 32), []), ("sub", (32, 8), [])]


def test_the_batch_moves_merges_and_stays_outermost() -> None:
    def step(w: Any, x: Any) -> Any:
        moved = jnp.transpose(x, (1, 0, 2))  # [4, 16, 8]
        merged = x.reshape(64, 8)  # batch outermost
        hidden = moved.reshape(64, 8)  # batch inside
        return w + (moved * 2).sum() + (merged * 3).sum() + (hidden * 4).sum()

    graph = graph_of(step, shaped(8, 8), shaped(16, 4, 8))
    assert dims_of(graph, "transpose", "reshape", "reduce_sum") == [
        ("transpose", (4, 16, 8), [1]),
        ("reshape", (64, 8), [0]),
        ("reshape", (64, 8), []),
        ("reduce_sum", (), []),
        ("reduce_sum", (), []),
        ("reduce_sum", (), []),
    ]


def test_through_scans_and_branches() -> None:
    def step(w: Any, x: Any) -> Any:
        def body(carry: Any, now: Any) -> Any:  # over time: the batch is now's first dimension
            carry = jnp.tanh(carry + now)
            return carry, carry * 2

        last, every = jax.lax.scan(body, jnp.zeros((16, 8)), jnp.moveaxis(x, 1, 0))
        chosen = jax.lax.cond(w[0, 0] > 0, lambda a: a, lambda a: a @ w, last)
        return w + chosen.T @ chosen + every.sum()

    graph = graph_of(step, shaped(8, 8), shaped(16, 4, 8))
    assert dims_of(graph, "scan", "tanh", "cond") == [
        ("scan", (16, 8), [0]),
        ("scan", (4, 16, 8), [1]),
        ("tanh", (16, 8), [0]),
        ("cond", (16, 8), [0]),
    ]


def test_after_a_split_into_microbatches() -> None:
    graph = graph_of(momentum_step, *momentum_shapes())
    rules = populate(graph.jaxpr)
    split = microbatch.split(graph, microbatch.analyze(graph, rules, 2)).graph
    assert dims_of(split, "dot_general", "scan") == [
        ("scan", (32, 8), []),
        ("scan", (8, 32), []),
        ("dot_general", (8, 32), [0]),
        ("dot_general", (8, 8), [0]),
        ("dot_general", (8, 32), []),
        ("dot_general", (8, 32), [0]),
        ("dot_general", (32, 8), []),
    ]


def test_parameters_are_what_meets_the_batch() -> None:
    def paths(graph: Graph) -> list[str]:
        dims = batch_dims(graph, populate(graph.jaxpr))
        return [graph.inputs[i].path for i in sorted(parameters(graph, dims))]

    graph = graph_of(momentum_step, *momentum_shapes())
    assert paths(graph) == ["state[0]['in']", "state[0]['out']"]
    split = microbatch.split(graph, microbatch.analyze(graph, populate(graph.jaxpr), 2)).graph
    assert paths(split) == ["state[0]['in']", "state[0]['out']"]

    def averaged(state: Any, x: Any) -> Any:
        weights, average, scale = state
        gradient = jax.grad(lambda w: jnp.sum((x @ (w * scale)) ** 2))(weights)
        weights = weights - gradient
        return weights, 0.9 * average + 0.1 * weights, scale

    state = (shaped(8, 8), shaped(8, 8), shaped(8))
    assert paths(graph_of(averaged, state, shaped(16, 8))) == ["state[0]", "state[2]"]
