"""Where the time of a step goes, by line of the user's code or of a library of models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from autopar.base.records import Record

MOST_LINES = 20
"""Lines that a plan has by themselves; the others are one record."""
LEAST_SHARE = 0.001
"""Of all lines, that each of these has at least."""


@dataclasses.dataclass(frozen=True)
class LineTime(Record):
    """What a line takes of a step, on a device of the mesh that has most to do.

    The rest of `seconds` that is in no pass is outside of what is differentiated: an optimizer, or
    a step without gradients.

    Args:
      source: `file.py:12`, the file's base name; "": all lines that are not told, or no line.
      function: in which the line is.
      operations: those of it that take longest, the first three; a collective with its purpose.
      product_seconds: of matrix products, convolutions and kernels.
      memory_seconds: of all other computation, which memory's bandwidth bounds.
      communication_seconds: of collectives, and of copies to and from hosts.
      forward_seconds: of it, in the forward pass.
      backward_seconds: in the backward pass.
      again_seconds: in the backward pass too, of the forward pass computed again.
      lines: how many lines it is.
    """

    source: str
    function: str
    operations: tuple[str, ...]
    product_seconds: float
    memory_seconds: float
    communication_seconds: float
    forward_seconds: float
    backward_seconds: float
    again_seconds: float
    lines: int = 1

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.product_seconds + self.memory_seconds + self.communication_seconds

    def plus(self, more: LineTime) -> LineTime:
        """Several lines as one that is not told."""
        numbers = {
            field.name: getattr(self, field.name) + getattr(more, field.name)
            for field in dataclasses.fields(self)
            if field.name.endswith("_seconds") or field.name == "lines"
        }
        return LineTime("", "", (), **numbers)


def together(lines: Sequence[LineTime]) -> LineTime:
    """Lines as one; a line alone stays what it is."""
    return functools.reduce(LineTime.plus, lines)


@dataclasses.dataclass(frozen=True)
class WrittenAttention(Record):
    """Attention that a step writes by hand, for which its devices have a kernel.

    Args:
      source: the line of the softmax, `file.py:12`.
      function: in which it is.
      seconds: of a step, what is computed of scores element by element and row by row.
      bound_seconds: how much shorter the step is at most if no scores are written or read.
      kernel: which they have: "cudnn" or "pallas".
    """

    source: str
    function: str
    seconds: float
    bound_seconds: float
    kernel: str


@dataclasses.dataclass(frozen=True)
class AlikeWork(Record):
    """Products or kernels of a line that several devices compute alike, as nothing was cut.

    Args:
      source: the line, `file.py:12`.
      function: in which it is.
      operation: what is computed.
      devices: how many compute the same.
      seconds: of a step, on each of them.
    """

    source: str
    function: str
    operation: str
    devices: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class StepLines(Record):
    """Where the time of a step goes: the lines that take longest, and all others as one.

    Args:
      lines: the longest first; the last one may have no source.
      attention: by hand, the lines that take longest first.
      alike: what several devices compute alike, the longest first; nothing short.
      checkpoint_seconds: of what is computed again, that which the program's own `jax.checkpoint`
        asks for.
      undone_seconds: of these, those that `remat="override"` saves if it may keep everything.
      undone_bytes: of a device, what it would keep for that.
    """

    lines: tuple[LineTime, ...]
    attention: tuple[WrittenAttention, ...] = ()
    alike: tuple[AlikeWork, ...] = ()
    checkpoint_seconds: float = 0.0
    undone_seconds: float = 0.0
    undone_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As of any record, without `attention` and `alike` where there is none."""
        plain = super().to_dict()
        for name in ("attention", "alike"):
            if not plain[name]:
                del plain[name]
        return plain
