"""What every mesh executes: one list of instructions, the same for simulator and runtimes.

A *value* is an array that a piece of a stage's program reads or writes; a *buffer* is a value that
exists: once a step (state, batch, accumulators), or once for every microbatch. Every instruction
has the buffers that it `reads` and `writes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from autopar.base.units import format_bytes
from autopar.passes.schedules.schedule import Schedule

PieceKind = Literal["prologue", "F", "B", "W", "epilogue"]


class Buffer(NamedTuple):
    """A value of one microbatch, or of the whole step (`microbatch` is None).

    >>> print(Buffer(7, None), Buffer(8, 2))
    %7 %8[2]
    """

    value: int
    microbatch: int | None

    def __str__(self) -> str:
        return f"%{self.value}" + ("" if self.microbatch is None else f"[{self.microbatch}]")


Buffers: TypeAlias = tuple[Buffer, ...]
Names: TypeAlias = Callable[[Buffer], str]


@dataclass(frozen=True)
class Value:
    """An array that a stage holds, by the number that buffers, pieces and transfers call it.

    Its bytes are those on each device of the stage's mesh, of one microbatch if every microbatch
    has one of its own. The label is for people: a parameter's path, "activation", "gradient".
    """

    number: int
    stage: int
    bytes_per_device: int
    per_microbatch: bool
    label: str


@dataclass(frozen=True)
class Piece:
    """A function of one stage's program.

    Args:
      name: unique in the program.
      stage: the stage that runs it.
      kind: when: before the microbatches, for each one (F, B, W), or after them.
      reads: value numbers. A prologue or epilogue piece reads and writes a value that exists per
        microbatch as a whole: all its microbatches in order.
      writes: value numbers. A value of the whole step that F, B or W read *and* write is updated in
        place, microbatch by microbatch; one that they only write is added up by `Accumulate`.
      donates: of those that it reads, the ones whose memory it may take: a `Run` takes it where
        nothing else needs the value any more.
    """

    name: str
    stage: int
    kind: PieceKind
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    donates: tuple[int, ...] = ()


@dataclass(frozen=True)
class ValueTransfer:
    """A value (number) that another stage needs under a number of its own."""

    source: int
    target: int


class _Printed:
    """An instruction that prints itself with its buffers' numbers."""

    @property
    def gone(self) -> Buffers:
        """The buffers that it frees or takes over."""
        return ()

    def text(self, names: Names) -> str:
        """The instruction in one line, its buffers by these names."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text(str)


@dataclass(frozen=True)
class Run(_Printed):
    """Run a piece; a buffer that it donates is gone, or overwritten if it is also written."""

    piece: str
    stage: int
    kind: PieceKind
    microbatch: int | None
    reads: Buffers
    writes: Buffers
    donates: Buffers = ()

    @property
    def gone(self) -> Buffers:
        return self.donates

    @property
    def label(self) -> str:
        """The piece and its microbatch, as `F1[0]`."""
        return self.piece + ("" if self.microbatch is None else f"[{self.microbatch}]")

    def text(self, names: Names) -> str:
        donates = f" donates {_listed(self.donates, names)}" if self.donates else ""
        writes, reads = _listed(self.writes, names), _listed(self.reads, names)
        return f"run        {self.label}: ({reads}) -> ({writes}){donates}"


@dataclass(frozen=True)
class Send(_Printed):
    """Start one packed transfer to mesh `to`; the sender goes on without waiting.

    The tag is unique in the program; the `Recv` on the other mesh has the same. The buffers have
    the sender's numbers.
    """

    tag: int
    to: int
    buffers: Buffers
    writes: ClassVar[Buffers] = ()

    @property
    def label(self) -> str:
        return f"send {self.tag} to mesh {self.to}"

    @property
    def reads(self) -> Buffers:
        return self.buffers

    def text(self, names: Names) -> str:
        return f"send       #{self.tag} to mesh {self.to}: {_listed(self.buffers, names)}"


@dataclass(frozen=True)
class Recv(_Printed):
    """Wait for the transfer with this tag from mesh `source`.

    The buffers have the receiver's numbers, in the order of the `Send`.
    """

    tag: int
    source: int
    buffers: Buffers
    reads: ClassVar[Buffers] = ()

    @property
    def label(self) -> str:
        return f"recv {self.tag} from mesh {self.source}"

    @property
    def writes(self) -> Buffers:
        return self.buffers

    def text(self, names: Names) -> str:
        return f"recv       #{self.tag} from mesh {self.source}: {_listed(self.buffers, names)}"


@dataclass(frozen=True)
class Reshard(_Printed):
    """Give another stage of the same mesh a buffer, in the layout in which that stage wants it."""

    source: Buffer
    target: Buffer

    @property
    def label(self) -> str:
        return f"reshard {self.source} to {self.target}"

    @property
    def reads(self) -> Buffers:
        return (self.source,)

    @property
    def writes(self) -> Buffers:
        return (self.target,)

    def text(self, names: Names) -> str:
        return f"reshard    {names(self.source)} -> {names(self.target)}"


@dataclass(frozen=True)
class Accumulate(_Printed):
    """Add a microbatch's part to a sum; a target that does not exist yet begins as the part."""

    target: Buffer
    addend: Buffer

    @property
    def label(self) -> str:
        return f"accumulate {self.addend} into {self.target}"

    @property
    def reads(self) -> Buffers:
        return (self.addend,)

    @property
    def writes(self) -> Buffers:
        return (self.target,)

    def text(self, names: Names) -> str:
        return f"accumulate {names(self.target)} += {names(self.addend)}"


