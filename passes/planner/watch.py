"""What planning has found so far, for whom it takes too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from autopar.base.units import format_bytes, format_seconds
from autopar.passes.planner.candidates import PlannedStep


class PlanningTimeOutError(Exception):
    """The time for planning is over, and there is a plan."""


class PlanningWatch:
    """Reports progress, keeps what fits, and stops the search when its time is over.

    Args:
      report: takes a line of progress.
      time_limit: seconds from now after which planning stops once something fits; None: never.
      clock: seconds of some clock.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        time_limit: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report, self._clock = report, clock
        self._end = None if time_limit is None else clock() + time_limit
        self.kept: list[PlannedStep] = []
        self._missing: int | None = None  # bytes of a device, of what fits least badly

    def report(self, message: str) -> None:
        """Says what begins now, and what the best plan so far takes.

        Raises:
          PlanningTimeOutError: it shall not begin.
        """
        if self.kept:
            if self._end is not None and self._clock() >= self._end:
                raise PlanningTimeOutError
            best = min(self.kept, key=lambda candidate: candidate.step_seconds)
            spare = format_bytes(best.limit - max(best.peak_bytes))
            step = format_seconds(best.step_seconds)
            message += f" (best so far: {step} a step, {spare} a device to spare)"
        elif self._missing is not None:
            message += f" (nearest so far: {format_bytes(self._missing)} a device too much)"
        self._report(message)

    def left(self, most: float) -> float:
        """Seconds until the time for planning is over, or `most` of them."""
        return most if self._end is None else max(min(most, self._end - self._clock()), 0.0)

    def keep(self, candidates: Iterable[PlannedStep]) -> None:
        """Remembers those that fit, and how many bytes the others lack at least."""
        for candidate in candidates:
            missing = max(candidate.peak_bytes) - candidate.limit
            if missing <= 0:
                self.kept.append(candidate)
            elif self._missing is None or missing < self._missing:
                self._missing = missing
