"""The sharded program: what every device of one mesh runs, instruction by instruction.

A `ShardedValue` is a variable in a layout. `Compute` evaluates one equation on such values,
`Relayout` makes another one of a variable, `Loop` and `Branch` hold blocks. Planner, plan and
runtime read the same list, so what is priced and printed is what runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

import jax.numpy as jnp
from jax.extend.core import DropVar, JaxprEqn, Literal

from autopar.passes.graph.graph import Atom
from autopar.passes.graph.microbatched import Task
from autopar.passes.sharding.compiler_rules import CPU, RULES, CompilerRules
from autopar.passes.sharding.layout import Layout, cuts_product, describe
from autopar.passes.sharding.reshard import ReshardStep, adding
from autopar.passes.sharding.scopes import aval_shape, dtype_bytes, itemsize


class ShardedValue(NamedTuple):
    """A variable (or a literal) in a layout."""

    atom: Atom
    layout: Layout


class Wired:
    """What reads and makes values; which ones is found once, for every pass asks."""

    @cached_property
    def wires(self) -> tuple[tuple[ShardedValue, ...], tuple[ShardedValue, ...]]:
        """What it reads and what it makes, but for constants and results that nobody reads."""
        assert isinstance(self, Compute | Relayout | Loop | Branch)
        if isinstance(self, Relayout):
            found: tuple[ShardedValue, ...] = (self.source,)
            made: tuple[ShardedValue, ...] = (self.target,)
        else:
            found = (self.index, *self.operands) if isinstance(self, Branch) else self.operands
            made = tuple(v for v in self.results if not isinstance(v.atom, DropVar))
        return tuple(v for v in found if not is_literal(v)), made


@dataclass(frozen=True)
class Compute(Wired):
    """One equation on local slices.

    Args:
      eqn: the equation.
      operands: what it reads.
      results: what it makes.
      once: it has an effect, and one device alone runs it.
      task: what it belongs to, in the body of a stage's loop over microbatches.
      movable: it is computed where it is read, so a later task may do that.
    """

    eqn: JaxprEqn
    operands: tuple[ShardedValue, ...]
    results: tuple[ShardedValue, ...]
    once: bool = False
    task: Task | None = None
    movable: bool = False

    @property
    def layouts(self) -> tuple[list[Layout], list[Layout]]:
        """How operands and results lie."""
        return [v.layout for v in self.operands], [v.layout for v in self.results]


@dataclass(frozen=True)
class Relayout(Wired):
    """A variable in another layout, by these steps. `purpose` is for people.

    Devices add in the dtype `sum_dtype`; "": in the variable's own.
    """

    source: ShardedValue
    target: ShardedValue
    steps: tuple[ReshardStep, ...]
    purpose: str
    where: str
    sum_dtype: str = ""

    def moves(self) -> Iterator[tuple[ReshardStep, Any, int]]:
        """Each step, its numbers' dtype, and the bytes of a device's larger buffer of it."""
        atom = self.source.atom
        whole = math.prod(aval_shape(atom))
        inside = adding(self.steps) if self.sum_dtype else ()
        for place, step in enumerate(self.steps):
            dtype = jnp.dtype(self.sum_dtype) if place in inside else atom.aval.dtype
            if step.kind == "all-reduce" and dtype == jnp.bool_:
                dtype = jnp.dtype(jnp.int32)  # as `all_reduce` sends them
            yield step, dtype, dtype_bytes(dtype) * step.elements(whole)


@dataclass(frozen=True)
class Loop(Wired):
    """A scan: operands in the order of its equation (constants, carry, slices)."""

    eqn: JaxprEqn
    operands: tuple[ShardedValue, ...]
    results: tuple[ShardedValue, ...]
    body: Block
    task: Task | None = None


@dataclass(frozen=True)
class Branch(Wired):
    """A cond: the branch index, what the branches read, and one block per branch."""

    eqn: JaxprEqn
    index: ShardedValue
    operands: tuple[ShardedValue, ...]
    results: tuple[ShardedValue, ...]
    blocks: tuple[Block, ...]
    task: Task | None = None


Instruction = Compute | Relayout | Loop | Branch


@dataclass(frozen=True)
class Block:
    """Instructions from sharded inputs to sharded outputs."""

    inputs: tuple[ShardedValue, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[ShardedValue, ...]


@dataclass(frozen=True)
class SpmdProgram:
    """One mesh's program: its logical shape, its axes' names, and the block that a step runs.

    `rules` say what the compiler of its devices makes of it. Where it is `overlapped`, collectives
    were planned to run beside computation.
    """

    mesh: tuple[int, ...]
    axis_names: tuple[str, ...]
    block: Block
    rules: CompilerRules = RULES[CPU]
    overlapped: bool = False

    @cached_property
    def temporaries(self) -> dict[Hashable, tuple[int, tuple[Instruction, ...]]]:
        """What blocks of it need inside, as far as that was asked for (`temporary_bytes`)."""
        return {}

    def __str__(self) -> str:
        # Short, stable names for variables, in the order in which they are printed.
        names: dict[Atom, str] = defaultdict(lambda: f"v{len(names)}")
        return "\n".join(_lines(self.block, self.axis_names, names, ""))


def _lines(
    block: Block, axes: tuple[str, ...], names: dict[Atom, str], indent: str
) -> Iterator[str]:
    def name(atom: Atom) -> str:
        return str(atom.val) if isinstance(atom, Literal) else names[atom]

    def show(versions: tuple[ShardedValue, ...]) -> str:
        return " ".join(
            f"{name(v.atom)}:{v.atom.aval.str_short()}{describe(v.layout, axes)}" for v in versions
        )

    yield f"{indent}in  {show(block.inputs)}"
    for i in block.instructions:
        if isinstance(i, Relayout):
            steps = ", ".join(f"{s.kind}({','.join(axes[a] for a in s.axes)})" for s in i.steps)
            made, read = show((i.target,)), show((i.source,))
            within = f" in {i.sum_dtype}" if i.sum_dtype else ""
            yield f"{indent}{made} = {steps or 'as is'}{within} {read}  # {i.purpose}"
        elif isinstance(i, Compute):
            once = " on one device" if i.once else ""
            yield f"{indent}{show(i.results)} = {i.eqn.primitive.name} {show(i.operands)}{once}"
        elif isinstance(i, Loop):
            yield f"{indent}{show(i.results)} = scan x{i.eqn.params['length']} {show(i.operands)}"
            yield from _lines(i.body, axes, names, indent + "    ")
        else:
            yield f"{indent}{show(i.results)} = cond {show((i.index,))} {show(i.operands)}"
            for number, inner in enumerate(i.blocks):
                yield f"{indent}  branch {number}"
                yield from _lines(inner, axes, names, indent + "    ")
    yield f"{indent}out {show(block.outputs)}"


def reads(instruction: Instruction) -> tuple[ShardedValue, ...]:
    """The variables that an instruction reads; literals are not hashable, and come from nowhere."""
    return instruction.wires[0]


def writes(instruction: Instruction) -> tuple[ShardedValue, ...]:
    """The variables that an instruction makes."""
    return instruction.wires[1]


def readers_of(block: Block) -> defaultdict[ShardedValue, list[Instruction | None]]:
    """By a block's variable: who reads it, in order; at the end None, if the block returns it.

    Of what nobody reads: an empty list.
    """
    found = defaultdict[ShardedValue, list[Instruction | None]](list)
    for instruction in block.instructions:
        for value in reads(instruction):
            found[value].append(instruction)
    for value in block.outputs:
        if not is_literal(value):
            found[value].append(None)
    return found


def is_gather(instruction: Instruction) -> TypeGuard[Relayout]:
    """Whether devices gather something."""
    return isinstance(instruction, Relayout) and any(
        step.kind == "all-gather" for step in instruction.steps
    )


def is_literal(version: ShardedValue) -> bool:
    """Whether it is a constant, which nothing has to make."""
    return isinstance(version.atom, Literal)


def local_bytes(version: ShardedValue, mesh: Sequence[int]) -> int:
    """Bytes that one device holds of a version; none of what is in its host's memory."""
    return 0 if version.layout.in_host else part_bytes(version, mesh)


def host_bytes(program: SpmdProgram) -> int:
    """Bytes that a device's host has of a program: what enters it there, and what waits there."""
    there = [v for v in program.block.inputs if v.layout.in_host]
    there += waiting_values(program.block)
    return sum(part_bytes(version, program.mesh) for version in there)


def waiting_values(block: Block) -> list[ShardedValue]:
    """What a block, or a loop in it, puts into the hosts' memory and brings back."""
    found: list[ShardedValue] = []
    for instruction in block.instructions:
        if isinstance(instruction, Relayout):
            if instruction.target.layout.in_host and instruction.target not in block.outputs:
                found.append(instruction.target)
        elif isinstance(instruction, Loop):
            found += waiting_values(instruction.body)
    return found


def part_bytes(version: ShardedValue, mesh: Sequence[int]) -> int:
    """Bytes of a device's part of a version, in its own memory or in that of its host."""
    if is_literal(version):
        return 0
    aval = version.atom.aval
    return math.prod(aval.shape) // cuts_product(version.layout, mesh) * itemsize(aval)
