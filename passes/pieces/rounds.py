"""What is around a stage's loop, in rounds between which values arrive from other stages.

What is before the loop or after it may need values of other stages that need this stage's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.pieces.opened import OpenStage
from autopar.passes.sharding.scopes import aval_shape
from autopar.passes.sharding.spmd_program import (
    Compute,
    Instruction,
    Relayout,
    ShardedValue,
    is_literal,
    reads,
    writes,
)
from autopar.passes.slicing.stage_graphs import StageLink

Level: TypeAlias = tuple[int, int]  # before (0) or after (1) the loop, and the round there
Levels: TypeAlias = Mapping[ShardedValue, Level]
Rounds: TypeAlias = Mapping[Level, Sequence[Instruction]]
FIRST: Level = (0, 0)
AFTER_LOOP: Level = (1, 0)
_BEFORE: Level = (-1, 0)
_COMPUTED_LATE = ELEMENTWISE | {"broadcast_in_dim", "reshape"}


def find_levels(stages: Sequence[OpenStage], links: Sequence[StageLink]) -> tuple[Levels, ...]:
    """For every stage, the round in which each outer version is made.

    What arrives from another stage's round r can be read in round r + 1.
    """
    levels: list[dict[ShardedValue, Level]] = [
        {outer: AFTER_LOOP for outer, _ in stage.edge.results} for stage in stages
    ]
    changed = True

    def raise_to(stage: int, version: ShardedValue, level: Level) -> None:
        nonlocal changed
        if levels[stage].get(version, _BEFORE) < level:
            levels[stage][version] = level
            changed = True

    while changed:
        changed = False
        assert all(number < len(links) + 2 for known in levels for _, number in known.values()), (
            "stages wait for each other's values in a cycle"
        )
        for stage, known in zip(stages, levels, strict=True):
            for instruction, level in _in_rounds(stage, known):
                for v in writes(instruction):
                    raise_to(stage.number, v, level)
        for link in links:
            if not link.per_microbatch:
                sent = stages[link.source].sent[link.source_output].version
                phase, number = levels[link.source].get(sent, FIRST)
                arriving = stages[link.target].received[link.target_input].version
                raise_to(link.target, arriving, (phase, number + 1))
    return tuple(levels)


def outer_rounds(stage: OpenStage, levels: Levels) -> Rounds:
    """The instructions around the loop, by round: the first in which all that they read is there.

    What is computed element by element from the stage's inputs alone (an optimizer's decayed
    moments) waits for those who read it: it would be written, to be read from memory later. And
    gradients are added over devices in a round before all others after the loop: a program's
    arguments stay to its end, so the sums take their place only if they are what it returns.
    """
    placed = list(_in_rounds(stage, levels))
    sums = set(map(id, _sums_of_results(stage)))
    if sums:
        placed = [
            (x, (1, level[1] + 1) if level[0] == 1 and id(x) not in sums else level)
            for x, level in placed
        ]
    leaving = {v for v in (*stage.outer_outputs, *_loop_operands(stage)) if not is_literal(v)}
    leaving.update(x.version for x in stage.sent.values())
    early = _from_inputs(stage, [instruction for instruction, _ in placed])
    read_at: dict[ShardedValue, Level] = {}
    rounds: dict[Level, list[Instruction]] = defaultdict(list)
    for instruction, level in reversed(placed):
        made = writes(instruction)
        readers = [read_at[v] for v in made if v in read_at]
        if early.issuperset(made) and readers and leaving.isdisjoint(made):
            later = min(readers)
            level = later if later[0] == level[0] else level
        rounds[level].append(instruction)
        for v in reads(instruction):
            read_at[v] = min(read_at.get(v, level), level)
    return {level: rounds[level][::-1] for level in sorted(rounds)}


def _sums_of_results(stage: OpenStage) -> list[Relayout]:
    """What adds up over devices that which the loop's microbatches added up, and nobody else reads.

    Unless there is nothing else to do after the loop.
    """
    summed = {outer for outer, _ in stage.edge.carry_results if outer.layout.partial}
    summed.difference_update(v for v in stage.outer_outputs if not is_literal(v))
    summed.difference_update(x.version for x in stage.sent.values())
    often = Counter(v for x in stage.after for v in reads(x))
    found = [
        x
        for x in stage.after
        if isinstance(x, Relayout) and x.source in summed and often[x.source] == 1
    ]
    return found if len(found) < len(stage.after) else []


def _from_inputs(stage: OpenStage, instructions: Sequence[Instruction]) -> set[ShardedValue]:
    """What elementwise equations make of nothing but the stage's inputs, and scalars."""
    inputs, found = {*stage.program.block.inputs}, set[ShardedValue]()
    inputs -= {x.version for x in stage.received.values()}
    for x in instructions:
        if not isinstance(x, Compute) or x.eqn.effects:
            continue
        is_late = x.eqn.primitive.name in _COMPUTED_LATE
        if is_late and all(v in inputs or v in found or not aval_shape(v.atom) for v in reads(x)):
            found.update(x.results)
    return found


def _loop_operands(stage: OpenStage) -> Iterator[ShardedValue]:
    edge = stage.edge
    for outer, _ in (*edge.constants, *edge.carry, *edge.slices):
        yield outer


def _in_rounds(stage: OpenStage, levels: Levels) -> Iterator[tuple[Instruction, Level]]:
    """Every outer instruction, with the first round in which all that it reads is there."""
    for phase, part in enumerate((stage.before, stage.after)):
        for x in part:
            yield x, max([(phase, 0), *(levels.get(v, FIRST) for v in reads(x))])
