"""What the tasks of a schedule run: pieces of the stages' programs, and the values they pass on.

A piece is a block of the instructions that the intra-operator pass made, so what the plan lists and
prices is what runs (`cutting.py` makes them).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from autopar.passes.pipeline.instructions import (
    Piece,
    PieceKind,
    PipelineProgram,
    Value,
    ValueTransfer,
)
from autopar.passes.pipeline.parts import PipelineParts
from autopar.passes.schedules.schedule import Schedule
from autopar.passes.sharding.spmd_program import (
    Block,
    Instruction,
    ShardedValue,
    SpmdProgram,
    local_bytes,
)
from autopar.passes.slicing.stage_graphs import Rows


class Port(NamedTuple):
    """A value that enters or leaves a piece.

    `stacked`: the value exists once per microbatch, and the block sees them all as one stack.
    """

    value: int
    version: ShardedValue
    stacked: bool = False

    @property
    def form(self) -> Hashable:
        """Of what a device holds of it: two values alike in this can lie in the same memory."""
        aval, layout = self.version.atom.aval, self.version.layout
        return aval.shape, str(aval.dtype), layout._replace(partial=())


@dataclass(frozen=True)
class StagePiece:
    """A function that one stage's mesh runs: a block, and which values enter and leave it."""

    name: str
    stage: int
    kind: PieceKind
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    instructions: tuple[Instruction, ...]
    donates: tuple[int, ...]

    @property
    def block(self) -> Block:
        """The block that every device runs."""
        inputs, outputs = (tuple(p.version for p in ports) for ports in (self.inputs, self.outputs))
        return Block(inputs, self.instructions, outputs)

    def plain(self) -> Piece:
        """What the schedule needs to know of it."""
        reads, writes = (tuple(p.value for p in ports) for ports in (self.inputs, self.outputs))
        return Piece(self.name, self.stage, self.kind, reads, writes, self.donates)


@dataclass(frozen=True)
class Pieces:
    """A pipelined program, ready to be scheduled: what the meshes run, and what crosses between.

    Args:
      programs: the lowered program of every stage (its mesh and its axes' names).
      values: what pieces pass on.
      versions: the variable and layout of every value, by number (of one microbatch, if so).
      inputs: for every input leaf of the whole graph, the values that take it, by stage.
      outputs: for every output leaf of the whole graph, its value.
      inside: bytes per device that pieces need beside what they read and write, by name, once that
        was found out.
    """

    programs: tuple[SpmdProgram, ...]
    values: tuple[Value, ...]
    versions: Mapping[int, ShardedValue]
    pieces: tuple[StagePiece, ...]
    transfers: tuple[ValueTransfer, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    inside: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __str__(self) -> str:
        lines = [f"{len(self.pieces)} pieces, {len(self.transfers)} transfers"]
        for x in self.pieces:
            passed = f"{len(x.inputs)} values in, {len(x.outputs)} out"
            lines.append(f"  {x.name}: {len(x.instructions)} instructions, {passed}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Runnable:
    """What the meshes of a plan run: pieces, and in which order.

    `leaves`: for every leaf of the step's arguments (constants too), the leaves of the pieces'
    program that hold its rows: several, if a scan over layers was cut. `results`: the same for the
    leaves of what the step returns.
    """

    pieces: Pieces
    parts: PipelineParts
    schedule: Schedule
    leaves: Rows
    results: Rows

    @cached_property
    def program(self) -> PipelineProgram:
        """The instructions of every mesh, written when somebody wants to load or run them."""
        return self.parts.program(self.schedule)


@dataclass
class Numbers:
    """Numbers of values, given in order."""

    values: list[Value] = field(default_factory=list)
    versions: dict[int, ShardedValue] = field(default_factory=dict)

    def new(
        self,
        stage: int,
        version: ShardedValue,
        mesh: Sequence[int],
        per_microbatch: bool,
        label: str,
    ) -> int:
        """The number of one more value."""
        number = len(self.values)
        size = local_bytes(version, mesh)
        self.values.append(Value(number, stage, size, per_microbatch, label))
        self.versions[number] = version
        return number
