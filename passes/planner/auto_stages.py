"""Stages chosen automatically: layers, submeshes and logical meshes by an exact dynamic program.

The model is cut into units (layers, or blocks of them), and every kind of unit is planned alone on
every size of submesh: on each logical mesh as if memory were free, and again with a price for every
byte; where equal stages do not fit so, also casting parameters in every microbatch. A stage of some
units is run in one of these ways, on one mesh and at one price; it costs what its units cost, and
what crosses its end. It may keep what its forward pass made, or compute it again. No candidate
split is planned or compiled itself; the chosen one is planned afterwards as a whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autopar.base.cluster import Cluster
from autopar.base.transfer_costs import MeshLinks, seconds_to_next
from autopar.passes.planner.divided_backward import DIVIDING, may_fit_divided
from autopar.passes.planner.layouts import ExpectedSeconds, StageLayout
from autopar.passes.planner.moved_cuts import hardly_waits, moved_cuts
from autopar.passes.planner.sent_once import OnceSent
from autopar.passes.planner.stage_choice import (
    StageChoice,
    StageOption,
    StageOptions,
    StageRange,
    TimedChoice,
    best_stages,
)
from autopar.passes.planner.stage_clock import MOST_CLOCKED, StageWork, in_flight_by, step_seconds
from autopar.passes.planner.stage_costs import Way, busy_seconds, equal_runs, least_before
from autopar.passes.planner.stage_options import RangeTotals, StageTransfers

# Of many units, stages that are alike are taken where they are about as good: they are planned
# once, and people can read them.
MANY_UNITS = 16
UNITS_OF_A_KIND = 4
ABOUT_AS_GOOD = 1.03
# Times what stages take: what the dynamic program thinks that they do is not more, mostly.
UNSURE = 1.5
MAY_FIT = 1.1  # times the limit that units may need of stages that are not ruled out
# By the schedule for whose microbatches in flight stages were found: those that keep no more.
NEEDING = {"1f1b": ("1f1b", "zb_h1"), "eager_1f1b": ("1f1b", "eager_1f1b", "zb_h1", "zb_h2")}
# Schedules with which a stage need not wait for what it has sent to come back.
HIDES_TRANSFERS = ("eager_1f1b",)


OptionsKey = tuple[Any, ...]
"""A size of submesh, whether transfers are hidden, the ways, and what else the options hang on."""


@dataclass(frozen=True)
class StageSearch:
    """The units of a step with its batch split, and what they cost on submeshes.

    Args:
      starts: the layers at which units begin.
      crossing: what passes from each unit to the next, in bytes of one microbatch.
      inside: whether a stage that begins with a unit keeps what it receives beside all else.
      once: what passes once a step.
      ways: for each size of submesh.
      num_microbatches: of the step.
      cluster: all devices.
      remat: as in the options.
      schedules: by which the stages may be run.
      meshes: the logical mesh of each of the ways.
      known: what stages of some ways cost, shared by searches of the same units.
    """

    starts: tuple[int, ...]
    crossing: tuple[int, ...]
    inside: tuple[bool, ...]
    once: tuple[OnceSent, ...]
    ways: dict[int, list[Way]]
    num_microbatches: int
    cluster: Cluster
    remat: str | None
    schedules: tuple[str, ...] = ("1f1b",)
    meshes: Mapping[int, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    known: dict[OptionsKey, StageOptions] = field(default_factory=dict, compare=False, repr=False)

    def within(self, limit: int, at_most: float = math.inf) -> tuple[StageLayout, float] | None:
        """The stages with the least step time that fit, and that time; None where none do.

        Those that the dynamic program finds, on submeshes of any size, by the schedule that is
        quickest for them; and where devices wait there, on submeshes of one size.

        Args:
          limit: bytes that a device may hold.
          at_most: seconds of a step; stages that take longer are not looked for.
        """
        if self._least_seconds > at_most:
            return None
        most = UNSURE * at_most
        tried = [(self._choice(limit, name, most), name) for name in self._tried(limit)]
        found = [(choice, name) for choice, name in tried if choice is not None]
        made = [self._timed(choice, name, limit) for choice, name in found]
        if not made:
            return None
        first = min(range(len(made)), key=lambda i: made[i].seconds)
        least = made[first].seconds
        if not hardly_waits(found[first][0], least, self._own_seconds) and len(self._sizes) > 1:
            made += self._of_equal_devices(limit, min(at_most, least))
        best = min(made, key=lambda timed: timed.seconds)
        return (self._layout(best, limit), best.seconds) if best.seconds <= at_most else None

    @cached_property
    def _least_seconds(self) -> float:  # devices share what keeps them busy
        return self.num_microbatches * busy_seconds(self.ways) / self.cluster.num_devices

    def _tried(self, limit: int) -> Sequence[str]:  # with any memory, the one that hides most
        return self.schedules[-1:] if limit == sys.maxsize else self.schedules

    @cached_property
    def _sizes(self) -> list[int]:
        return [size for size, ways in self.ways.items() if ways]

    def bound(self, limit: int, at_most: float = math.inf) -> float:
        """The dynamic program's objective, of the best stages that fit; infinite where none do.

        A step takes at most so long, as far as units tell.

        Args:
          limit: bytes that a device may hold.
          at_most: seconds; what takes longer is not looked for.
        """
        best = math.inf
        for name in reversed(self.schedules) if self._least_seconds <= at_most else ():
            found = self._choice(limit, name, at_most, better_than=best)
            best = best if found is None else min(best, found.step_seconds)
        return best

    def of_equal_devices(
        self, limit: int, at_most: float = math.inf
    ) -> list[tuple[StageLayout, float]]:
        """The best stages on submeshes of one size, for each size, as `within`; the quickest first.

        Args:
          limit: bytes that a device may hold.
          at_most: seconds of a step; stages that take longer are not looked for.
        """
        made = self._of_equal_devices(limit, at_most)
        return [(self._layout(timed, limit), timed.seconds) for timed in made]

    def _of_equal_devices(self, limit: int, at_most: float) -> list[TimedChoice]:
        made, most = list[TimedChoice](), UNSURE * at_most
        for size in self._sizes:
            found = [(self._choice(limit, name, most, size), name) for name in self._tried(limit)]
            several = [self._timed(x, name, limit) for x, name in found if x is not None]
            made += sorted(several, key=lambda timed: timed.seconds)[:1]
        fitting = (timed for timed in made if timed.seconds <= at_most)
        return sorted(fitting, key=lambda timed: timed.seconds)

    def _timed(self, found: StageChoice, name: str, limit: int) -> TimedChoice:
        """Stages that were found by a schedule, their cuts moved where that is quicker."""
        if len(found.stages) > MOST_CLOCKED:
            return TimedChoice(found, name, found.step_seconds)
        if self._is_regular(found):
            return TimedChoice(found, name, self._seconds_by(found.stages, name, limit))
        choice, seconds = self._with_moved_cuts(found, name, limit)
        return TimedChoice(choice, name, seconds)

    def _layout(self, timed: TimedChoice, limit: int) -> StageLayout:
        choice, name, _ = timed
        asked = choice.stages, self.ways, self.inside, self.num_microbatches, MAY_FIT * limit
        return StageLayout(
            tuple(self.starts[stage.start] for stage in choice.stages[1:]),
            tuple(stage.num_devices for stage in choice.stages),
            tuple(stage.option.remat for stage in choice.stages),
            name if len(self.schedules) > 1 else "",
            self._expected(choice, limit, name) if self.meshes else (),
            tuple(stage.option.casts for stage in choice.stages),
            may_fit_divided(DIVIDING[0], *asked),
        )

    def _seconds_by(self, stages: Sequence[StageRange], found_for: str, limit: int) -> float:
        """What a step takes in such stages, by the best of the schedules that need no more memory.

        By one that divides the backward pass too, where schedules are chosen automatically and all
        stages may fit divided.
        """
        works = self._works(stages)
        names: Iterable[str] = [found_for]
        if len(self.schedules) > 1:
            asked = stages, self.ways, self.inside, self.num_microbatches, limit
            needing = NEEDING[found_for]
            names = (x for x in needing if x not in DIVIDING or may_fit_divided(x, *asked))
        return min(step_seconds(name, works, self.num_microbatches) for name in names)

    def _works(self, stages: Sequence[StageRange]) -> list[StageWork]:
        """What stages do, one after another, and send: over the links between unequal meshes."""
        works = [stage.option.work for stage in stages]
        sizes = [stage.num_devices for stage in stages]
        if len(set(sizes)) == 1:
            return works
        pairs = [*itertools.pairwise(range(len(stages)))]
        links = MeshLinks(self.cluster, sizes, [*pairs, *((j, i) for i, j in pairs)])
        for i, j in pairs:
            moved = self.crossing[stages[i].stop - 1]
            sent = max(links.seconds(i, j, moved), links.seconds(j, i, moved)) if moved else 0.0
            works[i] = works[i]._replace(sent=sent)
        return works

    def _with_moved_cuts(
        self, choice: StageChoice, schedule: str, limit: int
    ) -> tuple[StageChoice, float]:
        options = self._options[schedule in HIDES_TRANSFERS]
        flight = in_flight_by(schedule)

        def fitting(start: int, stop: int, size: int, from_the_end: int) -> list[StageOption]:
            flying = min(flight(from_the_end), self.num_microbatches)
            found = options[size].of_range(start, stop)
            return [option for option in found if option.bytes_in_flight(flying) <= limit]

        def seconds(stages: Sequence[StageRange]) -> float:
            return self._seconds_by(stages, schedule, limit)

        return moved_cuts(choice, fitting, self._own_seconds, seconds)

    def _expected(
        self, choice: StageChoice, limit: int, schedule: str
    ) -> tuple[ExpectedSeconds, ...]:
        """What each stage takes in a step on logical meshes; infinite where it does not fit."""
        found = []
        for place, stage in enumerate(choice.stages):
            before = self.crossing[stage.start - 1] if stage.start else 0
            received = math.ceil(before / stage.num_devices)
            flight = in_flight_by(schedule)(len(choice.stages) - place)
            seconds: dict[tuple[int, ...], float] = {}
            size = stage.num_devices
            for mesh, way in zip(self.meshes[size], self.ways[size], strict=True):
                units = way[stage.start : stage.stop]
                inner = [received] * len(units)
                kept = [received * self.inside[stage.start]] * len(units)
                alone = StageTransfers([0.0] * len(units), inner, kept, [])
                totals = RangeTotals.of([units])
                options = totals.options(size, alone, self.remat, is_hidden=False)
                fitting = (
                    self._own_seconds(option)
                    for option in options.of_range(0, len(units))
                    if option.bytes_in_flight(min(flight, self.num_microbatches)) <= limit
                )
                least = min(fitting, default=math.inf)
                seconds[mesh] = min(seconds.get(mesh, math.inf), least)
            found.append(seconds)
        return tuple(found)

    def _choice(
        self,
        limit: int,
        schedule: str,
        at_most: float,
        size: int | None = None,
        better_than: float = math.inf,
    ) -> StageChoice | None:
        """The best stages by a schedule, on submeshes of one size or of any.

        Of many units regular ones if they are about as good; none where the best are not
        `better_than` so many seconds of a step.
        """
        sizes = self._sizes if size is None else [size]
        choice = self._best(limit, schedule, min(at_most, better_than), sizes)
        if choice is None or len(choice.stages) < 2:
            return None
        if self.are_alike:
            regular = self._regular(limit, schedule, sizes)
            most = min(ABOUT_AS_GOOD * choice.step_seconds, at_most)
            if regular is not None and regular.step_seconds <= most:
                return regular
        return choice

    @cached_property
    def are_alike(self) -> bool:
        """Whether there are many units, of few kinds."""
        kinds = min((len(set(way)) for ways in self.ways.values() for way in ways), default=0)
        return len(self.starts) >= max(MANY_UNITS, UNITS_OF_A_KIND * kinds)

    def _is_regular(self, choice: StageChoice) -> bool:
        """Whether stages have equally many units and devices, where these are many of few kinds."""
        cuts = [0, *(stage.stop for stage in choice.stages)]
        is_even = len({stage.num_devices for stage in choice.stages}) == 1
        is_equal = cuts == equal_runs(len(self.starts), len(choice.stages))
        return self.are_alike and is_even and is_equal

    def _best(
        self, limit: int, schedule: str, at_most: float, sizes: Sequence[int]
    ) -> StageChoice | None:
        """The best stages by a schedule on submeshes of these sizes."""
        options = self._options[schedule in HIDES_TRANSFERS]
        return best_stages(
            [options[size] for size in sizes if size in options],
            self.cluster.num_devices,
            num_microbatches=self.num_microbatches,
            memory_limit=limit,
            in_flight=in_flight_by(schedule),
            at_most=at_most,
            early=self._hidden[0],
            filled=self._hidden[1],
        )

    @cached_property
    def _hidden(self) -> tuple[list[float], list[float]]:
        """By the unit with which a stage begins, the backward and forward passes of those before.

        At the least. So much earlier than the first stage it is done with its microbatches, and so
        much later the first one comes there.
        """
        backward = least_before(self.ways, lambda unit: unit.backward_seconds)
        return backward, least_before(self.ways, lambda unit: unit.forward_seconds)

    def _regular(self, limit: int, schedule: str, sizes: Sequence[int]) -> StageChoice | None:
        """The best of the choices whose stages have equally many units and devices."""
        found, options = [], self._options[schedule in HIDES_TRANSFERS]
        for size in sizes:
            stages, left = divmod(self.cluster.num_devices, size)
            if left or not 2 <= stages <= len(self.starts):
                continue
            cuts = equal_runs(len(self.starts), stages)
            runs = [(start, stop, size) for start, stop in itertools.pairwise(cuts)]
            most = [in_flight_by(schedule)(stages - place) for place in range(stages)]
            flights = [min(number, self.num_microbatches) for number in most]
            fitting = [
                [
                    option
                    for option in options[size].of_range(start, stop)
                    if option.bytes_in_flight(flight) <= limit
                ]
                for (start, stop, size), flight in zip(runs, flights, strict=True)
            ]
            if all(fitting):
                chosen = [min(options, key=self._own_seconds) for options in fitting]
                ranges = [StageRange(*run, x) for run, x in zip(runs, chosen, strict=True)]
                found.append(StageChoice.of(ranges, self.num_microbatches, *self._hidden))
        return min(found, key=lambda choice: choice.step_seconds, default=None)

    def _own_seconds(self, option: StageOption) -> float:
        return self.num_microbatches * option.seconds + option.once_seconds

    def with_microbatches(self, count: int) -> StageSearch:
        """The search as if all that holds rows of the batch shrank with those of a microbatch.

        What does not fit so will not fit with so many microbatches.
        """
        fewer = self.num_microbatches / count
        ways = {
            size: [tuple(unit.with_rows(fewer) for unit in way) for way in ways]
            for size, ways in self.ways.items()
        }
        crossing = tuple(math.ceil(size * fewer) for size in self.crossing)
        return dataclasses.replace(
            self, crossing=crossing, ways=ways, num_microbatches=count, known={}
        )

    @cached_property
    def _options(self) -> dict[bool, dict[int, StageOptions]]:
        """By whether transfers are hidden, and the size of submesh."""
        more = self.crossing, self.inside, self.once, self.remat, self.cluster
        flags = sorted({schedule in HIDES_TRANSFERS for schedule in self.schedules})
        found: dict[bool, dict[int, StageOptions]] = {flag: {} for flag in flags}
        for size, ways in self.ways.items():
            keys = {flag: (size, flag, tuple(ways), *more) for flag in flags}
            if ways and any(key not in self.known for key in keys.values()):
                totals = RangeTotals.of(ways)
                received = [math.ceil(moved / size) for moved in (0, *self.crossing[:-1])]
                transfers = StageTransfers(
                    [self._seconds(size, moved) for moved in self.crossing],
                    received,
                    [x * kept for x, kept in zip(received, self.inside, strict=True)],
                    [(x, x.seconds(self.cluster, size, len(self.starts))) for x in self.once],
                )
                for flag, key in keys.items():
                    made = totals.options(size, transfers, self.remat, is_hidden=flag)
                    self.known[key] = made
            for flag, key in keys.items() if ways else ():
                found[flag][size] = self.known[key]
        return found

    def _seconds(self, size: int, moved: int) -> float:
        """Of a transfer of so many bytes from a mesh of this size."""
        return seconds_to_next(self.cluster, size, moved) if moved else 0.0
