"""What a compiler says of the programs that it made, as plain data."""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.base.records import Record
from autopar.base.units import format_bytes


@dataclasses.dataclass(frozen=True)
class ProgramMemory(Record):
    """Bytes of one device for a compiled program.

    Args:
      arguments: of all that it takes.
      outputs: of all that it returns.
      aliased: of what it returns in the memory of donated arguments.
      temporaries: of what it needs while it runs, at its own worst moment.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @classmethod
    def of(cls, analysis: Any) -> ProgramMemory:
        """From XLA's `memory_analysis()`, an object or a dictionary of its fields."""

        def size(name: str) -> int:
            key = f"{name}_size_in_bytes"
            return int(analysis[key] if isinstance(analysis, dict) else getattr(analysis, key))

        return cls(size("argument"), size("output"), size("alias"), size("temp"))

    @property
    def total(self) -> int:
        """What a device must have for the program."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def __str__(self) -> str:
        arguments, outputs, aliased, temporaries, total = map(
            format_bytes,
            (self.arguments, self.outputs, self.aliased, self.temporaries, self.total),
        )
        return (
            f"{total}: arguments {arguments}, results {outputs} (of which {aliased} in the memory "
            f"of arguments), temporary {temporaries}"
        )


def sent_bytes(kind: str, size: int, times: int) -> int:
    """What a step sends by collectives of so many bytes; an all-reduce sends all twice."""
    return (2 if kind == "all-reduce" else 1) * times * size


@dataclasses.dataclass(frozen=True)
class CompiledCollective(Record):
    """A collective in a compiled program, as in a plan's list: of `axes`, in so many trips.

    `bytes` are those of one run, of all collectives of that kind, axes and number of trips.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    times: int


@dataclasses.dataclass(frozen=True)
class CollectiveChange(Record):
    """What a pass of the compiler made of collectives of one kind over the same axes.

    Args:
      compiler_pass: its name.
      kind, axes, times: of the collectives, and how often a step runs them.
      before, after: their bytes, of one run.
    """

    compiler_pass: str
    kind: str
    axes: tuple[str, ...]
    times: int
    before: int
    after: int

    def __str__(self) -> str:
        often = "" if self.times == 1 else f", {self.times} times a step"
        sizes = f"{format_bytes(self.before)} became {format_bytes(self.after)}"
        return f"{self.kind} over {' '.join(self.axes)}{often}: {sizes} in {self.compiler_pass}"


@dataclasses.dataclass(frozen=True)
class EstimatedTime(Record):
    """What a compiler thinks that kernels of one kind take in a run of a program.

    Args:
      kind: "products", "collectives" or "rest"; "computation": all but collectives.
      seconds: of those that it has an estimate of.
      kernels: how many there are, one in a loop as often as it runs; 0 where nobody says.
      unknown: of them, those that it has no estimate of.
    """

    kind: str
    seconds: float
    kernels: int = 0
    unknown: int = 0


@dataclasses.dataclass(frozen=True)
class CompiledBuffer(Record):
    """Buffers that are alike in a program's temporary memory at its worst moment.

    Args:
      bytes: of one, on a device.
      shape: as XLA writes it.
      operation: that makes it, with the names of what it stands in.
      count: how many there are.
      source: the user's line, "" where none is known.
    """

    bytes: int
    shape: str
    operation: str
    count: int
    source: str = ""


@dataclasses.dataclass(frozen=True)
class ProgramFinding(Record):
    """What a compiler made of one program, or why it made nothing of it.

    Args:
      memory: of one device.
      flops, bytes_accessed: what the compiler counts, 0 where it does not.
      collectives: what it keeps.
      changes: the passes that changed collectives, where it keeps others than it was given.
      buffers: its temporaries at the worst moment; none where nobody says.
      times: what the compiler thinks that its kernels take; none where it does not say.
      warnings: what JAX and the compiler said of it.
      not_taken: the numbers of a step's donated leaves whose memory no result took.
      seconds: how long it compiled.
      failure: the compiler's words where it failed; "" else.
    """

    memory: ProgramMemory | None = None
    flops: float = 0.0
    bytes_accessed: float = 0.0
    collectives: tuple[CompiledCollective, ...] = ()
    changes: tuple[CollectiveChange, ...] = ()
    buffers: tuple[CompiledBuffer, ...] = ()
    times: tuple[EstimatedTime, ...] = ()
    warnings: tuple[str, ...] = ()
    not_taken: tuple[int, ...] = ()
    seconds: float = 0.0
    failure: str = ""

    @property
    def traffic(self) -> int:
        """The bytes that a run sends by its collectives."""
        return sum(sent_bytes(x.kind, x.bytes, x.times) for x in self.collectives)
