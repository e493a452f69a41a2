"""What is gathered for the forward pass and is there until the backward pass has read it too."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from autopar.passes.graph.name_stacks import pass_of
from autopar.passes.sharding.spmd_program import (
    Block,
    Compute,
    Loop,
    ShardedValue,
    SpmdProgram,
    is_gather,
    is_literal,
    local_bytes,
    reads,
)

_OF_STATE = ("state", "parameter")
_LATE = ("backward", "checkpoint", "again")


def gathered_for_both(program: SpmdProgram) -> int:
    """Bytes of a device that hold weights as they were gathered, for both passes.

    Of the program's equations and those of its loops, not of loops in these: the forward scan over
    layers and the backward one gather for themselves. What is gathered before a loop is read there.
    """
    block, found = program.block, set[ShardedValue]()
    outside = _gathered(block)
    found.update(_read_in_both(block, outside))
    for loop in block.instructions:
        if isinstance(loop, Loop):
            pairs = zip(loop.operands, loop.body.inputs, strict=True)
            entering = {y for x, y in pairs if not is_literal(x) and x in outside}
            found.update(_read_in_both(loop.body, entering | _gathered(loop.body)))
    return sum(local_bytes(value, program.mesh) for value in found)


def _gathered(block: Block) -> set[ShardedValue]:
    return {x.target for x in block.instructions if is_gather(x) and x.purpose in _OF_STATE}


def _read_in_both(block: Block, values: Collection[ShardedValue]) -> Iterator[ShardedValue]:
    passes: dict[ShardedValue, set[bool]] = {}
    for instruction in block.instructions:
        if isinstance(instruction, Compute):
            is_late = pass_of(str(instruction.eqn.source_info.name_stack)) in _LATE
            for value in reads(instruction):
                if not is_literal(value) and value in values:
                    passes.setdefault(value, set()).add(is_late)
    return (value for value, found in passes.items() if len(found) == 2)
