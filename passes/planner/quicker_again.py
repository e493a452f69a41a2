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
from autopar.passes.graph.graph import Graph
from autopar.passes.planner.candidates import PlannedStep, on_one_mesh
from autopar.passes.planner.layouts import submesh
from autopar.passes.planner.least_memory import state_on_devices
from autopar.passes.planner.one_mesh import WORTH_GATHERING
from autopar.passes.planner.planned_stage import PlannedStage
from autopar.passes.planner.recomputed_steps import RecomputedSteps, gathering_again
from autopar.passes.planner.recomputing_stages import noted
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_shardings import HOPELESS, MeshSearch, memory_limit_of
from autopar.passes.planner.stages_within import seconds_of_best
from autopar.passes.sharding.gathered_twice import gathered_for_both
from autopar.passes.sharding.restrict import check_batch

WORTH_SOLVING = 0.25  # of what is missing: what computing again spares where that is not enough
TRIES = 3  # plans between the choice that keeps least and all
MAY_BE_QUICKER = 1.05  # times what fits: what computes again writes less, and may still be quicker


@dataclass(frozen=True)
class QuickerAgain:
    """Looks for plans on one mesh that compute again, and puts what fits to what was `made`.

    Args:
      graph: the traced step.
      split: it in a number of microbatches, with one loop where a second argument is true.
      best_seconds: of what fits elsewhere.
      keep: takes what fits, as it is found.
    """

    graph: Graph
    split: Callable[[int, bool], SplitStep]
    options: Options
    cluster: Cluster
    report: Callable[[str], None]
    keep: Callable[[list[PlannedStep]], None]
    made: list[PlannedStep]
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
        found = found if found.fits else search.at_least_price(found)
        if not found.fits:
            return found if found.peak.bytes < free.peak.bytes else None
        if found.step_seconds >= self.seconds:
            return None
        made = on_one_mesh(noted(found, free), self.cluster, self._limit)
        self.keep([made])
        self.made.append(made)
        return found

    def look_at(self, counts: Sequence[int], meshes: Sequence[tuple[int, ...]]) -> None:
        """Looks with numbers of microbatches with which nothing fits that keeps all.

        Args:
          counts: ascending; where more of them take longer, the rest is passed over. So is what
            cannot keep the rows that pass from layer to layer, as fewer microbatches tell.
          meshes: logical shapes, the first of which is taken with which the batch divides.
        """
        room, passing = math.inf, 0
        for count in counts:
            if passing / count > room:
                continue
            before = self.seconds
            for mesh in meshes:
                with contextlib.suppress(BatchArgumentError):
                    check_batch(self.graph, self.options.method, mesh, count)
                    if steps := self._steps(count):
                        room = self._room(math.prod(mesh))
                        passing = steps.crossing_bytes * count
                        self.look(steps, mesh)
                    break
            if before < math.inf and self.seconds >= before:
                break

    def look(
        self, steps: RecomputedSteps, mesh: tuple[int, ...], free: PlannedStage | None = None
    ) -> None:
        """Looks on a logical mesh; `free` is the plan that keeps all, where it is known."""
        limit = self._limit
        part = submesh(self.cluster, math.prod(mesh))
        if steps.crossing_bytes > self._room(part.num_devices):
            return
        missing = part.num_devices * (free.peak.bytes - limit) if free else 0
        if steps.wanted_bytes < missing or not len(steps):
            return
        batch = format_microbatches(steps.split.num_microbatches)
        self.report(f"{batch}: {len(steps)} ways to compute values again")
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
            if smallest.peak.bytes > HOPELESS * limit or smallest.least_seconds > self.seconds:
                return
            spared = free.peak.bytes - smallest.peak.bytes if free else math.inf
            if free and spared < WORTH_SOLVING * (free.peak.bytes - limit):
                return
            known[high] = search(high).within(smallest)
            if not known[high].fits:
                return
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
