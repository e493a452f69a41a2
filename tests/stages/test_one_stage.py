"""A plan for one mesh is a pipeline of one stage, whose one piece is the whole step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from sharding.steps import CLUSTER, arrays, graph_of, momentum_shapes, momentum_step, shaped

from autopar.base.options import Options
from autopar.passes.graph.graph import Graph
from autopar.passes.pipeline.instructions import Run
from autopar.passes.pipeline.verify import verify
from autopar.passes.planner.compiler import Compiled, compile_graph
from autopar.passes.schedules.schedule import ONE_STAGE
from autopar.passes.slicing.stage_graphs import LeafRows
from autopar.runtime.local import LocalProgram


def plan(graph: Graph, count: int, made: Compiled | None = None) -> Compiled:
    """On a mesh of 4 x 2, or following another plan."""
    options = Options(method="shard", microbatches=count, logical_mesh=(4, 2))
    return compile_graph(graph, options, CLUSTER, None if made is None else made.plan)


@pytest.mark.parametrize("count", [1, 2])
def test_one_piece_is_the_whole_program(count: int) -> None:
    graph = graph_of(momentum_step, *momentum_shapes())
    made = plan(graph, count)
    assert not made.plan.is_pipeline and made.plan.pipeline.num_meshes == 1
    runnable = made.runnable
    (piece,), (program,) = runnable.pieces.pieces, runnable.pieces.programs
    assert (piece.name, piece.stage, piece.block) == ("step", 0, program.block)
    assert runnable.pieces.transfers == ()
    assert runnable.pieces.inputs == tuple((port.value,) for port in piece.inputs)
    assert runnable.pieces.outputs == tuple(port.value for port in piece.outputs)
    donated = [
        port.value for port, label in zip(piece.inputs, graph.inputs, strict=True) if label.donated
    ]
    assert piece.donates == tuple(donated) and donated
    verify(runnable.program)
    assert runnable.program.schedule == ONE_STAGE
    ((run,),) = runnable.program.meshes
    assert isinstance(run, Run) and run.piece == "step"
    assert runnable.leaves == tuple((LeafRows(i),) for i in range(len(graph.inputs)))
    assert runnable.results == tuple((LeafRows(i),) for i in range(len(graph.outputs)))


@pytest.mark.parametrize("count", [1, 2])
def test_a_followed_plan_is_the_same_piece(count: int) -> None:
    graph = graph_of(momentum_step, *momentum_shapes())
    made = plan(graph, count)
    again = plan(graph, count, made)
    for one, other in zip(_texts(made), _texts(again), strict=True):
        assert one == other


def _texts(made: Compiled) -> list[str]:
    (program,) = made.runnable.pieces.programs
    return [str(program), str(made.runnable.program), str(made.runnable.pieces)]


def test_the_estimate_is_the_simulated_step() -> None:
    """Of all candidates that were weighed; the chosen one is the quickest."""
    graph = graph_of(momentum_step, *momentum_shapes())
    made = compile_graph(graph, Options(method="shard", microbatches=1), CLUSTER)
    seconds = [candidate.step_seconds or 0.0 for candidate in made.plan.candidates]
    assert made.plan.estimates.step_seconds == min(seconds) > 0
    assert made.plan.simulate().step_seconds == pytest.approx(min(seconds))
    assert [c.chosen for c in made.plan.candidates].count(True) == 1


def kept_and_shared(state: Any, batch: Any) -> Any:
    """A leaf comes back as it is, one result is there twice, and one is a constant."""
    weights, kept = state
    new = weights - batch.T @ (batch @ weights)
    return (new, kept), new, np.float32(3)


@pytest.mark.parametrize("donate", [(), (0,)])
def test_it_runs_at_one_go_and_as_a_list_of_instructions(donate: tuple[int, ...]) -> None:
    shapes = ((shaped(8, 8), shaped(8)), shaped(16, 8))
    graph = graph_of(kept_and_shared, *shapes, donate_argnums=donate)
    made = plan(graph, 2)
    local = LocalProgram(made.runnable)
    assert {mesh.shape_tuple for mesh in local.meshes} == {(("x", 4), ("y", 2))}
    donated = [i for i, leaf in enumerate(graph.inputs) if leaf.donated]
    kept = [i for i, leaf in enumerate(graph.inputs) if not leaf.donated]
    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in graph.jaxpr.invars]
    whole: Any = local.compile("kept_and_shared", donated, kept, types, [])
    steps: Any = local.instructions_of(whole, donated, kept, types, [])
    values = arrays(shapes)
    expected = jax.tree.leaves(kept_and_shared(*values))

    for run in (whole, steps):
        placed = [
            jax.device_put(value, sharding)
            for value, sharding in zip(jax.tree.leaves(values), local.in_shardings, strict=True)
        ]
        found = run([placed[i] for i in donated], [placed[i] for i in kept], [])
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)
        assert [leaf.is_deleted() for leaf in placed] == [i in donated for i in range(len(placed))]
