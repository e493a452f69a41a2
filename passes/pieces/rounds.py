"""What is around a stage's loop, in rounds between which values arrive from other stages.

What is before the loop or after it may need values of other stages that need this stage's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from autopar.passes.pieces.opened import OpenStage
from autopar.passes.sharding.spmd_program import Instruction, ShardedValue, reads, writes
from autopar.passes.slicing.stage_graphs import StageLink

Level: TypeAlias = tuple[int, int]  # before (0) or after (1) the loop, and the round there
Levels: TypeAlias = Mapping[ShardedValue, Level]
Rounds: TypeAlias = Mapping[Level, Sequence[Instruction]]
FIRST: Level = (0, 0)
AFTER_LOOP: Level = (1, 0)
_BEFORE: Level = (-1, 0)


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
    """The instructions around the loop, by round."""
    rounds: dict[Level, list[Instruction]] = defaultdict(list)
    for instruction, level in _in_rounds(stage, levels):
        rounds[level].append(instruction)
    return dict(rounds)


def _in_rounds(stage: OpenStage, levels: Levels) -> Iterator[tuple[Instruction, Level]]:
    """Every outer instruction, with the first round in which all that it reads is there."""
    for phase, part in enumerate((stage.before, stage.after)):
        for x in part:
            yield x, max([(phase, 0), *(levels.get(v, FIRST) for v in reads(x))])
