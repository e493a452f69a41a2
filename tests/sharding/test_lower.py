"""Lowering: every assignment of strategies is a program that computes the step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core as jex_core

from autopar.base.costs import collective_seconds
from autopar.base.errors import AutoparError, UnknownPrimitiveWarning
from autopar.passes import microbatch
from autopar.passes.graph.graph import Graph, check
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding.build import Built
from autopar.passes.sharding.collectives import collectives
from autopar.runtime.local import load
from sharding.algebra import check_program
from sharding.steps import (
    CLUSTER,
    Passes,
    arrays,
    compiled,
    graph_of,
    linear_shapes,
    linear_step,
    momentum_shapes,
    momentum_step,
    recurrent_shapes,
    recurrent_step,
    shaped,
)

MESH = (4, 2)
STEPS = {
    "momentum": (momentum_step, momentum_shapes()),
    "recurrent": (recurrent_step, recurrent_shapes()),
}


def split(graph: Graph, count: int) -> Graph:
    if count == 1:
        return graph
    return microbatch.split(graph, microbatch.analyze(graph, populate(graph.jaxpr), count))


@functools.cache
def prepared(name: str, count: int) -> tuple[Passes, Built]:
    step, shapes = STEPS[name]
    graph = split(graph_of(step, *shapes), count)
    check(graph)
    passes = Passes(graph, MESH)
    return passes, passes.build()


def ilp_seconds(built: Built, assignment: Any) -> float:
    """What the integer program says that an assignment costs."""
    nodes = sum(node.seconds[s] for node, s in zip(built.nodes, assignment, strict=True))
    edges = sum(cost[assignment[u], assignment[v]] for (u, v), cost in built.edges.items())
    return float(nodes + edges)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", STEPS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_assignment_is_a_program(name: str, count: int, seed: int) -> None:
    passes, built = prepared(name, count)
    random = np.random.default_rng(seed)
    assignment = [int(random.integers(node.num_strategies)) for node in built.nodes]
    program = passes.lower(built, assignment)
    check_program(program)
    assert str(program) == str(passes.lower(built, assignment))
    if name == "momentum":  # sums of scalars, which no node decides, are not priced
        communication = sum(
            c.times
            * collective_seconds(
                c.kind, c.bytes, CLUSTER, MESH, [passes.names.index(a) for a in c.axes]
            )
            for c in collectives(program)
        )
        assert communication <= ilp_seconds(built, assignment) * (1 + 1e-9)


@pytest.mark.parametrize(("name", "count"), [("momentum", 2), ("recurrent", 1), ("recurrent", 2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_assignments_compute_the_step(name: str, count: int, seed: int) -> None:
    passes, built = prepared(name, count)
    random = np.random.default_rng(seed)
    assignment = [int(random.integers(node.num_strategies)) for node in built.nodes]
    made = compiled(graph_of(linear_step, *linear_shapes()), method="data", microbatches=1)
    local: Any = load(dataclasses.replace(made, runs=passes.lower(built, assignment)))
    step, shapes = STEPS[name]
    values = jax.tree.leaves(arrays(shapes))
    plain = jax.jit(jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(graph_of(step, *shapes).jaxpr, ())))(
        *values
    )
    found = jax.jit(
        local.local_fn, in_shardings=local.in_shardings, out_shardings=list(local.out_shardings)
    )(*values)
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * np.abs(b).max())


def test_a_version_is_made_once_and_read_again() -> None:
    def step(weights: Any, x: Any) -> Any:
        return weights - x.T @ jax.numpy.tanh(x @ weights) - x.T @ jax.numpy.exp(x @ weights)

    graph = graph_of(step, shaped(8, 8), shaped(16, 8))
    program = compiled(graph, method="zero3", microbatches=1).program
    assert str(program).count("all-gather") == 1  # two products read the gathered weights


def test_partial_scalars_are_completed_where_they_stop_being_linear() -> None:
    def step(weights: Any, x: Any) -> Any:
        total = (x @ weights).sum()
        halved = total / 2 + 1 * total  # linear: still a sum over the devices
        return weights * 2, jax.numpy.log(halved), halved

    graph = graph_of(step, shaped(8, 8), shaped(16, 8), batch_argnums=(1,))
    program = compiled(graph, method="data", microbatches=1).program
    check_program(program)
    scalars = [line for line in str(program).splitlines() if ":float32[][]" in line.split(" = ")[0]]
    operations = [line.split(" = ")[1].split()[0] for line in scalars if " = " in line]
    assert operations == ["reduce_sum", "div", "mul", "add", "all-reduce(x)", "log"]


def test_an_effect_happens_on_one_device() -> None:
    def step(weights: Any, x: Any) -> Any:
        jax.debug.print("sum {}", x.sum())
        return weights - x.T @ (x @ weights)

    graph = graph_of(step, shaped(8, 8), shaped(16, 8))
    program = compiled(graph, method="data", microbatches=1).program
    check_program(program)
    assert sum(line.endswith(" on one device") for line in str(program).splitlines()) == 1


def test_an_effect_whose_result_is_used_is_refused() -> None:
    def step(weights: Any, x: Any) -> Any:
        known = jax.experimental.io_callback(lambda: np.float32(1), shaped(8))
        return weights - x.T @ (x @ weights) * known

    graph = graph_of(step, shaped(8, 8), shaped(16, 8))
    refused = pytest.raises(AutoparError, match="side effect")
    with pytest.warns(UnknownPrimitiveWarning, match="io_callback"), refused as caught:
        compiled(graph, method="data", microbatches=1)
    assert "test_lower.py" in str(caught.value)
