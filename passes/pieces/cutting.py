"""From lowered stages to pieces: the functions that a schedule's tasks run.

Every stage is planned and lowered as one program with its loop over the microbatches
(`passes/sharding`). Here that program is taken apart again: the loop's body into F, B and W, what
is around it into rounds between which values of other stages arrive. What pieces pass to each
other, and what crosses between stages, becomes numbered values (`passes/pipeline`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.passes.graph.graph import Input, Output
from autopar.passes.pieces.pieces import Numbers, Pieces, Port, StagePiece
from autopar.passes.pieces.stage_cutter import BEFORE, FIRST, Levels, StageCutter
from autopar.passes.pipeline.instructions import Transfer
from autopar.passes.sharding.peak_memory import version_bytes
from autopar.passes.sharding.spmd_program import Program, Version, reads, writes
from autopar.passes.slicing.stage_graphs import Link, StageGraph, Stages


def cut(
    stages: Stages,
    programs: Sequence[Program],
    flexible: Sequence[frozenset[int]],
    remat: Sequence[bool] | None = None,
) -> Pieces:
    """Take the lowered stages apart.

    Args:
      stages: what the programs were lowered from.
      programs: one for each stage.
      flexible: for each stage, the ids of the equations that are computed wherever they are read.
      remat: for each stage, whether its backward pass computes the forward pass again from what
        the stage receives, instead of keeping what that leaves. None: no stage does.
    """
    again = remat or (False,) * len(programs)
    cutters = [
        StageCutter(number, stage, program, flexible[number], remat=again[number])
        for number, (stage, program) in enumerate(zip(stages.graphs, programs, strict=True))
    ]
    numbers = Numbers()
    for link in stages.links:
        sender, receiver = cutters[link.source], cutters[link.target]
        receiver.receive(link, sender.send(link))
    levels = find_levels(cutters, stages.links)
    for cutter, found in zip(cutters, levels, strict=True):
        cutter.finish(found, numbers)
    transfers = tuple(
        Transfer(cutters[x.source].sent(x, numbers), cutters[x.target].received[x.target_input])
        for x in stages.links
    )
    inputs: dict[int, list[int]] = defaultdict(list)
    outputs: dict[int, int] = {}
    for cutter in cutters:
        for number, leaf in zip(cutter.input_values, cutter.stage.inputs, strict=True):
            if leaf is not None:
                inputs[leaf].append(number)
        for made, leaf in zip(cutter.output_values, cutter.stage.outputs, strict=True):
            if leaf is not None and made is not None:
                outputs.setdefault(leaf, made)
    return Pieces(
        programs=tuple(programs),
        values=tuple(numbers.values),
        versions=dict(numbers.versions),
        pieces=tuple(piece for cutter in cutters for piece in cutter.pieces),
        transfers=transfers,
        inputs=tuple(tuple(inputs[i]) for i in range(max(inputs, default=-1) + 1)),
        outputs=tuple(outputs[i] for i in range(len(outputs))),
    )


def uncut(stage: StageGraph, program: Program) -> Pieces:
    """A whole step on one mesh as one piece."""
    numbers, graph = Numbers(), stage.graph

    def ports(versions: Sequence[Version], labels: Sequence[Input | Output]) -> tuple[Port, ...]:
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


def residual_bytes(stage: StageGraph, program: Program, flexible: frozenset[int]) -> int:
    """Bytes per device that one microbatch in flight holds: what F leaves or got, and B reads."""
    cutter = StageCutter(0, stage, program, flexible)
    cutter.cut_body()
    if cutter.loop is None:
        return 0
    num_consts, num_carry = cutter.counts()
    by_task, maker = cutter.tasks()
    maker.update(dict.fromkeys(cutter.loop.body.inputs[num_consts + num_carry :], 0))
    kept: set[Version] = set()
    for task, group in by_task.items():
        local = {v for x in group for v in writes(x)}
        kept |= {v for x in group for v in reads(x) if task and maker.get(v) == 0} - local
    return sum(version_bytes(v, program.mesh) for v in kept)


def find_levels(cutters: Sequence[StageCutter], links: Sequence[Link]) -> list[Levels]:
    """The round of the prologue (0, r) or epilogue (1, r) in which each outer version is made.

    What arrives from another stage's round r can be read in round r + 1.
    """
    levels: list[Levels] = [
        dict.fromkeys(cutter.loop.results if cutter.loop else (), (1, 0)) for cutter in cutters
    ]
    changed = True
    most = len(links) + 2
    while changed:
        changed = False
        assert all(number < most for found in levels for _, number in found.values()), (
            "stages wait for each other's values in a cycle"
        )
        for cutter, found in zip(cutters, levels, strict=True):
            for phase, part in ((0, cutter.before), (1, cutter.behind)):
                for instruction in part:
                    operands = [found.get(v, FIRST) for v in reads(instruction)]
                    level = max([(phase, 0), *operands])
                    for v in writes(instruction):
                        changed |= found.get(v, BEFORE) < level
                        found[v] = max(found.get(v, BEFORE), level)
        for link in links:
            if link.per_microbatch:
                continue
            _, sent = cutters[link.source].sends[link.source_output]
            _, arriving = cutters[link.target].arrives[link.target_input]
            phase, number = levels[link.source].get(sent, FIRST)
            level = (phase, number + 1)
            known = levels[link.target].get(arriving, BEFORE)
            changed |= known < level
            levels[link.target][arriving] = max(known, level)
    return levels
