"""How far a plan's numbers are from those of the plain function, as plain data."""

from __future__ import annotations

import dataclasses

from autopar.base.records import Record


@dataclasses.dataclass(frozen=True)
class LeafError(Record):
    """The largest difference of an output leaf, over the largest number that it has.

    Args:
      path: of the leaf in what the step returns, as plans spell it: `result[1]['loss']`.
      error: of the plan's numbers; infinite where only one of both has a NaN or an infinity.
      tolerance: what rounding explains.
    """

    path: str
    error: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.error <= self.tolerance


@dataclasses.dataclass(frozen=True)
class FirstDifference(Record):
    """The first operation whose numbers differ when its operands are the plain function's.

    Args:
      operation: its name.
      source: the user's line.
      error: as of a leaf.
      layouts: how operands and results lie on the devices.
    """

    operation: str
    source: str
    error: float
    layouts: str

    def __str__(self) -> str:
        return f"{self.operation} at {self.source or 'no line'} ({self.layouts}): {self.error:.1e}"


@dataclasses.dataclass(frozen=True)
class NumericsRecord(Record):
    """The fields of a `Numerics`.

    Args:
      plan: in one line.
      devices: that ran it.
      own: by leaf, in the program's own dtypes.
      float64: by leaf, with all floats in float64; empty where that was not possible.
      not_float64: why not; "" where it was.
      first_difference: where numbers part, if they do and it was found.
      note: what else is to say of that.
    """

    plan: str
    devices: str
    own: tuple[LeafError, ...]
    float64: tuple[LeafError, ...]
    not_float64: str = ""
    first_difference: FirstDifference | None = None
    note: str = ""

    @property
    def differing(self) -> tuple[str, ...]:
        """The paths of leaves that rounding does not explain."""
        wrong = [x.path for x in (*self.float64, *self.own) if not x.agrees]
        return tuple(dict.fromkeys(wrong))

    @property
    def agrees(self) -> bool:
        """Whether the plan computes what the function says."""
        return not self.differing
