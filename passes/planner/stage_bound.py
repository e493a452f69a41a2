"""Whether stages can be quicker than what is known elsewhere, told by what units take alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopar.passes.planner.auto_stages import NEEDING, StageSearch
from autopar.passes.planner.more_microbatches import WORTH_PRICING
from autopar.passes.planner.stage_clock import MOST_CLOCKED, StageWork, step_seconds
from autopar.passes.planner.stage_costs import UnitCost, evenly
from autopar.passes.planner.stages_within import WORTH_PLANNING

FEW = 4  # times as many microbatches as stages: with more, stages of unequal work wait longer
UNEVEN = 1.07  # times what they take with fewer, what equal ones would: by trials of random units
INEXACT = 1.025  # times what stages may take, that the search finds of many units: by trials, too
MIXED = 1.05  # times what is known: on such sizes there may be some of the stages, if on others too


class KnownElsewhere(NamedTuple):
    """What a step takes that fits elsewhere, and the microbatches that stages may have.

    Stages on submeshes of one size that have an equal part of all units each are a bound for those
    of whole units, with any memory. Where that is above what is known on every size, none is
    priced. Where it is not on every size, stages of several sizes may be quicker than those of one,
    and sizes are priced as well on which the bound is hardly above it. Where one is found that may
    be quicker, multiples of a later one that is not so are left: their devices send more. Both are
    guesses. What is worth pricing so is no more where stages of whole units are too slow.
    """

    seconds: float = math.inf
    counts: tuple[int, ...] = ()

    def hopeful(self, sizes: Sequence[int], least: Callable[[int, float], float]) -> list[int]:
        """The sizes of submesh that are worth pricing.

        Args:
          sizes: all of them, ascending.
          least: what `least` says of a size at the least; exactly, if it is below some seconds.
        """
        if math.isinf(self.seconds):
            return [*sizes]
        if all(least(size, self.seconds) >= self.seconds for size in sizes):
            return []
        found, missed, most = dict[int, float](), list[int](), MIXED * self.seconds
        for size in sizes:
            if any(size % other == 0 for other in missed):
                continue
            seconds = least(size, most)
            if seconds < most:
                found[size] = seconds
            elif min(found.values(), default=math.inf) < self.seconds:
                missed.append(size)
        return [*found]

    def longest(self, count: int, num_stages: int) -> float:
        """What stages may take at the most, each after the other for the first microbatch.

        That is more than they do take, by so much at the most.
        """
        return self.seconds * (count + num_stages - 1) / count

    def least(
        self, total: UnitCost, num_stages: float, count: int, schedules: Sequence[str]
    ) -> float:
        """What has to be known at the most, for stages to be planned.

        Or to be priced with other numbers of microbatches. What is expected of stages has to be
        less by some margin, for either. With few microbatches stages of unequal work wait less than
        equal ones: how much less is a guess.

        Args:
          total: units of a step one after the other, on a submesh.
          num_stages: of as many devices.
          count: microbatches with which the units were priced.
          schedules: by which stages are chosen.
        """
        is_clocked = num_stages <= MOST_CLOCKED and num_stages == int(num_stages)
        clocked, least = list[tuple[float, float, _EqualStages]](), math.inf
        for other, margin in self._margins(count).items():
            rows = total.with_rows(count / other) if other != count else total
            if not is_clocked:
                least = min(least, margin * evenly(rows, num_stages, other))
                continue
            few = margin / UNEVEN if other <= FEW * num_stages else margin
            stages = _EqualStages.of(rows, int(num_stages), other)
            clocked.append((few * stages.least_seconds, few, stages))
        for bound, margin, stages in sorted(clocked):
            if bound < least:  # else no schedule is quicker
                least = min(least, margin * stages.seconds(schedules))
        return least

    def beaten_with(
        self, stages: StageSearch, counts: Sequence[int], limit: int = sys.maxsize
    ) -> list[int]:
        """Microbatches with which stages of whole units are quick enough to be planned or priced.

        Of many units that are alike: of few others may be quicker than the search finds.

        Args:
          stages: the search with the microbatches that units were priced with.
          counts: the numbers that are left.
          limit: bytes that a device may hold.
        """
        return [*self.submeshes_with(stages, counts, limit)]

    def submeshes_with(
        self, stages: StageSearch, counts: Sequence[int], limit: int = sys.maxsize
    ) -> dict[int, set[int]]:
        """For each such number of microbatches, the sizes of submesh that the quickest have."""
        margins, quick = self._margins(stages.num_microbatches), dict[int, set[int]]()
        for count in counts:
            most = INEXACT * self.seconds / margins[count]
            if (found := stages.with_microbatches(count).within(limit, most)) is not None:
                quick[count] = {*found[0].devices}
        return quick

    def _margins(self, own: int) -> dict[int, float]:
        """By numbers of microbatches, how many times less stages have to take than is known.

        Their `own` is the one with which units were priced.
        """
        return {own: WORTH_PLANNING} | {x: WORTH_PRICING for x in self.counts if x != own}


class _EqualStages(NamedTuple):
    """What each of some equal stages does, and with how many microbatches."""

    num_microbatches: int
    num_stages: int
    work: StageWork

    @classmethod
    def of(cls, total: UnitCost, num_stages: int, count: int) -> _EqualStages:
        """Stages that have an equal part of all units each."""
        part, once = total.shared_by(num_stages), total.once_seconds / num_stages
        work = StageWork(part.forward_seconds, part.backward_seconds, once, 0.0)
        return cls(count, num_stages, work)

    @property
    def least_seconds(self) -> float:
        """By any schedule: the last stage waits for the first forward passes of all others."""
        each = self.work.forward + self.work.backward
        waits = (self.num_stages - 1) * self.work.forward
        return waits + self.num_microbatches * each + self.work.once

    def seconds(self, schedules: Sequence[str]) -> float:
        """What a step takes by the best schedule, as `StageSearch` has it."""
        chosen = {x for name in schedules for x in NEEDING[name]} if schedules[1:] else {*schedules}
        least = math.inf
        if "1f1b" in chosen:  # others that do not divide the backward pass are no quicker then
            chosen -= {"1f1b", "eager_1f1b"}
            least = self.least_seconds + (self.num_stages - 1) * self.work.backward
        works = [self.work] * self.num_stages
        clocks = (step_seconds(name, works, self.num_microbatches) for name in sorted(chosen))
        return min(least, min(clocks, default=math.inf))


NOTHING_ELSEWHERE = KnownElsewhere()
