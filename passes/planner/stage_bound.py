"""Whether stages can be quicker than what is known elsewhere, told by what units take alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopar.passes.planner.auto_stages import MOST_CLOCKED, NEEDING
from autopar.passes.planner.more_microbatches import WORTH_PRICING
from autopar.passes.planner.stage_clock import StageWork, step_seconds
from autopar.passes.planner.stage_costs import UnitCost, evenly
from autopar.passes.planner.stages_within import WORTH_PLANNING

FEW = 4  # times as many microbatches as stages: with more, stages of unequal work wait longer
UNEVEN = 1.07  # times what they take with fewer, what equal ones would: by trials of random units
MIXED = 1.05  # times what is known: on such sizes there may be some of the stages, if on others too


class KnownElsewhere(NamedTuple):
    """What a step takes that fits elsewhere, and the microbatches that stages may have.

    Stages on submeshes of one size that have an equal part of all units each are a bound for those
    of whole units, with any memory. Where that is above what is known on every size, none is
    priced. Where it is not on every size, stages of several sizes may be quicker than those of one,
    and sizes are priced as well on which the bound is hardly above it. Where one is found that may
    be quicker, multiples of a later one that is not so are left: their devices send more. Both are
    guesses.
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
        others = (
            _least_seconds(total.with_rows(count / other), num_stages, other, schedules)
            for other in self.counts
            if other != count
        )
        own = _least_seconds(total, num_stages, count, schedules)
        return min(own * WORTH_PLANNING, min(others, default=math.inf) * WORTH_PRICING)


def _least_seconds(
    total: UnitCost, num_stages: float, count: int, schedules: Sequence[str]
) -> float:
    """What a step takes in equal stages by the best schedule, as `StageSearch` has it.

    With few microbatches less: stages of unequal work may wait less than they.
    """
    if num_stages > MOST_CLOCKED or num_stages != int(num_stages):
        return evenly(total, num_stages, count)
    part, once = total.shared_by(int(num_stages)), total.once_seconds / num_stages
    works = [StageWork(part.forward_seconds, part.backward_seconds, once, 0.0)] * int(num_stages)
    chosen = {x for name in schedules for x in NEEDING[name]} if schedules[1:] else {*schedules}
    seconds = min(step_seconds(name, works, count) for name in sorted(chosen))
    return seconds / UNEVEN if count <= FEW * num_stages else seconds


NOTHING_ELSEWHERE = KnownElsewhere()
