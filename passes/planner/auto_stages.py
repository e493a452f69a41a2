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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autopar.base.cluster import Cluster
from autopar.base.transfer_costs import seconds_to_next
from autopar.passes.planner.layouts import ExpectedSeconds, StageLayout
from autopar.passes.planner.stage_choice import (
    StageChoice,
    StageOption,
    StageOptions,
    StageRange,
    best_stages,
)
from autopar.passes.planner.stage_costs import Way, equal_runs
from autopar.passes.planner.stage_options import RangeTotals, StageTransfers

# Of many units, stages that are alike are taken where they are about as good: they are planned
# once, and people can read them.
MANY_UNITS = 16
UNITS_OF_A_KIND = 4
ABOUT_AS_GOOD = 1.03
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
      once: what passes once a step: from which unit, to which, and bytes.
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
    once: tuple[tuple[int, int, int], ...]
    ways: dict[int, list[Way]]
    num_microbatches: int
    cluster: Cluster
    remat: str | None
    schedules: tuple[str, ...] = ("1f1b",)
    meshes: Mapping[int, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    known: dict[OptionsKey, StageOptions] = field(default_factory=dict, compare=False, repr=False)

    def within(self, limit: int, at_most: float = math.inf) -> tuple[StageLayout, float] | None:
        """The stages with the least step time that fit, and that time; None where none do.

        Args:
          limit: bytes that a device may hold.
          at_most: seconds of a step; stages that take longer are not looked for.
        """
        sizes = [size for size, ways in self.ways.items() if ways]
        if not sizes:
            return None
        found = [(self._choice(limit, name, at_most), name) for name in self.schedules]
        chosen = [(choice, name) for choice, name in found if choice is not None]
        if not chosen:
            return None
        return self._layout(*min(chosen, key=lambda pair: pair[0].step_seconds), limit)

    def of_equal_devices(
        self, limit: int, at_most: float = math.inf
    ) -> list[tuple[StageLayout, float]]:
        """The best stages on submeshes of one size, for each size, as `within`; the quickest first.

        Args:
          limit: bytes that a device may hold.
          at_most: seconds of a step; stages that take longer are not looked for.
        """
        made = list[tuple[StageLayout, float]]()
        for size in self.ways:
            found = [(self._best(limit, name, at_most, [size]), name) for name in self.schedules]
            several = [(x, name) for x, name in found if x is not None and len(x.stages) > 1]
            if several:
                choice, name = min(several, key=lambda pair: pair[0].step_seconds)
                made.append(self._layout(choice, name, limit))
        return sorted(made, key=lambda pair: pair[1])

    def _layout(self, choice: StageChoice, name: str, limit: int) -> tuple[StageLayout, float]:
        layout = StageLayout(
            tuple(self.starts[stage.start] for stage in choice.stages[1:]),
            tuple(stage.num_devices for stage in choice.stages),
            tuple(stage.option.remat for stage in choice.stages),
            name if len(self.schedules) > 1 else "",
            self._expected(choice, limit, name) if self.meshes else (),
            tuple(stage.option.casts for stage in choice.stages),
        )
        return layout, choice.step_seconds

    def _expected(
        self, choice: StageChoice, limit: int, schedule: str
    ) -> tuple[ExpectedSeconds, ...]:
        """What each stage takes in a step on logical meshes; infinite where it does not fit."""
        found = []
        for place, stage in enumerate(choice.stages):
            before = self.crossing[stage.start - 1] if stage.start else 0
            received = math.ceil(before / stage.num_devices)
            flight = _in_flight(schedule)(len(choice.stages) - place)
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

    def _choice(self, limit: int, schedule: str, at_most: float) -> StageChoice | None:
        """The best stages by a schedule; of many units regular ones if they are about as good."""
        sizes = [size for size, ways in self.ways.items() if ways]
        choice = self._best(limit, schedule, at_most, sizes)
        if choice is None or len(choice.stages) < 2:
            return None
        if self._are_alike:
            regular = self._regular(limit, schedule)
            most = min(ABOUT_AS_GOOD * choice.step_seconds, at_most)
            if regular is not None and regular.step_seconds <= most:
                return regular
        return choice

    @cached_property
    def _are_alike(self) -> bool:
        """Whether there are many units, of few kinds."""
        kinds = min((len(set(way)) for ways in self.ways.values() for way in ways), default=0)
        return len(self.starts) >= max(MANY_UNITS, UNITS_OF_A_KIND * kinds)

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
            in_flight=_in_flight(schedule),
            at_most=at_most,
        )

    def _regular(self, limit: int, schedule: str) -> StageChoice | None:
        """The best of the choices whose stages have equally many units and devices."""
        found, options = [], self._options[schedule in HIDES_TRANSFERS]
        for size, ways in self.ways.items():
            stages, left = divmod(self.cluster.num_devices, size)
            if not ways or left or not 2 <= stages <= len(self.starts):
                continue
            cuts = equal_runs(len(self.starts), stages)
            runs = [(start, stop, size) for start, stop in itertools.pairwise(cuts)]
            most = [_in_flight(schedule)(stages - place) for place in range(stages)]
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
                ranges = (StageRange(*run, x) for run, x in zip(runs, chosen, strict=True))
                seconds = sum(x.seconds + x.hidden_seconds for x in chosen)
                slowest = (self.num_microbatches - 1) * max(x.seconds for x in chosen)
                once = max(x.once_seconds for x in chosen)
                found.append(StageChoice(tuple(ranges), seconds + slowest + once))
        return min(found, key=lambda choice: choice.step_seconds, default=None)

    def _own_seconds(self, option: StageOption) -> float:
        """What a stage does in a step."""
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
                    [(x, y, self._seconds(size, moved)) for x, y, moved in self.once],
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


def _in_flight(schedule: str) -> Callable[[int], int]:
    """Microbatches in flight, by the number of stages from one to the last."""
    return (lambda left: 2 * left - 1) if schedule == "eager_1f1b" else (lambda left: left)