@dataclass(frozen=True)
class Free(_Printed):
    """Forget buffers: this list does not use them again (a transfer of one may still be under way).

    An `Accumulate` may have made two buffers of one array, so this drops references and nothing
    more.
    """

    buffers: Buffers
    reads: ClassVar[Buffers] = ()
    writes: ClassVar[Buffers] = ()
    label: ClassVar[str] = "free"

    @property
    def gone(self) -> Buffers:
        return self.buffers

    def text(self, names: Names) -> str:
        return f"free       {_listed(self.buffers, names)}"


Instruction: TypeAlias = Run | Send | Recv | Reshard | Accumulate | Free


@dataclass(frozen=True)
class PipelineProgram:
    """The instructions of every mesh for one step.

    Args:
      schedule: the schedule that they follow.
      values, pieces: what they are about.
      meshes: for every mesh, its instructions in order.
      order: (mesh, index) of all instructions in one order in which one process can dispatch them:
        a `Recv` after its `Send`, and no mesh waits while another's list is dispatched ahead.
      inputs: numbers of the values that the caller gives. They stay alive unless donated.
      outputs: numbers of the values that the caller takes.
      donated: numbers of the inputs that the caller gives up.
    """

    schedule: Schedule
    values: tuple[Value, ...]
    pieces: tuple[Piece, ...]
    meshes: tuple[tuple[Instruction, ...], ...]
    order: tuple[tuple[int, int], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...] = ()

    @cached_property
    def value_of(self) -> Mapping[int, Value]:
        """Every value by its number."""
        return {value.number: value for value in self.values}

    def buffers_of(self, number: int) -> Buffers:
        """The buffers of a value: one, or one for every microbatch."""
        if self.value_of[number].per_microbatch:
            return tuple(Buffer(number, i) for i in range(self.schedule.num_microbatches))
        return (Buffer(number, None),)

    def buffers_on(self, mesh: int, numbers: Iterable[int]) -> list[Buffer]:
        """The buffers of those of these values that a mesh holds."""
        return [b for n in numbers if self.mesh_of(n) == mesh for b in self.buffers_of(n)]

    def mesh_of(self, number: int) -> int:
        """The mesh that holds a value."""
        return self.schedule.mesh_of_stage[self.value_of[number].stage]

    def __str__(self) -> str:
        names = buffer_names(self.values)
        lines = [
            f"{self.schedule.name}, {self.schedule.num_stages} stages on "
            f"{self.schedule.num_meshes} meshes, {self.schedule.num_microbatches} microbatches"
        ]
        for mesh, instructions in enumerate(self.meshes):
            given = self.buffers_on(mesh, self.inputs)
            size = sum(self.value_of[b.value].bytes_per_device for b in given)
            lines.append(f"mesh {mesh}, {format_bytes(size)} of inputs per device:")
            width = len(str(max(len(instructions) - 1, 0)))
            lines += [f"  {i:>{width}}  {x.text(names)}" for i, x in enumerate(instructions)]
        return "\n".join(lines)


def buffer_names(values: tuple[Value, ...]) -> Names:
    """Buffers by their values' labels, with the number where a label is not unique."""
    labels = Counter(value.label for value in values)
    names = {
        v.number: v.label if v.label and labels[v.label] == 1 else f"{v.label}%{v.number}"
        for v in values
    }

    def name(buffer: Buffer) -> str:
        index = "" if buffer.microbatch is None else f"[{buffer.microbatch}]"
        return names.get(buffer.value, f"%{buffer.value}") + index

    return name


def _listed(buffers: Buffers, names: Names) -> str:
    return ", ".join(map(names, buffers))
