"""How many bytes one device holds at the worst point of a step, from the program's live ranges.

XLA fuses elementwise chains, so a value that an elementwise equation makes and only nearby
elementwise equations read takes no memory of its own. A broadcast is written into every fusion that
reads it, however far away (`InstructionFusion` in XLA copies what is cheap): the mask that all
layers share is never there as a whole. Everything else is, from its definition to its last use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from jax.extend.core import Var

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.primitives import ENDS_FUSION, UNFUSED
from autopar.passes.sharding.fused_peak import fused_peak
from autopar.passes.sharding.instruction_values import sum_bytes
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
    local_bytes,
    reads,
    writes,
)

# Instructions over which an elementwise value is taken to be fused into its reader.
FUSION_REACH = 32
# What is fused into its readers at any distance.
COPIED = frozenset({"broadcast_in_dim", "iota"})


@dataclass(frozen=True)
class MemoryPeak:
    """The worst point: bytes per device, and what is alive there, largest first."""

    bytes: int
    alive: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, size: int, alive: Iterable[tuple[str, int]]) -> MemoryPeak:
        """A peak of so many bytes, with the largest of what is alive."""
        return cls(size, tuple(sorted(alive, key=lambda item: (-item[1], item[0]))[:20]))


def peak(
    program: SpmdProgram,
    names: dict[Var, str],
    donated: Sequence[bool],
    memory: int | None = None,
) -> MemoryPeak:
    """The peak of a step. `names` label input variables; a donated input dies at its last use.

    Of devices with so many bytes of `memory`, if the compiler saves where few are left.
    """
    kept = [v for v, gone in zip(program.block.inputs, donated, strict=True) if not gone]
    if program.rules.fuses_anywhere:
        size, alive = fused_peak(program.block, program.mesh, program.rules, kept, memory=memory)
        return MemoryPeak.of(size, [(label_of(v, names), bytes_) for v, bytes_ in alive.items()])
    return _block_peak(program.block, program.mesh, names, set(kept))


def temporary_bytes(program: SpmdProgram, block: Block, fresh: Collection[ShardedValue]) -> int:
    """Bytes per device of what a block of a program needs beside its inputs and its outputs.

    These have memory of their own from its beginning to its end; that of outputs which are `fresh`,
    not written in place of an input, is used before they are there. Where compilers fuse near
    readers alone, it is as much as the worst moment is above both.
    """
    outputs = [v for v in block.outputs if not is_literal(v)]
    apart = {*block.inputs, *outputs}
    combined = (
        local_bytes(x.target, program.mesh)
        for x in block.instructions
        if isinstance(x, Relayout) and {x.source, x.target} <= apart
        if any(step.kind == "all-reduce" for step in x.steps)
    )
    beside = sum(size for size in combined if size < program.rules.combined_bytes)
    if program.rules.fuses_anywhere:
        rules, kept = program.rules, block.inputs
        holding = fresh if rules.results_hold else ()
        found, _ = fused_peak(block, program.mesh, rules, kept, apart=apart, results=holding)
        return found + beside
    worst = _block_peak(block, program.mesh, {}, set(block.inputs)).bytes
    return max(worst - sum(local_bytes(v, program.mesh) for v in apart), 0)


def _block_peak(
    block: Block, mesh: tuple[int, ...], names: dict[Var, str], kept: set[ShardedValue]
) -> MemoryPeak:
    instructions = block.instructions
    end = len(instructions)
    last: dict[ShardedValue, int] = {}
    readers: dict[ShardedValue, list[Instruction]] = defaultdict(list)
    passed: dict[ShardedValue, ShardedValue] = {}  # a barrier's results -> whose buffers they are
    for time, instruction in enumerate(instructions):
        for version in reads(instruction):
            held = passed.get(version, version)
            last[held] = time
            readers[held].append(instruction)
        if isinstance(instruction, Compute) and is_barrier(instruction.eqn):
            pairs = zip(instruction.results, instruction.operands, strict=True)
            passed.update((made, passed.get(v, v)) for made, v in pairs if not is_literal(v))
    for version in (*(v for v in block.outputs if not is_literal(v)), *kept):
        last[passed.get(version, version)] = end
    copied = _copied(instructions, last, readers, passed, end)
    free_at: dict[int, list[ShardedValue]] = defaultdict(list)
    for version, time in last.items():
        free_at[time].append(version)
    alive: dict[str | ShardedValue, int] = {v: local_bytes(v, mesh) for v in block.inputs}
    total = sum(alive.values())
    sizes = dict(alive)
    born: dict[str | ShardedValue, int] = dict.fromkeys(alive, -1)
    gone: dict[str | ShardedValue, int] = {}
    best, at, beside = total, -1, MemoryPeak(0, ())
    for time, instruction in enumerate(instructions):
        inner = _inner_peak(instruction, mesh, names)
        for version in writes(instruction):
            if version not in last or version in alive or version in copied:
                continue
            is_near = last[version] < end and last[version] - time <= FUSION_REACH
            if is_near and _is_fused(instruction, readers[version]):
                continue
            alive[version] = sizes[version] = local_bytes(version, mesh)
            born[version] = time
            total += alive[version]
        if total + inner.bytes > best:
            best, at, beside = total + inner.bytes, time, inner
        for version in free_at[time]:
            total -= alive.pop(version, 0)
            gone[version] = time
    there = {v: size for v, size in sizes.items() if born[v] <= at <= gone.get(v, end)}
    best_alive: dict[str | ShardedValue, int] = {**there, **dict(beside.alive)}
    return MemoryPeak.of(best, [(label_of(k, names), size) for k, size in best_alive.items()])


def _copied(
    instructions: Sequence[Instruction],
    last: dict[ShardedValue, int],
    readers: dict[ShardedValue, list[Instruction]],
    passed: dict[ShardedValue, ShardedValue],
    end: int,
) -> set[ShardedValue]:
    """The values that every reader makes for itself; what they are made of lives on, in `last`."""
    found: set[ShardedValue] = set()
    for instruction in reversed(instructions):
        if not isinstance(instruction, Compute) or instruction.eqn.primitive.name not in COPIED:
            continue
        (made,) = instruction.results
        until = last.get(made, end)
        if until < end and _is_fused(instruction, readers[made]):
            found.add(made)
            for version in instruction.operands:
                held = version if is_literal(version) else passed.get(version, version)
                if not is_literal(held):
                    last[held] = max(last[held], until)
    return found


def label_of(key: str | ShardedValue, names: dict[Var, str]) -> str:
    """A value's name for people."""
    if isinstance(key, str):
        return key
    atom = key.atom
    name = None if is_literal(key) else names.get(atom)
    return name or f"{atom.aval.str_short()} (a value of the step)"


