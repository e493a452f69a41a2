"""Lowering: every assignment of strategies is a program that computes the step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core as jex_core

from autopar.base.costs import collective_seconds
from autopar.base.errors import AutoparError, UnknownPrimitiveWarning
from autopar.passes import microbatch
from autopar.passes.graph.graph import Graph, check
from autopar.passes.graph.microbatched import Microbatched, in_phases
from autopar.passes.graph.tested_loops import with_tests_in_bodies
from autopar.passes.pieces.cutting import uncut
from autopar.passes.pieces.pieces import Runnable
from autopar.passes.planner.candidates import parts_of
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.primitives.populate import populate
from autopar.passes.schedules.schedule import ONE_STAGE
from autopar.passes.sharding.collectives import collectives
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.slicing.slice_stages import one_stage
from autopar.runtime.local import LocalProgram
from sharding.algebra import check_program
from sharding.steps import (
    CLUSTER,
    Passes,
    arrays,
    compiled,
    graph_of,
    momentum_shapes,
    momentum_step,
    recurrent_shapes,
    recurrent_step,
    shaped,
    sharded,
)

MESH = (4, 2)


def settling_step(weights: Any, batch: Any) -> Any:
    """Each row is iterated until it is small, then the last layer learns from it."""

    def row(x: Any) -> Any:
        def goes_on(carry: Any) -> Any:
            return (carry[1] < 6) & (jnp.max(jnp.abs(carry[0])) > 0.4)

        def body(carry: Any) -> Any:
            return jnp.tanh(carry[0] @ weights["fixed"]), carry[1] + 1

        return jax.lax.while_loop(goes_on, body, (x, 0))

    found, trips = jax.lax.stop_gradient(jax.vmap(row)(batch))
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((found @ w - batch) ** 2))(
        weights["head"]
    )
    return {**weights, "head": weights["head"] - 0.1 * gradient}, (loss, trips)


def settling_shapes() -> Any:
    return {"fixed": shaped(16, 16), "head": shaped(16, 16)}, shaped(32, 16)


STEPS = {
    "momentum": (momentum_step, momentum_shapes()),
    "recurrent": (recurrent_step, recurrent_shapes()),
    "settling": (settling_step, settling_shapes()),
}


def split(graph: Graph, count: int) -> Microbatched:
    if count == 1:
        return with_tests_in_bodies(in_phases(graph))
    analysis = microbatch.analyze(graph, populate(graph.jaxpr), count)
    return with_tests_in_bodies(microbatch.split(graph, analysis))


@functools.cache
def prepared(name: str, count: int) -> tuple[SplitStep, Passes, StrategyGraph]:
    function, shapes = STEPS[name]
    step = split(graph_of(function, *shapes), count)
    check(step.graph)
    passes = Passes(step.graph, MESH)
    return SplitStep(step, passes.rules), passes, passes.build()


def ilp_seconds(built: StrategyGraph, assignment: Any) -> float:
    """What the integer program says that an assignment costs."""
    nodes = sum(node.seconds[s] for node, s in zip(built.nodes, assignment, strict=True))
    edges = sum(cost[assignment[u], assignment[v]] for (u, v), cost in built.edges.items())
    return float(nodes + edges)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", STEPS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_assignment_is_a_program(name: str, count: int, seed: int) -> None:
    _, passes, built = prepared(name, count)
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


@pytest.mark.parametrize(
    ("name", "count"),
    [("momentum", 2), ("recurrent", 1), ("recurrent", 2), ("settling", 1), ("settling", 2)],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_assignments_compute_the_step(name: str, count: int, seed: int) -> None:
    split_step, passes, built = prepared(name, count)
    random = np.random.default_rng(seed)
    assignment = [int(random.integers(node.num_strategies)) for node in built.nodes]
    stages = one_stage(split_step.step, split_step.rules)
    pieces = uncut(stages.graphs[0], passes.lower(built, assignment))
    parts = parts_of(pieces, split_step)
    local = LocalProgram(Runnable(pieces, parts, ONE_STAGE, stages.leaves, stages.results))
    (piece,) = pieces.pieces
    made = local.function_of(piece)
    step, shapes = STEPS[name]
    values = jax.tree.leaves(arrays(shapes))
    plain = jax.jit(jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(graph_of(step, *shapes).jaxpr, ())))(
        *values
    )
    run = jax.jit(
        made.call, in_shardings=tuple(made.in_shardings), out_shardings=made.out_shardings
    )
    found = run(*values)
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * np.abs(b).max())


def test_a_version_is_made_once_and_read_again() -> None:
    def step(weights: Any, x: Any) -> Any:
        return weights - x.T @ jax.numpy.tanh(x @ weights) - x.T @ jax.numpy.exp(x @ weights)

    graph = graph_of(step, shaped(8, 8), shaped(16, 8))
    program = sharded(compiled(graph, method="zero3", microbatches=1))
    assert str(program).count("all-gather") == 1  # two products read the gathered weights


def test_partial_scalars_are_completed_where_they_stop_being_linear() -> None:
    def step(weights: Any, x: Any) -> Any:
        total = (x @ weights).sum()
        halved = total / 2 + 1 * total  # linear: still a sum over the devices
        return weights * 2, jax.numpy.log(halved), halved

    graph = graph_of(step, shaped(8, 8), shaped(16, 8), batch_argnums=(1,))
    program = sharded(compiled(graph, method="data", microbatches=1))
    check_program(program)
    scalars = [line for line in str(program).splitlines() if ":float32[][]" in line.split(" = ")[0]]
    operations = [line.split(" = ")[1].split()[0] for line in scalars if " = " in line]
    assert operations == ["reduce_sum", "div", "mul", "add", "all-reduce(x)", "log"]


def test_an_effect_happens_on_one_device() -> None:
    def step(weights: Any, x: Any) -> Any:
        jax.debug.print("sum {}", x.sum())
        return weights - x.T @ (x @ weights)

    graph = graph_of(step, shaped(8, 8), shaped(16, 8))
    program = sharded(compiled(graph, method="data", microbatches=1))
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
