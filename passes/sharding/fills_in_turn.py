"""Buffers that begin as the same constant, and loops' stacks: each is filled in its turn.

XLA:GPU makes one kernel of the broadcasts of a program that are alike, and so the zeros into which
every layer scatters are there when the first is: the places of experts' tokens in a mixture, once
or more for each layer, in spite of `jax.checkpoint`. So the number that fills such a buffer goes
through a barrier, beside something that the scatter reads, too: it is not known before that is.
Found on eight layers of a DeepSeek-like mixture of `benchmarks/models` on eight H100s, by
`plan.verify("gpu:h100")` (jax 0.10.2): its worst moment had eighteen buffers of a scatter's size,
of which two were needed.

What loops stack is the same: layers that each have a scan of their own, over chunks of a sequence
as linear attention has or over its steps, kept the stacks of all layers' backward passes from the
first scan on (twelve layers of `benchmarks/models/delta.py`: 24.6 GiB, and 7.5 so). What loops
carry is left as it is: sums of gradients, mostly, which live until XLA has reduced several layers'
together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from autopar.passes.sharding.compiler_rules import IN_PLACE, CompilerRules, writes_buffer
from autopar.passes.sharding.filling_numbers import beginnings, filling_numbers
from autopar.passes.sharding.scopes import aval_shape
from autopar.passes.sharding.spmd_program import (
    Block,
    Compute,
    Instruction,
    Loop,
    ShardedValue,
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
    """What an instruction fills for itself alone, and what must be there before.

    Args:
      constant: its first operand; None: the stacks of a loop.
      after: another operand.
    """

    constant: ShardedValue | None
    after: ShardedValue


def fills_in_turn(
    block: Block,
    mesh: Sequence[int],
    rules: CompilerRules,
    numbers: Mapping[ShardedValue, Any] | None = None,
) -> dict[int, Fill]:
    """By the numbers of a block's instructions, those that fill buffers for themselves alone.

    The first of those that are alike is not among them.

    Args:
      block: what runs.
      mesh: the logical mesh.
      rules: of the compiler.
      numbers: the `filling_numbers` of the block; None: they are found.
    """
    if not (rules.keeps_order and rules.fills_together):
        return {}
    if not any(map(_may_fill, block.instructions)):
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
        filled = [*_filled(instruction, numbers, mesh)] if _may_fill(instruction) else []
        if not filled:
            continue
        likes = {(v.atom.aval.dtype, aval_shape(v.atom), local_bytes(v, mesh)) for v, _ in filled}
        if alike.isdisjoint(likes):
            alike |= likes
            continue
        alike |= likes
        constant = filled[0][1]
        most = SMALL_PART * max(local_bytes(v, mesh) for v, _ in filled)
        ready = [
            v
            for v in reads(instruction)
            if v in made
            and v not in numbers
            and not v.layout.in_host
            and (isinstance(instruction, Loop) or v in buffers or local_bytes(v, mesh) <= most)
        ]
        if ready:
            found[time] = Fill(constant, max(ready, key=made.__getitem__))
    return found


def _filled(
    instruction: Instruction, numbers: Mapping[ShardedValue, Any], mesh: Sequence[int]
) -> Iterator[tuple[ShardedValue, ShardedValue | None]]:
    """The large results whose buffers a known number fills, and what is that; a loop's stacks."""
    for value, constant in beginnings(instruction, numbers):
        if constant is None:
            is_filled = True
        else:
            is_known = numbers[constant] is not None and not constant.layout.partial
            is_filled = is_known and not isinstance(instruction, Loop)
        if is_filled and local_bytes(value, mesh) >= LARGE_BYTES:
            yield value, constant


def _may_fill(instruction: Instruction) -> bool:
    """Whether it writes into buffers part by part: scatters, loops that JAX runs trip by trip."""
    if isinstance(instruction, Loop):
        results = (*instruction.results, *instruction.body.outputs)
        if any(v.layout.in_host for v in results):
            return False
        is_plain = all(isinstance(v.atom.aval.dtype, np.dtype) for v in instruction.results)
        return is_plain and instruction.eqn.params["unroll"] == 1
    if not isinstance(instruction, Compute) or instruction.once:
        return False
    return instruction.eqn.primitive.name in IN_PLACE


def _is_buffer(instruction: Instruction, buffers: Set[ShardedValue]) -> bool:
    """Whether what an instruction makes is in memory anyway, so that a barrier costs nothing."""
    if not isinstance(instruction, Compute):
        return True
    is_renamed = instruction.eqn.primitive.name in RENAMES
    return writes_buffer(instruction.eqn) or (is_renamed and set(reads(instruction)) <= buffers)
