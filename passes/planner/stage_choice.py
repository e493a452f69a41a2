"""`best_stages`: which consecutive layers form a stage, on how many devices, for least step time.

The search (`stage_search`) is exact: over every split of the layers, every assignment of submesh
sizes and every option that there are, under the memory limit with the microbatches that
1F1B keeps in flight on each stage. The objective is Alpa's (Zheng et al., OSDI 2022, section
5.2), and what is left to do once a step when the first stage is done with its microbatches, which
the others are before it: their last backward passes are before its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.passes.planner.stage_clock import StageWork
from autopar.passes.planner.stage_problem import Floats, StageKind, StageProblem
from autopar.passes.planner.stage_search import best_path

HARDLY_ANY = 1e-9  # of what a stage does: what sums are rounded by
ENOUGH_GAIN = 0.01  # of a step: less is not looked for in what stages do once a step


@dataclass(frozen=True)
class StageOption:
    """One way to run a range of layers on a submesh: what it costs and needs.

    Args:
      seconds: the time of one microbatch, forward and backward.
      bytes_fixed: bytes per device that do not depend on the microbatches in flight.
      bytes_per_microbatch: bytes per device for each microbatch in flight.
      remat: whether the forward pass is computed again; the search does not look at it.
      once_seconds: the time that the stage takes once a step (synchronisation, optimizer), or that
        another one waits for what it is sent then and works on with.
      hidden_seconds: what a microbatch waits beside, while the stage works on another one.
      casts: whether parameters are cast in every microbatch; the search does not look at it.
      forward_seconds: the part of `seconds` that is the forward pass, the first time; nor at it.
      sent_seconds: what a microbatch sends to the next stage is on its way; `seconds` has it twice,
        there and back, but for what is hidden; nor at it.
      awaited_seconds: from the beginning of a step until what the stage is sent once has arrived,
        without which it cannot begin.
    """

    seconds: float
    bytes_fixed: int
    bytes_per_microbatch: int
    remat: bool = False
    once_seconds: float = 0.0
    hidden_seconds: float = 0.0
    casts: bool = False
    forward_seconds: float = 0.0
    sent_seconds: float = 0.0
    awaited_seconds: float = 0.0

    @property
    def work(self) -> StageWork:
        """What the stage does, apart from what it sends."""
        own = self.seconds + self.hidden_seconds - 2 * self.sent_seconds
        backward = own - self.forward_seconds
        backward = backward if backward > HARDLY_ANY * own else 0.0
        once, sent = self.once_seconds, self.sent_seconds
        return StageWork(self.forward_seconds, backward, once, sent, self.awaited_seconds)

    def bytes_in_flight(self, microbatches: int) -> int:
        """Bytes per device with so many microbatches in flight."""
        return self.bytes_fixed + microbatches * self.bytes_per_microbatch


@dataclass(frozen=True, eq=False)
class StageOptions:
    """The options of stages on submeshes of so many devices, `[options, start, stop]` by cuts.

    As those of `StageOption`; where there are fewer options, the seconds are infinite.
    """

    devices: int
    seconds: Floats
    bytes_fixed: Floats
    bytes_per_microbatch: Floats
    remat: Floats
    once_seconds: Floats
    hidden_seconds: Floats
    casts: Floats
    forward_seconds: Floats
    sent_seconds: Floats
    awaited_seconds: Floats

    def option(self, place: int, start: int, stop: int) -> StageOption:
        """One of the options of layers start to stop (half open)."""
        return StageOption(
            seconds=float(self.seconds[place, start, stop]),
            bytes_fixed=int(self.bytes_fixed[place, start, stop]),
            bytes_per_microbatch=int(self.bytes_per_microbatch[place, start, stop]),
            remat=bool(self.remat[place, start, stop]),
            once_seconds=float(self.once_seconds[place, start, stop]),
            hidden_seconds=float(self.hidden_seconds[place, start, stop]),
            casts=bool(self.casts[place, start, stop]),
            forward_seconds=float(self.forward_seconds[place, start, stop]),
            sent_seconds=float(self.sent_seconds[place, start, stop]),
            awaited_seconds=float(self.awaited_seconds[place, start, stop]),
        )

    def of_range(self, start: int, stop: int) -> list[StageOption]:
        """The options of layers start to stop (half open)."""
        places = np.flatnonzero(np.isfinite(self.seconds[:, start, stop]))
        return [self.option(int(place), start, stop) for place in places]

    def late(self, early: Sequence[float]) -> Floats:
        """What each does once a step when the first stage is done with its microbatches.

        At the most: stages that begin at a cut are done so much earlier, at the least.
        """
        found: Floats = np.where(
            np.isfinite(self.seconds), self.once_seconds - np.asarray(early)[:, None], np.inf
        )
        return found

    def kind(
        self,
        num_microbatches: int,
        in_flight: Callable[[int], int],
        late: Floats,
        most: float,
        filled: Sequence[float],
    ) -> StageKind:
        """The stages as the search wants them, without those that are later than `most`.

        They wait for what they are sent once, but for the time in which those before them do the
        first microbatch in any case.
        """
        assert not np.isnan(self.seconds).any(), "an option without a cost"
        there = np.isfinite(self.seconds) & (late <= most)
        seconds = np.where(there, self.seconds, 0.0)
        waits = np.maximum(self.awaited_seconds - np.asarray(filled)[:, None], 0.0)
        return StageKind(
            devices=self.devices,
            weight=1,
            summed=np.where(there, seconds + self.hidden_seconds + waits, np.inf),
            bottleneck=np.where(there, (num_microbatches - 1) * seconds, np.inf),
            bytes_fixed=self.bytes_fixed,
            bytes_per_microbatch=self.bytes_per_microbatch,
            in_flight=lambda count: min(in_flight(count), num_microbatches),
        )


class StageRange(NamedTuple):
    """Layers `start` to `stop` (half open) on a submesh of `num_devices`, run as `option` says."""

    start: int
    stop: int
    num_devices: int
    option: StageOption


@dataclass(frozen=True)
class StageChoice:
    """The stages of a pipeline, first to last, and the step time that `best_stages` minimises."""

    stages: tuple[StageRange, ...]
    step_seconds: float

    @classmethod
    def of(
        cls,
        stages: Sequence[StageRange],
        num_microbatches: int,
        early: Sequence[float],
        filled: Sequence[float],
    ) -> StageChoice:
        """Some stages, with what `best_stages` minimises."""
        chosen = [(stage.start, stage.option) for stage in stages]
        each = sum(x.seconds + x.hidden_seconds for _, x in chosen)
        waits = sum(max(x.awaited_seconds - filled[start], 0.0) for start, x in chosen)
        slowest = (num_microbatches - 1) * max(x.seconds for _, x in chosen)
        late = max(x.once_seconds - early[start] for start, x in chosen)
        return cls(tuple(stages), each + waits + slowest + late)


class TimedChoice(NamedTuple):
    """Stages, by which schedule they were found, and the seconds of a step."""

    choice: StageChoice
    schedule: str
    seconds: float


def best_stages(
    options: Sequence[StageOptions],
    num_devices: int,
    *,
    num_microbatches: int,
    memory_limit: float | None,
    in_flight: Callable[[int], int] | None = None,
    at_most: float = math.inf,
    early: Sequence[float] = (),
    filled: Sequence[float] = (),
    gain: float = ENOUGH_GAIN,
) -> StageChoice | None:
    """The split into stages of least step time that uses all devices and fits; None without any.

    The step time is the sum over the stages of `seconds + hidden_seconds`, the largest over the
    stages of `(M - 1) * seconds`, and the largest of `once_seconds`, less what the stage is early.
    And how long stages wait for what they are sent once, after their first microbatch is there.
    Equally good choices: the one of fewest stages, then the first in the lexicographic order of
    (stop, num_devices, position of the option), stage by stage.

    That last part is limited, to less and less: to less than that of the best plan within the limit
    before. So every plan that another is not better than in both is looked at, or
    one that takes hardly longer.

    Args:
      options: for each number of devices that a stage may have, ascending; maybe none.
      num_devices: the devices that the stages share.
      num_microbatches: M.
      memory_limit: bytes per device; None: no limit.
      in_flight: the microbatches that a stage has in flight, by the number of stages from it to the
        last one, itself counted; None: 1F1B's, one for each.
      at_most: seconds of a step; splits that take longer are not looked for.
      early: by the layer with which a stage begins, how much earlier than the first one it is done
        with its microbatches; (): not at all.
      filled: by the layer with which a stage begins, when the first microbatch comes there at the
        least; (): at once.
      gain: by which part of a step the limit is lowered; the best plan may be as much better.

    >>> layers = np.triu(np.arange(7.0) - np.arange(7.0)[:, None])  # of stages from cut to cut
    >>> none = np.zeros((1, 7, 7))
    >>> def on(devices):
    ...     seconds = np.where(layers > 0, layers / devices, np.inf)[None]
    ...     return StageOptions(devices, seconds, 100 * layers[None], none + 10, *[none] * 7)
    >>> best = best_stages([on(1), on(2)], 3, num_microbatches=4, memory_limit=450)
    >>> [stage[:3] for stage in best.stages], best.step_seconds
    ([(0, 2, 1), (2, 6, 2)], 10.0)
    """
    if not options:
        return None
    num_layers = options[0].seconds.shape[1] - 1
    nothing = [0.0] * (num_layers + 1)
    late = [x.late(early or nothing) for x in options]
    successors = tuple(np.arange(cut + 1, num_layers + 1) for cut in range(num_layers + 1))
    best: StageChoice | None = None
    first: tuple[float, int, list[tuple[int, int, int]]] | None = None
    once = math.inf
    flight = in_flight or (lambda left: left)
    most = min(num_layers, num_devices // options[0].devices)
    at_least = _least_late(late)
    while once >= at_least:
        kinds = tuple(
            x.kind(num_microbatches, flight, own, once, filled or nothing)
            for x, own in zip(options, late, strict=True)
        )
        problem = StageProblem(successors, kinds, num_devices, most, memory_limit=memory_limit)
        path = best_path(problem, (at_most if best is None else best.step_seconds) - at_least)
        if path is None:
            break
        stages = list[StageRange]()
        for step in path.steps:
            chosen = options[step.kind]
            option = chosen.option(step.option, step.start, step.stop)
            stages.append(StageRange(step.start, step.stop, chosen.devices, option))
        longest = max(late[x.kind][x.option, x.start, x.stop] for x in path.steps)
        found = StageChoice(tuple(stages), float(path.cost + longest))
        runs = [(step.stop, options[step.kind].devices, step.option) for step in path.steps]
        order = found.step_seconds, len(runs), runs
        if found.step_seconds <= at_most and (first is None or order < first):
            best, first = found, order
        enough = gain * (found if best is None else best).step_seconds
        once = math.nextafter(longest - enough, -math.inf)
    return best


def _least_late(late: Sequence[Floats]) -> float:
    """What the latest stage does once a step at the least: the first one does, or the last."""
    places = (slice(None), 0, slice(None)), (slice(None), slice(None), -1)
    ends = ([x[at].min(initial=np.inf) for x in late] for at in places)
    return float(max(map(min, ends)))
