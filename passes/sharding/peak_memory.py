"""How many bytes one device holds at the worst point of a step, from the program's live ranges.

XLA fuses elementwise chains, so a value that an elementwise equation makes and only nearby
elementwise equations read takes no memory of its own; everything else does, from its definition to
its last use.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend import core as jex_core
from jax.extend.core import Var

from autopar.passes.graph.primitives import ENDS_FUSION, UNFUSED
from autopar.passes.sharding.layout import local_shape
from autopar.passes.sharding.scopes import aval_shape, itemsize
from autopar.passes.sharding.spmd_program import (
    Block,
    Branch,
    Compute,
    Instruction,
    Loop,
    Relayout,
    ShardedValue,
    SpmdProgram,
    is_literal,
    reads,
)

# Instructions over which an elementwise value is taken to be fused into its reader.
FUSION_REACH = 32


@dataclass(frozen=True)
class MemoryPeak:
    """The worst point: bytes per device, and what is alive there, largest first."""

    bytes: int
    alive: tuple[tuple[str, int], ...]


def local_bytes(version: ShardedValue, mesh: Sequence[int]) -> int:
    """Bytes that one device holds of a version."""
    if isinstance(version.atom, jex_core.Literal):
        return 0
    shape = local_shape(aval_shape(version.atom), version.layout, mesh)
    return math.prod(shape) * itemsize(version.atom.aval)


def peak(program: SpmdProgram, names: dict[Var, str], donated: Sequence[bool]) -> MemoryPeak:
    """The peak of a step. `names` label input variables; a donated input dies at its last use."""
    kept = [v for v, gone in zip(program.block.inputs, donated, strict=True) if not gone]
    return _block_peak(program.block, program.mesh, names, set(kept))


def _made(instruction: Instruction) -> tuple[ShardedValue, ...]:
    """All results: one that nothing reads takes memory as well."""
    return (instruction.target,) if isinstance(instruction, Relayout) else instruction.results


def _block_peak(
    block: Block, mesh: tuple[int, ...], names: dict[Var, str], kept: set[ShardedValue]
) -> MemoryPeak:
    instructions = block.instructions
    end = len(instructions)
    last: dict[ShardedValue, int] = {}
    readers: dict[ShardedValue, list[int]] = defaultdict(list)
    for time, instruction in enumerate(instructions):
        for version in reads(instruction):
            last[version] = time
            readers[version].append(time)
    for version in (*(v for v in block.outputs if not is_literal(v)), *kept):
        last[version] = end
    free_at: dict[int, list[ShardedValue]] = defaultdict(list)
    for version, time in last.items():
        free_at[time].append(version)
    alive: dict[str | ShardedValue, int] = {v: local_bytes(v, mesh) for v in block.inputs}
    total = sum(alive.values())
    best, best_alive = total, dict(alive)
    for time, instruction in enumerate(instructions):
        inner = _inner_peak(instruction, mesh, names)
        for version in _made(instruction):
            if version not in last or version in alive:
                continue
            if _is_fused(instruction, version, time, readers[version], last[version], instructions):
                continue
            alive[version] = local_bytes(version, mesh)
            total += alive[version]
        if total + inner.bytes > best:
            best = total + inner.bytes
            best_alive = {**alive, **dict(inner.alive)}
        for version in free_at[time]:
            total -= alive.pop(version, 0)
    largest = sorted(
        ((_label(key, names), size) for key, size in best_alive.items()),
        key=lambda item: (-item[1], item[0]),
    )
    return MemoryPeak(best, tuple(largest[:20]))


def _label(key: str | ShardedValue, names: dict[Var, str]) -> str:
    if isinstance(key, str):
        return key
    atom = key.atom
    return names.get(atom, f"{atom.aval.str_short()} (a value of the step)")


def _inner_peak(
    instruction: Instruction, mesh: tuple[int, ...], names: dict[Var, str]
) -> MemoryPeak:
    """What a loop's or branch's body needs beside its operands and results."""
    if isinstance(instruction, Loop):
        bodies = [instruction.body]
    elif isinstance(instruction, Branch):
        bodies = list(instruction.blocks)
    else:
        return MemoryPeak(0, ())
    worst = MemoryPeak(0, ())
    for body in bodies:
        found = _block_peak(body, mesh, names, set())
        entered = sum(local_bytes(v, mesh) for v in body.inputs)
        beside = max(found.bytes - entered, 0)
        if beside > worst.bytes:
            worst = MemoryPeak(beside, found.alive)
    return worst


def _is_fused(
    instruction: Instruction,
    version: ShardedValue,
    time: int,
    readers: list[int],
    last: int,
    instructions: Sequence[Instruction],
) -> bool:
    if not isinstance(instruction, Compute) or instruction.eqn.primitive.name in UNFUSED:
        return False
    if last - time > FUSION_REACH:
        return False
    return all(
        isinstance(reader := instructions[t], Compute)
        and reader.eqn.primitive.name not in UNFUSED - ENDS_FUSION
        for t in readers
        if t < len(instructions)
    ) and last < len(instructions)
