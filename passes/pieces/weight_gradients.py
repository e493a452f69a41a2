"""What waits for the gradients of weights, where they come after the rest of a backward pass.

Told by the program of a backward pass that is not divided: the gradient that a stage sends comes
first (`slicing/assemble.py`), and scans are cut in two (`slicing/backward_scans.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from autopar.passes.graph.primitives import HEAVY
from autopar.passes.graph.scans import ScanParts
from autopar.passes.pieces.wiring import needed, read_by
from autopar.passes.sharding.spmd_program import (
    Compute,
    Instruction,
    Loop,
    ShardedValue,
    is_literal,
    local_bytes,
    writes,
)


def waiting_bytes(
    instructions: Sequence[Instruction],
    sent: Iterable[ShardedValue],
    received: Iterable[ShardedValue],
    mesh: Sequence[int],
) -> int:
    """Bytes of a device that the rest reads of what is received and made for the sent values."""
    wanted = [version for version in sent if not is_literal(version)]
    first, rest = _parted(instructions, wanted)
    awaited = {*wanted, *read_by(first)}
    made = {v for x in first for v in writes(x) if not isinstance(x, Loop) or v in awaited}
    waiting = {*made, *received}.intersection(read_by(rest))
    loops = (x for x in first if isinstance(x, Loop))
    return sum(local_bytes(version, mesh) for version in waiting) + sum(
        _waiting_in_scan(loop, awaited, mesh) for loop in loops
    )


def _waiting_in_scan(loop: Loop, awaited: Collection[ShardedValue], mesh: Sequence[int]) -> int:
    """The same in all iterations of a scan, whose rest multiplies matrices; else it is not cut."""
    body, (_, carries, _) = loop.body, ScanParts.of(loop.eqn).operands(loop.body.inputs)
    found = {place for place, version in enumerate(loop.results) if version in awaited}
    while True:  # with what iterations hand on for that
        sent = [body.outputs[place] for place in sorted(found)]
        first, rest = _parted(body.instructions, [v for v in sent if not is_literal(v)])
        read = {*read_by(first), *sent}
        more = {place for place, carry in enumerate(carries) if carry in read}
        if more <= found:
            break
        found |= more
    if not any(isinstance(x, Compute) and x.eqn.primitive.name in HEAVY for x in rest):
        return 0
    handed = [carry for place, carry in enumerate(carries) if place in found]
    return int(loop.eqn.params["length"]) * waiting_bytes(body.instructions, sent, handed, mesh)


def _parted(
    instructions: Sequence[Instruction], wanted: Iterable[ShardedValue]
) -> tuple[Sequence[Instruction], Sequence[Instruction]]:
    """The instructions that wanted values depend on, and the others."""
    first = needed(instructions, wanted)
    own = {id(instruction) for instruction in first}
    return first, [x for x in instructions if id(x) not in own]
