"""How much the solver may still do: deterministic work, wall-clock time, or both."""

from __future__ import annotations

import time


class Budget:
    """Counts work, in units of about a second of one core of a recent server, and time.

    With a work limit alone everything that depends on a budget is deterministic.
    """

    def __init__(self, work_limit: float | None, time_limit: float | None) -> None:
        self.work_limit = work_limit
        self.time_limit = time_limit
        self.work = 0.0
        self._start = time.monotonic()

    def spend(self, work: float) -> None:
        self.work += work

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def used(self) -> float:
        """The used part of whichever limit is nearer, from 0 to 1."""
        used = 0.0
        if self.work_limit is not None:
            used = self.work / max(self.work_limit, 1e-9)
        if self.time_limit is not None:
            used = max(used, self.seconds / max(self.time_limit, 1e-9))
        return min(used, 1.0)

    @property
    def exhausted(self) -> bool:
        return self.used >= 1.0

    def share(self, part: float) -> tuple[float | None, float | None]:
        """A part of what is left, as (work, seconds); None where there is no limit."""
        work = None if self.work_limit is None else max(0.0, self.work_limit - self.work) * part
        seconds = None if self.time_limit is None else max(0.0, self.time_limit - self.seconds)
        return work, None if seconds is None else seconds * part
