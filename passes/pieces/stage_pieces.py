"""The pieces of a stage: one for each round around its loop, and one for each task of the body."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autopar.passes.graph.microbatched import Task
from autopar.passes.pieces.numbering import Numbered, Tasks
from autopar.passes.pieces.opened import OpenStage
from autopar.passes.pieces.pieces import Port, StagePiece
from autopar.passes.pieces.residuals import before_readers, computed_again
from autopar.passes.pieces.rounds import AFTER_LOOP, Level, Rounds
from autopar.passes.pieces.taking_over import in_pairs, taken_over
from autopar.passes.pieces.wiring import has_effect, made_by, needed, read_by
from autopar.passes.pipeline.instructions import PieceKind
from autopar.passes.sharding.spmd_program import (
    Compute,
    Instruction,
    Relayout,
    ShardedValue,
    is_literal,
    local_bytes,
    reads,
    writes,
)
from autopar.passes.slicing.cheapest_cut import prices_on

TASKS: tuple[Task, ...] = ("F", "B", "W")
_KINDS: tuple[PieceKind, PieceKind] = ("prologue", "epilogue")


def body_tasks(
    instructions: Sequence[Instruction], outputs: Collection[ShardedValue]
) -> tuple[Task, ...]:
    """The task of every instruction: its equation's, or a later one that makes what it reads.

    A change of layout runs as soon as what it reads is there. It waits for the first task that
    reads its result, and so does an equation that is computed wherever it is read, unless the
    result leaves the body: it is in `outputs`.
    """
    made_in, earliest = dict[ShardedValue, int](), list[int]()
    for instruction in instructions:
        bounds = [made_in.get(v, 0) for v in reads(instruction)]
        if not isinstance(instruction, Relayout):
            assert instruction.task is not None
            bounds.append(TASKS.index(instruction.task))
        earliest.append(max(bounds, default=0))
        made_in.update(dict.fromkeys(writes(instruction), earliest[-1]))
    read_in, chosen = dict[ShardedValue, int](), list[Task]()
    for instruction, task in zip(reversed(instructions), reversed(earliest), strict=True):
        movable = isinstance(instruction, Relayout) or (
            isinstance(instruction, Compute) and instruction.movable and not instruction.eqn.effects
        )
        results = writes(instruction)
        readers = [read_in[v] for v in results if v in read_in]
        if movable and readers and not any(v in outputs for v in results):
            task = max(task, min(readers))
        chosen.append(TASKS[task])
        for v in reads(instruction):
            read_in[v] = min(read_in.get(v, task), task)
    return tuple(reversed(chosen))


def body_by_task(
    stage: OpenStage, *, remat: bool, at_once: bool = False
) -> dict[Task, Sequence[Instruction]]:
    """The instructions of each task that a pruned stage has, in order.

    With `remat`, the backward pass computes all of the forward pass that it reads again, from what
    the stage receives; else it does so where that costs less than keeping it. A stage that runs
    both `at_once` has one task for them: what the forward pass leaves is the compiler's, which
    keeps none of it longer than it is needed. (What a program is given stays to its end.)
    """
    tasks = body_tasks(stage.body, stage.body_outputs)
    groups: dict[Task, Sequence[Instruction]] = {
        task: [x for x, other in zip(stage.body, tasks, strict=True) if other == task]
        for task in TASKS
        if task in tasks
    }
    forward, later = groups.get("F"), [task for task in groups if task != "F"]
    if not forward or not later:
        return groups
    if at_once and not remat and "B" in groups:
        sent = {what.version for what in stage.sent.values() if what.inside}
        if sent.isdisjoint(made_by(forward)):
            del groups["F"]
            return {"B": [*forward, *groups.pop("B")], **groups}
    made, backward = made_by(forward), later[0]
    read = [set(read_by(groups[task])) for task in later]
    if remat:
        # What F sends, collects and accumulates stays F's; effects happen once.
        wanted = made.intersection(set().union(*read))
        repeated = needed([x for x in forward if not has_effect(x)], wanted)
        return groups | {backward: [*repeated, *groups[backward]]}
    again = computed_again(
        forward,
        made & read[0],
        lambda v: local_bytes(v, stage.program.mesh),
        held={
            *(inner for _, inner in stage.edge.constants),
            *set().union(*read).difference(made_by(stage.body)),
            *made.intersection(set().union(*read[1:])),
        },
        changing={
            *(inner for _, inner in stage.edge.carry),
            *(inner for _, inner in stage.edge.carry_results if not is_literal(inner)),
        },
        prices=prices_on(stage.program.rules.backend),
    )
    return groups | {backward: before_readers(again, groups[backward])}


def stage_pieces(
    stage: OpenStage, rounds: Rounds, tasks: Tasks, numbered: Numbered
) -> list[StagePiece]:
    """What a stage runs, in the order in which it first can; no piece does nothing."""
    labels = enumerate(zip(numbered.inputs, stage.graph.graph.inputs, strict=True))
    given = (x for place, x in labels if place not in stage.received)
    kept = {number for number, label in given if not label.donated}
    lasting = {numbered.inner[v] for _, v in stage.edge.constants if v in numbered.inner}

    def around(level: Level) -> StagePiece:
        kind = _KINDS[level[0]]
        name = f"{kind} {stage.number}.{level[1]}"
        group, outputs = rounds.get(level, ()), numbered.left_by_round.get(level, ())
        outer, stacked = numbered.outer, numbered.stacked
        return _piece(name, stage, kind, group, outputs, outer, stacked, kept)

    def of_body(task: Task) -> StagePiece:
        outputs = numbered.left_by_task.get(task, ())
        group = needed(tasks.get(task, ()), [port.version for port in outputs])
        return _piece(
            f"{task}{stage.number}", stage, task, group, outputs, numbered.inner, kept=lasting
        )

    levels = sorted({*rounds, *numbered.left_by_round})
    before, after = [x for x in levels if x < AFTER_LOOP], [x for x in levels if x >= AFTER_LOOP]
    pieces = (*map(around, before), *map(of_body, TASKS), *map(around, after))
    return [x for x in pieces if x.outputs or any(map(has_effect, x.instructions))]


def _piece(
    name: str,
    stage: OpenStage,
    kind: PieceKind,
    instructions: Sequence[Instruction],
    outputs: Sequence[Port],
    numbers: Mapping[ShardedValue, int],
    stacked: Collection[ShardedValue] = (),
    kept: Collection[int] = (),
) -> StagePiece:
    made = {v: time for time, x in enumerate(instructions) for v in writes(x)}
    variables = [port.version for port in outputs if not is_literal(port.version)]
    entering = dict.fromkeys([*read_by(instructions), *variables])
    inputs = tuple(Port(numbers[v], v, v in stacked) for v in entering if v not in made)
    # Compilers that schedule result by result (XLA on CPUs) do first what comes first.
    outputs = sorted(
        outputs, key=lambda o: -1 if is_literal(o.version) else made.get(o.version, -1)
    )
    pairs = taken_over(inputs, outputs, instructions, kept)
    inputs, results = in_pairs(inputs, outputs, pairs, stage.program.mesh)
    return StagePiece(
        name, stage.number, kind, inputs, results, tuple(instructions), tuple(sorted(pairs))
    )
