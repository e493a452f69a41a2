"""What a compiler made of plans before one of them was taken, as plain data."""

from __future__ import annotations

import dataclasses

from autopar.base.records import Record
from autopar.base.units import format_bytes


@dataclasses.dataclass(frozen=True)
class CompiledTry(Record):
    """A plan that was compiled: bytes of the device that needs most, planned and compiled.

    `planned_within` are the bytes of a device that the plan was to keep within.
    """

    planned_within: int
    planned_bytes: int
    compiled_bytes: int


@dataclasses.dataclass(frozen=True)
class Confirmation(Record):
    """That a target's compiler fits a plan into the memory of a device.

    Args:
      target: what it was compiled for, as `confirm` names it.
      compiler: what its compiler calls itself.
      limit_bytes: what a device has for programs.
      tries: what was planned and compiled, one after the other; the last is the plan.
    """

    target: str
    compiler: str
    limit_bytes: int
    tries: tuple[CompiledTry, ...]

    @property
    def compiled_bytes(self) -> int:
        """What the plan takes of the device that needs most."""
        return self.tries[-1].compiled_bytes

    def __str__(self) -> str:
        taken, limit = format_bytes(self.compiled_bytes), format_bytes(self.limit_bytes)
        told = f"{self.compiler} takes {taken} of {limit} a device ({self.target})"
        before = [x for x in self.tries[:-1] if x.compiled_bytes > self.limit_bytes]
        if before:
            too_large = ", ".join(format_bytes(x.compiled_bytes) for x in before)
            told += f"; {too_large} of what was planned before"
        if self.tries[-1].planned_bytes > self.limit_bytes:
            told += "; by autopar's estimate it would not fit"
        return told
