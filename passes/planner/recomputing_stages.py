"""Stages whose backward pass computes some values of the forward pass again, where memory binds.

Between keeping all that the backward pass reads and computing all of it again lie the choices of
`passes/recompute/choice.py`: values that are large and quick to make go first, as the scores of
attention do (Korthikanti et al., "Reducing activation recomputation in large transformer models",
2022). A stage makes its own choice, by what it has in flight. Where the least of these is too much,
several of its blocks run again at once (`passes/recompute/joined_blocks.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.passes.planner.fitting_plan import fitting_plan
from autopar.passes.planner.planned_stage import PlaceInPipeline, PlannedStage
from autopar.passes.planner.recomputed_steps import RecomputedSteps
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_shardings import MeshSearch, memory_limit_of
from autopar.passes.recompute.kept_choice import KeptChoice

PAYS = 1.01  # times what a stage takes with any memory: with less, nothing else is looked for
CHOICES = 15  # that are asked for at most, of those that there are: four are planned


def noted(planned: PlannedStage, free: PlannedStage) -> PlannedStage:
    """A plan that computes values again, with what that adds to the one with any memory."""
    again = planned.split.recomputation
    assert again is not None
    again = replace(again, seconds=max(planned.step_seconds - free.step_seconds, 0.0))
    split = replace(planned.split, recomputation=again)
    return replace(planned, split=split, unlimited=free)


def beside_free(planned: PlannedStage, free: PlannedStage) -> PlannedStage:
    """A plan within the memory, beside the one with any."""
    if planned.split.recomputation is not None:
        return noted(planned, free)
    return replace(planned, unlimited=free)


@dataclass(frozen=True)
class RecomputingStage:
    """Looks for plans of a stage that compute some of its values again.

    Args:
      place: the stage, and what it has in flight.
      options: method, memory limit and so on, of this stage.
      part: the devices of its mesh.
    """

    place: PlaceInPipeline
    options: Options
    part: Cluster
    _steps: dict[int, tuple[SplitStep, RecomputedSteps]] = field(default_factory=dict, init=False)
    _known: dict[object, dict[KeptChoice, tuple[MeshSearch, PlannedStage]]] = field(
        default_factory=dict, init=False
    )

    @property
    def is_possible(self) -> bool:
        """Whether a stage may compute values again, and has any to compute again."""
        asked = self.options.remat in ("auto", "override")
        return asked and "B" in self.place.graph.tasks

    def instead_of(self, free: PlannedStage, other: PlannedStage) -> PlannedStage | None:
        """The plan that computes least again with which the quickest of all shardings fits.

        None if there is none on the mesh of `free`, the plan that keeps all and does not fit.
        Blocks are joined only where that may be quicker than an `other` plan that fits.
        """
        found = self._looked_for(free.split, free, other, [free.mesh], solves=False)
        return None if found is None or not found.fits else noted(found, free)

    def beside(self, planned: PlannedStage) -> PlannedStage:
        """The plan of a stage that computes least again and fits, if that is quicker; else itself.

        `planned` is the best plan that keeps all values, or computes all of the forward pass again.
        """
        may_pay = not planned.fits or planned.step_seconds > PAYS * planned.least_seconds
        if not self.is_possible or planned.split.recomputation is not None or not may_pay:
            return planned
        free = planned.unlimited or planned
        keeping = planned.fits and not planned.remat
        meshes = [*dict.fromkeys((free.mesh, planned.mesh))]
        found = self._looked_for(planned.split, free, planned, meshes, solves=not keeping)
        is_better = found is not None and _order(found) < _order(planned)
        return noted(found, free) if found is not None and is_better else planned

    def _looked_for(
        self,
        split: SplitStep,
        free: PlannedStage,
        other: PlannedStage,
        meshes: Sequence[tuple[int, ...]],
        *,
        solves: bool,
    ) -> PlannedStage | None:
        """The best plan that computes some values of a step again; None without any.

        On the first mesh on which one fits. Blocks are joined as `_joined` says.
        """
        limit = memory_limit_of(self.options, self.part)
        missing = self.part.num_devices * (free.peak.bytes - limit)
        if missing <= 0:
            return None
        steps = self._steps_of(split)
        needed = missing / max(self.place.in_flight.values(), default=1)
        apart: list[KeptChoice] = []  # what passes between layers is kept
        if steps.most_saved_bytes >= needed:
            apart = [steps.values.family[number] for number in _evenly(len(steps))]

        @cache
        def joined() -> Sequence[KeptChoice]:
            return _joined(steps, free, other, needed)

        best: PlannedStage | None = None
        for mesh in meshes if apart or joined() else ():
            found = self._on_mesh(steps, apart, joined, mesh, solves=solves)
            if found is not None and (best is None or _order(found) < _order(best)):
                best = found
            if found is not None and found.fits:
                break
        return best

    def _steps_of(self, split: SplitStep) -> RecomputedSteps:
        if id(split) not in self._steps:
            steps = RecomputedSteps.of(split, self.part, at_once=self.place.at_once)
            self._steps[id(split)] = split, steps
        return self._steps[id(split)][1]

    def _on_mesh(
        self,
        steps: RecomputedSteps,
        apart: Sequence[KeptChoice],
        joined: Callable[[], Sequence[KeptChoice]],
        mesh: tuple[int, ...],
        *,
        solves: bool,
    ) -> PlannedStage | None:
        """The plan on a logical mesh with the choice that keeps most with which the quickest fits.

        Of those with `joined` blocks, if it does with none of layers that are `apart`. Where it
        does not with any, the one within the memory with the choice of the latter that keeps least,
        if it `solves` that; else None.
        """
        own, kept = replace(self.options, remat="none"), [*apart]
        here = id(steps), mesh
        if here not in self._known:
            self._known.clear()  # what is known of other meshes takes memory
        known = self._known.setdefault(here, {})

        def planned(number: int) -> tuple[MeshSearch, PlannedStage]:
            choice = kept[number]
            if choice not in known:
                split = steps.made(choice)
                graph = replace(self.place.graph, step=split.step)
                there = self.place._replace(graph=graph)
                search = MeshSearch.of(split, mesh, own, self.part, None, there)
                known[choice] = search, search.free()
            return known[choice]

        def first_that_fits(numbers: Sequence[int]) -> PlannedStage | None:
            place = bisect_left(numbers, True, key=lambda number: planned(number)[1].fits)
            return planned(numbers[place])[1] if place < len(numbers) else None

        if (found := first_that_fits(range(len(apart)))) is not None:
            return found
        kept += joined()
        if (found := first_that_fits(range(len(apart), len(kept)))) is not None:
            return found
        least = len(apart) - 1
        return fitting_plan(*planned(least)) if solves and least >= 0 else None


def _order(planned: PlannedStage) -> tuple[bool, float]:
    """The better plan comes first: what fits by its time, the rest by its memory."""
    return not planned.fits, planned.step_seconds if planned.fits else planned.peak.bytes


def _joined(
    steps: RecomputedSteps, free: PlannedStage, other: PlannedStage, needed: float
) -> Sequence[KeptChoice]:
    """The choices with joined blocks that spare what is `needed` of a microbatch and may pay.

    So many bytes of all devices; they may be quicker than the `other` plan, if that fits.
    """
    numbers = range(len(steps.joined))
    first = bisect_left(numbers, needed, key=lambda number: steps.joined[number].saved_bytes)
    if first == len(numbers):
        return []
    count, devices = steps.split.num_microbatches, steps.num_devices
    longer = steps.joined[first].seconds * count / devices
    if other.fits and free.step_seconds + longer >= other.step_seconds:
        return []
    return [steps.joined[first + more] for more in _evenly(len(numbers) - first)]


def _evenly(count: int) -> Sequence[int]:
    """Some numbers below, the last one among them."""
    some = min(count, CHOICES)
    return [(place + 1) * count // some - 1 for place in range(some)]
