"""Buffers that begin as the same constant, filled one after the other rather than all at once.

XLA:GPU makes one kernel of the broadcasts of a program that are alike, and so the zeros into which
every layer scatters are there when the first is: the places of experts' tokens in a mixture, once
or more for each layer, in spite of `jax.checkpoint`. So the number that fills such a buffer goes
through a barrier, beside something that the scatter reads, too: it is not known before that is.
Found on eight layers of a DeepSeek-like mixture of `benchmarks/models` on eight H100s, by
`plan.verify("gpu:h100")` (jax 0.10.2): its worst moment had eighteen buffers of a scatter's size,
of which two were needed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeGuard

from autopar.passes.sharding.compiler_rules import IN_PLACE, CompilerRules, writes_buffer
from autopar.passes.sharding.filling_numbers import filling_numbers
from autopar.passes.sharding.scopes import aval_shape
from autopar.passes.sharding.spmd_program import (
    Block,
    Compute,
    Instruction,
    ShardedValue,
    is_literal,
    local_bytes,
    reads,
    writes,
)
from autopar.passes.sharding.waiting import LARGE_BYTES

RENAMES = frozenset(("reshape", "squeeze", "expand_dims"))
"""What may leave a buffer where it is."""

SMALL_PART = 1 / 16
"""Of the buffer's bytes: to write so many more, the places of a scatter, is nothing."""


class Fill(NamedTuple):
    """A buffer that an instruction fills with a constant, and what must be there before."""

    constant: ShardedValue
    after: ShardedValue


def fills_in_turn(
    block: Block,
    mesh: Sequence[int],
    rules: CompilerRules,
    numbers: Mapping[ShardedValue, Any] | None = None,
) -> dict[int, Fill]:
    """By the numbers of a block's instructions, those whose first operand is filled for them alone.

    The first of those that are alike is not among them.

    Args:
      block: what runs.
      mesh: the logical mesh.
      rules: of the compiler.
      numbers: the `filling_numbers` of the block; None: they are found.
    """
    if not (rules.keeps_order and rules.fills_together):
        return {}
    if not any(map(_writes_in_place, block.instructions)):
        return {}
    numbers = filling_numbers(block.instructions, rules) if numbers is None else numbers
    made: dict[ShardedValue, int] = {}
    buffers: set[ShardedValue] = set()
    alike: set[Hashable] = set()
    found: dict[int, Fill] = {}
    for time, instruction in enumerate(block.instructions):
        made.update(dict.fromkeys(writes(instruction), time))
        if _is_buffer(instruction, buffers):
            buffers.update(writes(instruction))
        if not _writes_in_place(instruction):
            continue
        constant = instruction.operands[0]
        if is_literal(constant) or numbers.get(constant) is None:
            continue
        size = local_bytes(constant, mesh)
        if constant.layout.partial or size < LARGE_BYTES:
            continue
        like = constant.atom.aval.dtype, aval_shape(constant.atom), size
        if like not in alike:
            alike.add(like)
            continue
        others = [v for v in instruction.operands[1:] if not is_literal(v) and v in made]
        ready = [v for v in others if v in buffers or local_bytes(v, mesh) <= SMALL_PART * size]
        if ready:
            found[time] = Fill(constant, max(ready, key=made.__getitem__))
    return found


def _writes_in_place(instruction: Instruction) -> TypeGuard[Compute]:
    if not isinstance(instruction, Compute) or instruction.once:
        return False
    return instruction.eqn.primitive.name in IN_PLACE


def _is_buffer(instruction: Instruction, buffers: Set[ShardedValue]) -> bool:
    """Whether what an instruction makes is in memory anyway, so that a barrier costs nothing."""
    if not isinstance(instruction, Compute):
        return True
    is_renamed = instruction.eqn.primitive.name in RENAMES
    return writes_buffer(instruction.eqn) or (is_renamed and set(reads(instruction)) <= buffers)
