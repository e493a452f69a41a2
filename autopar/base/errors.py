"""Every error and warning that autopar raises on purpose.

An error says what is wrong, where (the user's file and line, an argument, a parameter's path),
why, and what to try. All derive from `AutoparError`, and all survive pickling, so they can cross
processes.
"""

from __future__ import annotations

import difflib
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from autopar.base.units import format_bytes

_WIDTH = 88


class AutoparError(Exception):
    """Something is wrong that the user can act on.

    Args:
      what: one sentence that names what is wrong.
      where: the user's `file:line`, the argument, or the parameter's path.
      why: the reason, in terms of the user's program.
      hint: what to try.

    >>> print(AutoparError("10 rows cannot be split into 4 microbatches.",
    ...                    where="train.py:31", hint="use microbatches=2 or 5."))
    10 rows cannot be split into 4 microbatches.
      where: train.py:31
      try:   use microbatches=2 or 5.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        hint: str | None = None,
    ):
        super().__init__(what)
        self.what, self.where, self.why, self.hint = what, where, why, hint

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = _WIDTH) -> str:
        """All that it says, in lines of so many columns."""
        labelled = (("where: ", self.where), ("why:   ", self.why), ("try:   ", self.hint))
        lines = [_wrap(self.what, "", "", width)]
        lines += [_wrap(text, "  " + label, " " * 9, width) for label, text in labelled if text]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class with `what` alone; the fields live in __dict__.
        return _rebuild, (type(self), self.args), self.__dict__


class OptionError(AutoparError, ValueError):
    """An option does not exist, or has a value that it cannot have."""


class BatchArgumentError(AutoparError, ValueError):
    """The batch argument is missing or ambiguous, or its size does not divide."""


class TraceError(AutoparError, TypeError):
    """The function cannot be traced to a program, or a leaf cannot be its argument."""


class InexactMicrobatchError(AutoparError, ValueError):
    """The step cannot be split into microbatches without changing its numbers."""


class PinError(AutoparError, ValueError):
    """A pinned sharding matches nothing, does not divide its tensor, or conflicts with another."""


class MemoryLimitError(AutoparError):
    """No plan fits the memory of a device.

    Args:
      what, where, why, hint: as in `AutoparError`; by default `why` names the least memory that
        would do and the largest tensors.
      least_bytes: the least bytes per device that some plan needs, or None where it is not known.
      largest_tensors: (path, bytes per device) of the largest tensors of that plan, largest first.
      least_plan: what that plan is, in words.
      would_fit: single changes with which a plan that fits was found, in words, cheapest first.
      state: how much of the least is the state, in words.
    """

    def __init__(
        self,
        what: str,
        *,
        why: str | None = None,
        least_bytes: int | None = None,
        largest_tensors: Sequence[tuple[str, int]] = (),
        least_plan: str = "",
        would_fit: Sequence[str] = (),
        state: str = "",
        **told: str | None,
    ):
        self.least_bytes = least_bytes
        self.least_plan, self.would_fit, self.state = least_plan, tuple(would_fit), state
        self.largest_tensors = tuple((str(path), int(size)) for path, size in largest_tensors)
        super().__init__(what, why=self._reason() if why is None else why, **told)

    def _reason(self) -> str | None:
        lines = []
        if self.least_bytes is not None:
            least = f"{format_bytes(self.least_bytes)} per device ({self.least_bytes:,} bytes)"
            using = f", with {self.least_plan}" if self.least_plan else ""
            lines.append(f"the least that was found to do is {least}{using}.")
        if self.state:
            lines.append(self.state)
        if self.largest_tensors:
            lines.append("the largest tensors per device are:")
            counts = Counter(self.largest_tensors)
            for (path, size), count in counts.items():
                times = "" if count == 1 else f"{count} of "
                lines.append(f"- {times}{path}: {format_bytes(size)}")
        return "\n".join(lines) or None


class ScheduleError(AutoparError, ValueError):
    """A pipeline schedule does not exist, is incomplete, deadlocks, or exceeds the memory."""


class PlanMismatchError(AutoparError, ValueError):
    """A plan cannot be read, or was made for another program, other options or another version."""


class MissingPlanError(PlanMismatchError, FileNotFoundError):
    """There is no plan file of that name."""

    def __new__(cls, *args: Any, **told: Any) -> MissingPlanError:
        """As Python asks of two bases: by that with more fields."""
        return FileNotFoundError.__new__(cls)


class MissingClusterError(OptionError, FileNotFoundError):
    """There is no cluster's file of that name."""

    def __new__(cls, *args: Any, **told: Any) -> MissingClusterError:
        """As that of `MissingPlanError`."""
        return FileNotFoundError.__new__(cls)


class DeviceError(AutoparError, RuntimeError):
    """There are fewer devices than the plan needs, or they are of the wrong kind."""


class ClusterError(AutoparError, RuntimeError):
    """The Ray cluster cannot be reached, or does not have what the plan needs."""


class StageError(AutoparError, RuntimeError):
    """A stage of a step that runs in several processes failed.

    Args:
      what, where, why, hint: as in `AutoparError`; `where` names the actor, the stage, the
        instruction and the microbatch.
      spot: the same as a value (`runtime.ray.actor.messages.Spot`), or None.
    """

    def __init__(self, what: str, *, spot: Any = None, **told: str | None):
        super().__init__(what, **told)
        self.spot = spot


class LostActorError(StageError):
    """The process of a stage died or does not answer, or the step was shut down."""


class CheckpointError(AutoparError, ValueError):
    """A checkpoint cannot be written or read, or does not fit the state."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's files are not as they were written, or cannot be read."""


class DonatedBufferError(AutoparError, RuntimeError):
    """A buffer that an earlier call consumed (donated) is used again."""


class AutoparWarning(UserWarning):
    """Something that does not change results, but costs time or memory."""


class UnknownPrimitiveWarning(AutoparWarning):
    """An operation without a sharding rule: every device computes it whole."""


class ConstraintWarning(AutoparWarning):
    """Sharding constraints of the step that the plan does not keep."""


class KernelWarning(AutoparWarning):
    """A kernel of autopar's does not work on a device; something slower takes its place."""


class DonationWarning(AutoparWarning):
    """A state that was to be donated cannot be, so it is kept alive beside the new one."""


def did_you_mean(word: Any, known: Iterable[str]) -> str | None:
    """A hint with the known name closest to `word`, in whatever case; None: none is close.

    >>> did_you_mean("ZB-H1", ["1f1b", "zb_h1"])
    "did you mean 'zb_h1'?"
    """
    by_lower = {name.lower(): name for name in known}
    closest = difflib.get_close_matches(str(word).lower(), by_lower, n=1)
    return f"did you mean {by_lower[closest[0]]!r}?" if closest else None


def _rebuild(kind: type[AutoparError], args: tuple[Any, ...]) -> AutoparError:
    error = kind.__new__(kind)
    error.args = args
    return error


def _wrap(text: str, first: str, rest: str, width: int) -> str:
    """Wraps every line of `text` for itself, so that lists in a message stay lists."""
    lines: list[str] = []
    for line in text.splitlines() or [""]:
        lines += textwrap.wrap(
            line,
            width,
            initial_indent=rest if lines else first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)


for _kind in list(globals().values()):
    if isinstance(_kind, type) and issubclass(_kind, AutoparError | AutoparWarning):
        _kind.__module__ = "autopar.errors"  # where users find it, and tracebacks name it
del _kind
