"""Steps on one mesh that compute values again where that is quicker than what else fits.

What does not fit with everything kept may fit with more microbatches, with other shardings, or by
computing again, and which of these is quickest depends on the model. So before a step is solved
within the memory or divided further, the choices of `passes/recompute/choice.py` are tried on the
best of its meshes: what they need at the peak is nearly linear in what they save, so few of them
are planned. Where the least that can be kept is a little too much, it is solved within the memory.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from autopar.base.cluster import Cluster
from autopar.base.errors import BatchArgumentError, InexactMicrobatchError, OptionError
from autopar.base.options import Options
from autopar.base.units import format_microbatches
from autopar.passes.graph.graph import Graph, batch_sizes
from autopar.passes.planner.candidates import PlannedStep, on_one_mesh, quickest
from autopar.passes.planner.fitting_plan import fitting_plan
from autopar.passes.planner.layouts import ExpectedSeconds, submesh
from autopar.passes.planner.least_memory import state_on_devices
from autopar.passes.planner.one_mesh import WORTH_GATHERING
from autopar.passes.planner.planned_stage import PlannedStage
from autopar.passes.planner.recomputed_steps import RecomputedSteps, gathering_again
from autopar.passes.planner.recomputing_stages import noted
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_shardings import (
    DEAR,
    ENOUGH_OF_LARGE,
    HOPELESS,
    LARGE_PROBLEM,
    MeshSearch,
    memory_limit_of,
)
from autopar.passes.planner.stages_within import seconds_of_best
from autopar.passes.sharding.gathered_twice import gathered_for_both
from autopar.passes.sharding.restrict import check_batch
from autopar.passes.solver import TooDear

WORTH_SOLVING = 0.25  # of what is missing: what computing again spares where that is not enough
TRIES = 3  # plans between the choice that keeps least and all
NEARLY = 1.1  # times the limit, what plans chosen for their bytes need where others may fit
CLEARLY_QUICKER = 1.03  # times what is expected by layers: whole plans take longer
MAY_BE_QUICKER = 1.05  # times what fits: what computes again writes less, and may still be quicker


@dataclass(frozen=True)
class QuickerAgain:
    """Looks for plans on one mesh that compute again, and puts what fits to what was `made`.

    Args:
      graph: the traced step.
      split: it in a number of microbatches, with one loop where a second argument is true.
      best_seconds: of what fits elsewhere.
      keep: takes what fits, as it is found.
      meshes: the logical shapes that there are.
    """

    graph: Graph
    split: Callable[[int, bool], SplitStep]
    options: Options
    cluster: Cluster
    report: Callable[[str], None]
    keep: Callable[[list[PlannedStep]], None]
    made: list[PlannedStep]
    meshes: Sequence[tuple[int, ...]] = ()
    best_seconds: float = math.inf

    @property
    def seconds(self) -> float:
        """Of the quickest step that fits so far."""
        return min(self.best_seconds, seconds_of_best(self.made))

    def instead_of(self, count: int, free: PlannedStage) -> float:
        """Looks for what is quicker with so many microbatches than all else that is known.

        Args:
          count: of microbatches.
          free: the quickest plan that keeps all, which does not fit.

        Returns:
          The seconds of the quickest step that fits so far, by computing again or elsewhere.
        """
        if free.least_seconds <= MAY_BE_QUICKER * self.seconds and (steps := self._steps(count)):
            if free.split.recomputation is not None:  # it gathers its weights again already
                self.look(replace(steps, weights=True), free.mesh, free)
                return self.seconds
            found = self._weights_again(steps, free)
            if found is None:
                self.look(steps, free.mesh, free)
            elif not found.fits:
                self.look(replace(steps, weights=True), found.mesh, found)
        return self.seconds

    def gathering(self, split: SplitStep) -> SplitStep:
        """A step with a loop over its microbatches whose backward pass gathers weights again.

        As it is where it reads none twice. Each weight may as well be gathered before the loop,
        once for both passes: in memory that is as much at the worst moment as to gather it in the
        loop for both.
        """
        if not split.later_loops:
            with contextlib.suppress(InexactMicrobatchError, BatchArgumentError, OptionError):
                looped = self.split(split.num_microbatches, True)
                found = gathering_again(looped)
                return split if found is looped else found
        return split

    def _weights_again(self, steps: RecomputedSteps, free: PlannedStage) -> PlannedStage | None:
        """The same with weights that are gathered again, where these are much of what is missing.

        That takes hardly more than what the integer program expects anyway: for it each of the two
        that read them gathers them for itself. None where it spares nothing, or is no quicker than
        what is known.
        """
        missing = free.peak.bytes - self._limit
        if missing <= 0 or WORTH_GATHERING * missing > gathered_for_both(free.program):
            return None
        part = submesh(self.cluster, math.prod(free.mesh))
        split = gathering_again(steps.split)
        again = split.recomputation
        if again is None:
            return None
        self.report(f"gathering {again.weights} weights again")
        search = MeshSearch.of(split, free.mesh, self.options, part, None, None)
        found = search.free()
        try:
            found = found if found.fits else search.at_least_price(found, self.seconds)
        except TooDear:
            return None
        if not found.fits:
            return found if found.peak.bytes < free.peak.bytes else None
        if found.step_seconds >= self.seconds:
            return None
        made = on_one_mesh(noted(found, free), self.cluster, self._limit)
        self.keep([made])
        self.made.append(made)
        return found

    def look_at(self, counts: Sequence[int]) -> None:
        """Looks with numbers of microbatches with which nothing fits that keeps all.

        On the first logical shape with which the batch divides; if there is one, whose first axis
        divides a microbatch's rows.

        Args:
          counts: ascending; where more of them take longer, the rest is passed over. So is what
            cannot keep the rows that pass from layer to layer, as fewer microbatches tell.
        """
        room, passing, sizes = math.inf, 0, batch_sizes(self.graph)
        for count in counts:
            if passing / count > room:
                continue
            before, meshes = self.seconds, self._possible(count)
            even = (x for x in meshes if all(size % (count * x[0]) == 0 for size in sizes))
            if meshes and (steps := self._steps(count)):
                mesh = next(even, meshes[0])
                room = self._room(math.prod(mesh))
                passing = steps.crossing_bytes * count
                self.look(steps, mesh)
            if before < math.inf and self.seconds >= before:
                break

    def look_below(self, counts: Sequence[int], expected: Callable[[int], ExpectedSeconds]) -> None:
        """Looks with fewer microbatches than the quickest step has.

        If that computes again, what its mesh could not keep of so many rows it may compute again,
        too. As long as that is quicker, from more to fewer.

        Args:
          counts: numbers of microbatches, ascending.
          expected: what a step is expected to take with any memory, by microbatches.
        """
        best = quickest(self.made)
        if best is None:
            return
        again, fewer = best.split.recomputation, best.split.num_microbatches
        below = [x for x in counts if x < fewer]
        if again is None or not again.operations:
            self._look_instead(best, below, expected)
            return
        mesh = best.planned[0].mesh
        for count in reversed(below):
            before = self.seconds
            if mesh in self._possible(count) and (steps := self._steps(count)):
                self.look(replace(steps, weights=again.weights > 0), mesh)
            if self.seconds >= before:
                break

    def _look_instead(
        self,
        best: PlannedStep,
        counts: Sequence[int],
        expected: Callable[[int], ExpectedSeconds],
    ) -> None:
        """Looks where a step that computes all again is expected to be quickest, if anywhere.

        With more microbatches weights are gathered, and gradients added up, more often.
        """
        known, again = best.split.num_microbatches, best.split.recomputation
        steps = self._steps(known) if any(expected(x) for x in counts) else None
        if steps is None or not len(steps):
            return
        longer = known * steps.values.family[-1].seconds / self.cluster.num_devices
        ways = [
            (seconds + longer, count, mesh)
            for count in counts
            for mesh, seconds in expected(count).items()
            if known * steps.crossing_bytes <= count * self._room(math.prod(mesh))
            and mesh in self._possible(count)
        ]
        ways = [way for way in ways if CLEARLY_QUICKER * way[0] < self.seconds]
        there = [way for way in ways if way[2] == best.planned[0].mesh]
        _, count, mesh = min(there or ways, default=(0.0, 0, ()))
        if mesh and (steps := self._steps(count)):
            self.look(replace(steps, weights=again is not None and again.weights > 0), mesh)

    def _possible(self, count: int) -> list[tuple[int, ...]]:
        """The logical shapes with which the batch divides."""
        possible = list[tuple[int, ...]]()
        for mesh in self.meshes:
            with contextlib.suppress(BatchArgumentError):
                check_batch(self.graph, self.options.method, mesh, count)
                possible.append(mesh)
        return possible

    def look(
        self, steps: RecomputedSteps, mesh: tuple[int, ...], free: PlannedStage | None = None
    ) -> None:
        """Looks on a logical mesh; `free` is the plan that keeps all, where it is known.

        If a step that is not large hardly fits there, on all others as well.
        """
        if steps.crossing_bytes > self._room(math.prod(mesh)):
            return
        if not len(steps) or (free is not None and self._misses_more(free, steps.wanted_bytes)):
            return
        count = steps.split.num_microbatches
        self.report(f"{format_microbatches(count)}: {len(steps)} ways to compute values again")
        if self._look_on(steps, mesh, free):
            for other in self._possible(count):
                if other != mesh:
                    self._look_on(steps, other, None)

    def _look_on(
        self, steps: RecomputedSteps, mesh: tuple[int, ...], free: PlannedStage | None
    ) -> bool:
        """Looks on a logical mesh, and says whether memory binds there though least is kept.

        Of a step that is not large.
        """
        limit = self._limit
        part = submesh(self.cluster, math.prod(mesh))
        known: dict[int, PlannedStage] = {}

        @cache
        def search(place: int) -> MeshSearch:
            return MeshSearch.of(steps[place], mesh, self.options, part, None, None)

        def planned(place: int) -> PlannedStage:
            if place not in known:
                known[place] = search(place).free()
            return known[place]

        sizes = [choice.saved_bytes for choice in steps.values.family]
        low, high = -1, len(sizes) - 1
        smallest = planned(high)
        if not smallest.fits:  # other shards do, perhaps
            if smallest.least_seconds > self.seconds:
                return False
            again = not steps.weights and steps.split.reading_again is not steps.split
            gathered = gathered_for_both(smallest.program) if again else 0
            if gathered and gathered >= WORTH_GATHERING * (smallest.peak.bytes - limit):
                return self._look_on(replace(steps, weights=True), mesh, free)
            is_near = search(high).is_large and smallest.peak.bytes <= HOPELESS * limit
            lean = [] if is_near else self._lean(search(high), smallest)
            leanest = min((x.peak.bytes for x in lean), default=smallest.peak.bytes)
            if lean and leanest > NEARLY * limit:
                return False
            spared = free.peak.bytes - smallest.peak.bytes if free else math.inf
            if free and leanest > limit and spared < WORTH_SOLVING * (free.peak.bytes - limit):
                return False
            tried, enough = [*lean], ENOUGH_OF_LARGE * smallest.least_seconds
            is_enough = any(x.fits and x.step_seconds <= enough for x in lean)
            if not (search(high).is_large and is_enough):
                near = fitting_plan if is_near else MeshSearch.at_least_price
                tried.insert(0, near(search(high), smallest))
            fitting = [x for x in tried if x.fits]
            if not fitting:
                return not search(high).is_large
            quickest_lean = min(fitting, key=lambda x: x.step_seconds)
            known[high] = replace(quickest_lean.proven_by(smallest), unlimited=smallest)
        for _ in range(TRIES if smallest.fits else 0):
            if high - low < 2:
                break
            beyond = planned(high).peak.bytes
            before = known[low] if low >= 0 else free
            start = sizes[low] if low >= 0 else 0
            if before is None:
                each = 1 / part.num_devices
            else:
                each = max(before.peak.bytes - beyond, 1) / max(sizes[high] - start, 1)
            enough = sizes[high] - (limit - beyond) / each
            place = min(max(bisect_left(sizes, enough), low + 1), high)
            if place == high:
                break
            low, high = (low, place) if planned(place).fits else (place, high)
        best = min((x for x in known.values() if x.fits), key=lambda x: x.step_seconds)
        if best.step_seconds < self.seconds:
            found = on_one_mesh(best if free is None else noted(best, free), self.cluster, limit)
            self.keep([found])
            self.made.append(found)
        return not (smallest.fits or search(high).is_large)

    def _misses_more(self, free: PlannedStage, wanted_bytes: int) -> bool:
        """Whether a step misses more than its backward pass reads, of all devices together.

        The quickest plan may hold much that one chosen for its bytes does not; of a large step that
        is not looked at.
        """
        devices = math.prod(free.mesh)
        if wanted_bytes >= devices * (free.peak.bytes - self._limit):
            return False
        if len(free.built.nodes) > LARGE_PROBLEM:
            return True
        part = submesh(self.cluster, devices)
        search = MeshSearch.of(free.split, free.mesh, self.options, part, None, None)
        needed = min(x.peak.bytes for x in self._lean(search, free))
        return wanted_bytes < devices * (needed - self._limit)

    def _lean(self, search: MeshSearch, free: PlannedStage) -> list[PlannedStage]:
        """Plans that are chosen for their bytes, up to the first that fits."""
        found = list[PlannedStage]()
        for number in range(len(DEAR)):
            found.append(search.dear(free, number))
            if found[-1].fits:
                break
        return found

    def _steps(self, count: int) -> RecomputedSteps | None:
        """The choices; None where the step has no one loop over so many microbatches."""
        try:
            return RecomputedSteps.of(self.split(count, True), self.cluster)
        except (InexactMicrobatchError, BatchArgumentError, OptionError):
            return None

    @property
    def _limit(self) -> int:
        return memory_limit_of(self.options, self.cluster)

    def _room(self, num_devices: int) -> int:
        """What so many devices may hold beside the state, which they have in any case."""
        state = state_on_devices(self.graph, self.options, self.cluster)
        return self._limit * num_devices - state
