"""What an instruction of a lowered program reads and writes, as the account of memory takes it."""

from __future__ import annotations

import math

from autopar.passes.graph.scans import ScanParts
from autopar.passes.sharding.epilogues import InstructionValues
from autopar.passes.sharding.reshard import adding
from autopar.passes.sharding.scopes import aval_shape, dtype_bytes
from autopar.passes.sharding.spmd_program import (
    Compute,
    Instruction,
    Loop,
    Relayout,
    ShardedValue,
    is_literal,
    local_bytes,
    reads,
    writes,
)

Mesh = tuple[int, ...]


def made_by(instruction: Instruction) -> InstructionValues[ShardedValue]:
    """An instruction as `held_values` takes it."""
    if isinstance(instruction, Compute):
        operands = tuple(None if is_literal(v) else v for v in instruction.operands)
        return InstructionValues(instruction.eqn, operands, instruction.results)
    kinds = {s.kind for s in instruction.steps} if isinstance(instruction, Relayout) else {""}
    is_slice, is_masked = kinds <= {"slice"}, kinds == {"to-partial"}
    return InstructionValues(None, reads(instruction), writes(instruction), is_slice, is_masked)


def sum_bytes(relayout: Relayout, mesh: Mesh) -> int:
    """What is added in another dtype is there before and after the sum in that dtype as well."""
    moves = list(relayout.moves()) if relayout.sum_dtype else []
    inside = [moves[place] for place in adding(relayout.steps)] if moves else []
    if not inside:
        return 0
    whole = math.prod(aval_shape(relayout.source.atom))
    (first, dtype, _), (last, *_) = inside[0], inside[-1]
    before, after = (
        dtype_bytes(dtype) * (whole // parts) for parts in (first.parts_in, last.parts_out)
    )
    return max(before + after - local_bytes(relayout.target, mesh), after)


def loop_counts(loop: Loop) -> tuple[int, int]:
    """The numbers of a loop's constants and of what it carries."""
    parts = ScanParts.of(loop.eqn)
    return parts.num_consts, parts.num_carry
