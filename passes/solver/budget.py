"""How much the solver may still do: deterministic work, wall-clock time, or both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

LOOK_EVERY = 32
"""How many of its steps a loop makes between two looks at the clock."""

Stop = Callable[[], bool]
"""Called before every step of a loop; True means that the loop must end now."""


class OutOfTime(Exception):
    """The time limit is reached within a step that cannot end early by itself."""


class Budget:
    """Counts work, in units of about a second of one core of a recent server, and time.

    With a work limit alone everything that depends on a budget is deterministic. `reserve` seconds
    of the time limit are kept for what must be done after the search.
    """

    def __init__(self, work_limit: float = math.inf, time_limit: float = math.inf) -> None:
        self.work_limit = work_limit
        self.time_limit = time_limit
        self.work = 0.0
        self.reserve = 0.0
        self._start = time.monotonic()

    def spend(self, work: float) -> None:
        self.work += work

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def used(self) -> float:
        """The used part of whichever limit is nearer, from 0 to 1."""
        work = self.work / max(self.work_limit, 1e-9)
        seconds = self.seconds / max(self.time_limit - self.reserve, 1e-9)
        return min(max(work, seconds), 1.0)

    @property
    def exhausted(self) -> bool:
        return self.used >= 1.0

    def keep(self, seconds: float) -> None:
        """Reserves at least so many seconds, but no more than a quarter of the time limit."""
        self.reserve = max(self.reserve, min(seconds, self.time_limit / 4))

    def check(self) -> None:
        """Raises OutOfTime at the time limit; the work limit has no say here."""
        if self.seconds >= self.time_limit - self.reserve:
            raise OutOfTime

    def fits(self, seconds: float) -> bool:
        """Whether a step that took so many seconds before still fits into the time limit."""
        return self.seconds + seconds < self.time_limit - self.reserve

    def left(self, until: float = 1.0) -> tuple[float, float]:
        """What is left until a part of the limits is used, as (work, seconds)."""
        seconds = (self.time_limit - self.reserve) * until - self.seconds
        return max(0.0, self.work_limit * until - self.work), max(0.0, seconds)

    def share(self, part: float) -> tuple[float, float]:
        """A part of what is left, as (work, seconds)."""
        work, seconds = self.left()
        return work * part, seconds * part

    def stopper(self, work: float, until: float = 1.0) -> Stop:
        """A `Stop` that spends `work` for every step and holds at the part `until` of the limit."""
        steps = 0

        def stop() -> bool:
            nonlocal steps
            self.work += work
            steps += 1
            return steps % LOOK_EVERY == 0 and self.used >= until

        return stop


def unlimited() -> None:
    """The check of a model that is not built within a budget."""


def never() -> bool:
    """The `Stop` of a loop without a limit."""
    return False