def _inner_peak(
    instruction: Instruction, mesh: tuple[int, ...], names: dict[Var, str]
) -> MemoryPeak:
    """What a loop's or branch's body, or a sum in another dtype, needs beside what it makes."""
    if isinstance(instruction, Relayout):
        return _sum_peak(instruction, mesh)
    bodies = instruction.blocks if isinstance(instruction, Branch) else ()
    if isinstance(instruction, Loop):
        bodies = (instruction.body,)
    worst = MemoryPeak(0, ())
    for body in bodies:
        found = _block_peak(body, mesh, names, set())
        entered = sum(local_bytes(v, mesh) for v in body.inputs)
        beside = max(found.bytes - entered, 0)
        if beside > worst.bytes:
            worst = MemoryPeak(beside, found.alive)
    return worst


def _sum_peak(relayout: Relayout, mesh: tuple[int, ...]) -> MemoryPeak:
    beside = sum_bytes(relayout, mesh)
    if not beside:
        return MemoryPeak(0, ())
    return MemoryPeak(beside, ((f"sums of a gradient in {relayout.sum_dtype}", beside),))


def _is_fused(instruction: Instruction, readers: Sequence[Instruction]) -> bool:
    if not isinstance(instruction, Compute) or instruction.eqn.primitive.name in UNFUSED:
        return False
    return all(
        isinstance(reader, Compute) and reader.eqn.primitive.name not in UNFUSED - ENDS_FUSION
        for reader in readers
    )
