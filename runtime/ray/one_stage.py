"""A plan of one stage as a pipeline of one: its whole program is one piece."""

from __future__ import annotations

from autopar.passes.graph.graph import Graph
from autopar.passes.pieces.pieces import Numbers, Pieces, Port, StagePiece
from autopar.passes.pipeline.emit import emit
from autopar.passes.planner.pipeline_candidates import Runnable
from autopar.passes.schedules.schedule import Schedule
from autopar.passes.sharding.spmd_program import Program
from autopar.passes.slicing.stage_graphs import LeafRows


def one_stage(program: Program, graph: Graph) -> Runnable:
    """What one mesh runs.

    Args:
      program: the sharded program.
      graph: the graph that it was lowered from; its first inputs are those of the step.
    """
    numbers, block = Numbers(), program.block
    labels = [label.path for label in graph.inputs]
    inputs = [
        numbers.new(0, version, program.mesh, False, label)
        for version, label in zip(block.inputs, labels, strict=True)
    ]
    outputs = [
        numbers.new(0, version, program.mesh, False, label.path)
        for version, label in zip(block.outputs, graph.outputs, strict=True)
    ]
    donated = [n for n, label in zip(inputs, graph.inputs, strict=True) if label.donated]
    piece = StagePiece(
        name="step",
        stage=0,
        kind="prologue",
        inputs=tuple(map(Port, inputs, block.inputs)),
        outputs=tuple(map(Port, outputs, block.outputs)),
        instructions=block.instructions,
        donates=tuple(donated),
    )
    pieces = Pieces(
        programs=(program,),
        values=tuple(numbers.values),
        versions=dict(numbers.versions),
        pieces=(piece,),
        transfers=(),
        inputs=tuple((number,) for number in inputs),
        outputs=tuple(outputs),
    )
    listed = emit(
        Schedule("one stage", 1, 1, (0,), ((),)),
        pieces.values,
        [piece.plain()],
        [],
        inputs=inputs,
        outputs=outputs,
        donated=donated,
    )
    return Runnable(
        pieces,
        listed,
        tuple((LeafRows(i),) for i in range(len(inputs))),
        tuple((LeafRows(i),) for i in range(len(outputs))),
    )
