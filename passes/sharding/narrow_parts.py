"""Casts of concatenations that XLA:TPU does before it puts the parts together.

A cast to a narrower dtype moves up through what only moves elements (`convert_mover.cc`), so the
parts are written narrow: of rotary positions, computed in float32 of halves of queries and keys,
the halves are there in bfloat16. Found on single layers of attention, in which they were counted
twice as large (libtpu 0.0.42). What no equation of the block makes (an argument, what a loop or a
collective leaves) is as wide as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.passes.sharding.scopes import itemsize
from autopar.passes.sharding.spmd_program import (
    Block,
    Compute,
    Instruction,
    ShardedValue,
    is_literal,
    readers_of,
)


def narrow_parts(block: Block) -> dict[ShardedValue, int]:
    """The bytes of an element of what only a concatenation reads that only such a cast reads."""
    readers = readers_of(block)
    computed = {v for x in block.instructions if isinstance(x, Compute) for v in x.results}
    found: dict[ShardedValue, int] = {}
    for instruction in block.instructions:
        if not isinstance(instruction, Compute) or instruction.eqn.primitive.name != "concatenate":
            continue
        (whole,) = instruction.results
        size = _cast_to(readers[whole])
        if size is not None and size < itemsize(whole.atom.aval):
            parts = (v for v in instruction.operands if not is_literal(v) and v in computed)
            found.update((v, size) for v in parts if len(readers[v]) == 1)
    return found


def _cast_to(readers: Sequence[Instruction | None]) -> int | None:
    """The bytes of an element of what a cast makes that reads alone."""
    if len(readers) != 1 or not isinstance(reader := readers[0], Compute):
        return None
    if reader.eqn.primitive.name != "convert_element_type":
        return None
    return itemsize(reader.results[0].atom.aval)
