"""What a block's instructions read and write, and which of them something depends on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.passes.sharding.layout import Layout
from autopar.passes.sharding.reshard import reshard_steps
from autopar.passes.sharding.spmd_program import (
    Instruction,
    Reshard,
    Version,
    is_literal,
    reads,
    writes,
)


def has_effect(instruction: Instruction) -> bool:
    """Whether it does more than make its results."""
    return not isinstance(instruction, Reshard) and bool(instruction.eqn.effects)


def needed(instructions: Sequence[Instruction], wanted: Iterable[Version]) -> list[Instruction]:
    """The instructions that the wanted versions, or an effect, depend on."""
    live = {v for v in wanted if not is_literal(v)}
    kept = []
    for instruction in reversed(instructions):
        if has_effect(instruction) or any(v in live for v in writes(instruction)):
            kept.append(instruction)
            live.update(reads(instruction))
    return kept[::-1]


def unstacked(layout: Layout) -> Layout:
    """The layout of one microbatch; a stack that the plan cuts along itself never exists."""
    return Layout(layout.dims[1:], layout.partial)


def entered(
    instructions: Sequence[Instruction],
    arriving: Version,
    planned: Version,
    mesh: tuple[int, ...],
    purpose: str,
) -> list[Instruction]:
    """A value arrives in another layout than planned, which then is the one that has to be made."""
    steps = reshard_steps(arriving.layout, planned.layout, mesh)
    rest = [x for x in instructions if arriving not in writes(x)]
    return [Reshard(arriving, planned, steps, purpose, ""), *rest]


def without_effects(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Those that may be run twice."""
    return [x for x in instructions if not has_effect(x)]


def ordered(instructions: Sequence[Instruction], inputs: Sequence[Version]) -> list[Instruction]:
    """In an order in which everything is written before it is read."""
    known = set(inputs)
    made = {v for x in instructions for v in writes(x)}
    waiting, result = list(instructions), []
    while waiting:
        left = []
        for instruction in waiting:
            if all(v in known or v not in made for v in reads(instruction)):
                result.append(instruction)
                known.update(writes(instruction))
            else:
                left.append(instruction)
        assert len(left) < len(waiting), "instructions wait for each other"
        waiting = left
    return result
