"""Updates of parameters that run while gradients are still computed.

XLA:GPU begins with what it gathers as soon as it can, to hide it: where new parameters are gathered
(`zero1`, `zero2`), each is updated when its gradient is there, unless something waits for all of
them, such as a norm by which they are clipped. Found on GPTs of 12 unrolled layers with AdamW and
Muon (jax 0.10.2, for H100s).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.passes.sharding.run_order import is_gradient_sum, weight_products
from autopar.passes.sharding.spmd_program import (
    Block,
    Compute,
    Instruction,
    Relayout,
    ShardedValue,
    is_gather,
    reads,
    writes,
)


def early_times(block: Block, times: Sequence[float]) -> list[float]:
    """When instructions run, where those of which new state is gathered run as soon as they can.

    What these read that is made of arguments alone runs when it is first read.

    Args:
      block: the instructions.
      times: when each would run otherwise.
    """
    found = [*times]
    instructions = block.instructions
    if not any(map(_gathers_state, instructions)):
        return found
    _, awaited = weight_products(block)
    given = {*block.inputs}  # and what is made of arguments alone
    updated: set[ShardedValue] = set()  # what is made of gradients
    for instruction in instructions:
        if not updated.isdisjoint(reads(instruction)) or is_gradient_sum(instruction):
            updated.update(writes(instruction))
        if given.issuperset(reads(instruction)):
            given.update(writes(instruction))
    made_of = updated | given
    needed: set[ShardedValue] = set()
    early: list[int] = []
    for number in range(len(instructions) - 1, -1, -1):
        instruction = instructions[number]
        results = writes(instruction)
        if not _gathers_state(instruction) and needed.isdisjoint(results):
            continue
        if is_gradient_sum(instruction) or not isinstance(instruction, (Compute, Relayout)):
            continue
        if awaited.isdisjoint(results) and made_of.issuperset(results):
            needed.update(reads(instruction))
            early.append(number)
    made = {v: time for x, time in zip(instructions, times, strict=True) for v in writes(x)}
    for number in reversed(early):
        instruction = instructions[number]
        found[number] = max((made.get(v, 0) for v in reads(instruction)), default=0)
        made.update(dict.fromkeys(writes(instruction), found[number]))
    first: dict[ShardedValue, float] = {}
    of_arguments = {n for n in early if updated.isdisjoint(writes(instructions[n]))}
    for number in range(len(instructions) - 1, -1, -1):
        if number in of_arguments:  # when it is read
            found[number] = min(first.get(v, times[number]) for v in writes(instructions[number]))
        for value in reads(instructions[number]):
            first[value] = min(found[number], first.get(value, found[number]))
    return found


def _gathers_state(instruction: Instruction) -> bool:
    return is_gather(instruction) and instruction.purpose == "state"
