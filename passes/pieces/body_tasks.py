"""Which task of a microbatch, F, B or W, an instruction of the loop's body belongs to."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar.passes.graph.microbatched import Task
from autopar.passes.sharding.spmd_program import (
    Compute,
    Instruction,
    Relayout,
    ShardedValue,
    reads,
    writes,
)

TASKS: tuple[Task, ...] = ("F", "B", "W")


def body_tasks(
    instructions: Sequence[Instruction],
    outputs: Collection[ShardedValue],
) -> tuple[Task, ...]:
    """The task of every instruction: its equation's, or a later one that makes what it reads.

    A change of layout runs as soon as what it reads is there. It waits for the first task that
    reads its result, and so does an equation that is computed wherever it is read, unless the
    result leaves the body.

    Args:
      instructions: the loop's body, in order.
      outputs: versions that leave the body.
    """
    made_in: dict[ShardedValue, int] = {}
    earliest: list[int] = []
    for instruction in instructions:
        bounds = [made_in.get(v, 0) for v in reads(instruction)]
        if not isinstance(instruction, Relayout):
            assert instruction.task is not None
            bounds.append(TASKS.index(instruction.task))
        earliest.append(max(bounds, default=0))
        made_in.update(dict.fromkeys(writes(instruction), earliest[-1]))
    read_in: dict[ShardedValue, int] = {}
    chosen: list[Task] = []
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
