"""Weights that are gathered for products, and not many layers ahead of them.

Where devices have few tokens, layers are quicker than the gathers of their weights, and XLA:GPU, to
hide these, begins with the next layers': of a GPT of 12 unrolled layers with 1,024 tokens on each
of eight H100s, by `zero3`, it gathered two of four weights of all layers before the first product.
So a gather waits for what a product two weights earlier reads, as FSDP limits how many gathers are
under way (Zhao et al., "PyTorch FSDP", VLDB 2023): the network is busy while there is something to
gather, and a device has no more than two weights too many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from autopar.passes.sharding.compiler_rules import SAME_BUFFER, may_be_fused
from autopar.passes.sharding.loop_order import is_large_gather
from autopar.passes.sharding.spmd_program import (
    Block,
    Compute,
    Instruction,
    Relayout,
    ShardedValue,
    reads,
    writes,
)
from autopar.passes.sharding.waiting import EarlyGather

GATHERS_AHEAD = 2
"""Weights that may be gathered while a product runs: those of so many later ones."""

LONGEST_CHAIN = 4
"""Of instructions that make what is gathered of an argument: a cast, a transpose."""


def gathers_in_time(
    block: Block, mesh: Sequence[int], products: Sequence[int]
) -> dict[int, list[EarlyGather]]:
    """By the number of the product with which they may begin, gathers of what later ones read."""
    instructions = block.instructions
    gathers = {
        x.target: number
        for number, x in enumerate(instructions)
        if is_large_gather(x, mesh) and x.purpose == "parameter"
    }
    readers: list[int] = []  # the first products that read what is gathered, in order
    places: dict[ShardedValue, int] = {}
    for time in products:
        new = [v for v in reads(instructions[time]) if v in gathers and v not in places]
        if new:
            places.update(dict.fromkeys(new, len(readers)))
            readers.append(time)
    makers = {v: t for t, x in enumerate(instructions) for v in writes(x)}
    sources = Counter(x.source for x in instructions if isinstance(x, Relayout))
    found: dict[int, list[EarlyGather]] = {}
    moved: set[int] = set()
    for target, place in places.items():
        number, begin = gathers[target], place - GATHERS_AHEAD
        if begin < 0 or _is_convolution(instructions[readers[place]]):  # see `run_order`
            continue
        instruction = instructions[number]
        assert isinstance(instruction, Relayout)
        source, time = instruction.source, readers[begin]
        before = _made_after(block, makers, source, time)
        if before is None or sources[source] > 1 or not moved.isdisjoint(before):
            continue
        moved.update(before)
        early = EarlyGather(number, source, target, tuple(before))
        found.setdefault(time, []).append(early)
    return found


def _is_convolution(instruction: Instruction) -> bool:
    return (
        isinstance(instruction, Compute)
        and instruction.eqn.primitive.name == "conv_general_dilated"
    )


def _made_after(
    block: Block, makers: Mapping[ShardedValue, int], value: ShardedValue, time: int
) -> list[int] | None:
    """The instructions after `time` that make a value, in order; None if they read what waits."""
    found: set[int] = set()
    waiting = [value]
    while waiting:
        number = makers.get(waiting.pop(), -1)
        if number < time:
            continue
        instruction = block.instructions[number]
        if not isinstance(instruction, Compute) or instruction.once:
            return None
        name = instruction.eqn.primitive.name
        if not may_be_fused(instruction.eqn) and name not in SAME_BUFFER:
            return None
        found.add(number)
        if len(found) > LONGEST_CHAIN:
            return None
        waiting += reads(instruction)
    return sorted(found)
