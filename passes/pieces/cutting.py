"""From lowered stages to pieces: the functions that a schedule's tasks run.

Every stage is planned and lowered as one program with its loop over the microbatches
(`passes/sharding`). Here that program is taken apart again: the loop's body into F, B and W, what
is around it into rounds between which values of other stages arrive. What pieces pass to each
other, and what crosses between stages, becomes numbered values (`passes/pipeline`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from autopar.passes.graph.graph import Input, Output
from autopar.passes.pieces.numbering import Numbered, number_values
from autopar.passes.pieces.opened import open_stage, pruned, with_received, with_sent
from autopar.passes.pieces.pieces import Numbers, Pieces, Port, StagePiece
from autopar.passes.pieces.rounds import find_levels, outer_rounds
from autopar.passes.pieces.stage_pieces import body_by_task, stage_pieces
from autopar.passes.pipeline.instructions import ValueTransfer
from autopar.passes.sharding.spmd_program import ShardedValue, SpmdProgram
from autopar.passes.slicing.stage_graphs import StageGraph, Stages


def cut(
    stages: Stages,
    programs: Sequence[SpmdProgram],
    remat: Sequence[bool] | None = None,
    at_once: Sequence[bool] | None = None,
) -> Pieces:
    """Take the lowered stages apart.

    Args:
      stages: what the programs were lowered from.
      programs: one for each stage.
      remat: for each stage, whether its backward pass computes the forward pass again from what
        the stage receives, instead of keeping what that leaves. None: no stage does.
      at_once: for each stage, whether it runs a microbatch forward and backward without a break.
    """
    opened = [
        open_stage(number, graph, program)
        for number, (graph, program) in enumerate(zip(stages.graphs, programs, strict=True))
    ]
    for link in stages.links:
        often = link.per_microbatch
        opened[link.source], layout = with_sent(
            opened[link.source], link.source_output, per_microbatch=often
        )
        opened[link.target] = with_received(
            opened[link.target], link.target_input, layout, per_microbatch=often
        )
    opened = [pruned(stage) for stage in opened]
    numbered, pieces = list[Numbered](), list[StagePiece]()
    numbers = Numbers()
    values = numbers.values
    for stage, levels in zip(opened, find_levels(opened, stages.links), strict=True):
        rounds = outer_rounds(stage, levels)
        tasks = body_by_task(
            stage,
            remat=remat is not None and remat[stage.number],
            at_once=at_once is not None and at_once[stage.number],
        )
        numbered.append(number_values(stage, rounds, tasks, numbers))
        pieces += stage_pieces(stage, rounds, tasks, numbered[-1])
    transfers = []
    for link in stages.links:
        source = numbered[link.source].sent[link.source_output]
        transfers.append(ValueTransfer(source, numbered[link.target].inputs[link.target_input]))
        if not values[source].label:
            values[source] = replace(values[source], label=link.label)
    inputs, outputs = defaultdict[int, list[int]](list), dict[int, int]()
    for graph, of_stage in zip(stages.graphs, numbered, strict=True):
        for number, leaf in zip(of_stage.inputs, graph.inputs, strict=True):
            if leaf is not None:
                inputs[leaf].append(number)
        for made, leaf in zip(of_stage.outputs, graph.outputs, strict=True):
            if leaf is not None and made is not None:
                outputs.setdefault(leaf, made)
    return Pieces(
        programs=tuple(programs),
        values=tuple(values),
        versions=dict(numbers.versions),
        pieces=tuple(pieces),
        transfers=tuple(transfers),
        inputs=tuple(tuple(inputs[i]) for i in range(max(inputs, default=-1) + 1)),
        outputs=tuple(outputs[i] for i in range(len(outputs))),
    )


def uncut(stage: StageGraph, program: SpmdProgram) -> Pieces:
    """A whole step on one mesh as one piece."""
    numbers, graph = Numbers(), stage.graph

    def ports(
        versions: Sequence[ShardedValue], labels: Sequence[Input | Output]
    ) -> tuple[Port, ...]:
        return tuple(
            Port(numbers.new(0, version, program.mesh, False, label.path), version)
            for version, label in zip(versions, labels, strict=True)
        )

    inputs = ports(program.block.inputs, graph.inputs)
    outputs = ports(program.block.outputs, graph.outputs)
    donates = [p.value for p, label in zip(inputs, graph.inputs, strict=True) if label.donated]
    instructions = program.block.instructions
    piece = StagePiece("step", 0, "prologue", inputs, outputs, instructions, tuple(donates))
    return Pieces(
        programs=(program,),
        values=tuple(numbers.values),
        versions=dict(numbers.versions),
        pieces=(piece,),
        transfers=(),
        inputs=tuple((port.value,) for port in inputs),
        outputs=tuple(port.value for port in outputs),
    )
