"""Where loops stand in a program's order: what waits for a loop, and what a loop waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

from autopar.passes.graph.scans import ScanParts
from autopar.passes.sharding.spmd_program import (
    Block,
    Compute,
    Instruction,
    Loop,
    Relayout,
    ShardedValue,
    is_gather,
    is_literal,
    local_bytes,
    reads,
    writes,
)
from autopar.passes.sharding.waiting import LARGE_BYTES, Tie, is_product


def gathers_after_loops(block: Block, mesh: Sequence[int]) -> dict[int, Tie]:
    """What is gathered after a loop, and waits for nothing that the loop makes."""
    found: dict[int, Tie] = {}
    after: ShardedValue | None = None  # the smallest result of the last loop that is read
    since: set[ShardedValue] = set()  # what was made after it
    used = {v for x in block.instructions for v in reads(x)}
    for time, instruction in enumerate(block.instructions):
        if isinstance(instruction, Loop):
            sizes = {v: local_bytes(v, mesh) for v in instruction.results if v in used}
            after = min(sizes, key=sizes.__getitem__, default=after)
            since = set(instruction.results)
            continue
        if after is None:
            continue
        if not since.isdisjoint(reads(instruction)):
            since.update(writes(instruction))
        elif is_large_gather(instruction, mesh):
            found[time] = Tie(instruction.source, (after,), ())
    return found


def loops_in_turn(block: Block, mesh: Sequence[int]) -> dict[int, Tie]:
    """Loops that read what an earlier one stacked when all is done that comes before them.

    XLA's pipeliner of collectives takes the first trip out of a backward loop, and what that
    computes again, it would compute before the gradient of the logits is needed no more.

    Loops that need nothing of each other run one after the other too. XLA unrolls short ones and
    combines the collectives of several: Muon's iterations for all leaves would go in step, with the
    buffers of all (`benchmarks/written_steps.py`).
    """
    found: dict[int, Tie] = {}
    stacked: set[ShardedValue] = set()
    used = {v for x in block.instructions for v in reads(x)}
    start = 0
    last: ShardedValue | None = None  # the smallest result of the last loop that is read
    since = set[ShardedValue]()  # what was made of its results
    for time, instruction in enumerate(block.instructions):
        is_apart = since.isdisjoint(reads(instruction))
        if not is_apart:
            since.update(writes(instruction))
        if not isinstance(instruction, Loop):
            continue
        scan, between = ScanParts.of(instruction.eqn), block.instructions[start:time]
        first, start = scan.num_consts + scan.num_carry, time + 1
        operands = [v for v in instruction.operands[first:] if not is_literal(v) and v in stacked]
        made = {v for x in between for v in writes(x)}
        carry = instruction.operands[scan.num_consts : first]
        carried = [v for v in carry if not is_literal(v) and v in made]
        waited = dict.fromkeys((*carried, *_left_products(between, instruction)))
        results = tuple(v for v in waited if local_bytes(v, mesh) >= LARGE_BYTES)
        if operands and results:
            largest = max(operands, key=lambda v: local_bytes(v, mesh))
            found[time] = Tie(largest, results, ())
        elif is_apart and last is not None and carried:
            largest = max(carried, key=lambda v: local_bytes(v, mesh))
            found[time] = Tie(largest, (last,), ())
        sizes = {v: local_bytes(v, mesh) for v in instruction.results if v in used}
        last = min(sizes, key=sizes.__getitem__, default=last)
        since = set(instruction.results)
        stacked.update(instruction.results[scan.num_carry :])
    return found


def _left_products(between: Sequence[Instruction], loop: Loop) -> Iterator[ShardedValue]:
    """Results of products that neither a loop nor another product before it needs.

    What is transposed is waited for as it is then, as in `run_order`.
    """
    needed = set(reads(loop))
    for instruction in reversed(between):
        if is_product(instruction) or not needed.isdisjoint(writes(instruction)):
            needed.update(reads(instruction))
    turned = {reads(x)[0]: x for x in between if _is_transpose(x) and reads(x)}
    for instruction in between:
        if is_product(instruction):
            for value in writes(instruction):
                if value not in needed:
                    yield from writes(turned[value]) if value in turned else (value,)


def is_large_gather(instruction: Instruction, mesh: Sequence[int]) -> TypeGuard[Relayout]:
    """Whether devices gather much."""
    if not is_gather(instruction) or is_literal(instruction.source):
        return False
    return local_bytes(instruction.target, mesh) >= LARGE_BYTES


def _is_transpose(instruction: Instruction) -> bool:
    return isinstance(instruction, Compute) and instruction.eqn.primitive.name == "transpose"
