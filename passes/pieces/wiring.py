"""What lists of instructions read and make, and which of them something depends on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.passes.sharding.spmd_program import (
    Instruction,
    Relayout,
    ShardedValue,
    is_literal,
    reads,
    writes,
)


def read_by(instructions: Iterable[Instruction]) -> list[ShardedValue]:
    """The variables that instructions read, in their order, some more than once."""
    return [v for x in instructions for v in reads(x)]


def made_by(instructions: Iterable[Instruction]) -> set[ShardedValue]:
    """The variables that instructions make."""
    return {v for x in instructions for v in writes(x)}


def has_effect(instruction: Instruction) -> bool:
    """Whether it does more than make its results."""
    return not isinstance(instruction, Relayout) and bool(instruction.eqn.effects)


def needed(
    instructions: Sequence[Instruction], wanted: Iterable[ShardedValue]
) -> tuple[Instruction, ...]:
    """The instructions that the wanted values, or an effect, depend on."""
    live = {v for v in wanted if not is_literal(v)}
    kept = []
    for instruction in reversed(instructions):
        if has_effect(instruction) or not live.isdisjoint(writes(instruction)):
            kept.append(instruction)
            live.update(reads(instruction))
    return tuple(reversed(kept))
