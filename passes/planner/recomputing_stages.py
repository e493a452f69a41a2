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
from dataclasses import replace
from functools import cache

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.passes.planner.planned_stage import PlaceInPipeline, PlannedStage
from autopar.passes.planner.recomputed_steps import RecomputedSteps
from autopar.passes.planner.stage_shardings import MeshSearch, memory_limit_of
from autopar.passes.recompute.kept_choice import KeptChoice

PAYS = 1.01  # times what a stage takes with any memory: with less, nothing else is looked for
CHOICES = 15  # that are asked for at most, of those that there are: four are planned


def may_pay(planned: PlannedStage, place: PlaceInPipeline, options: Options) -> bool:
    """Whether a stage may be quicker, or fit, that computes some of its values again."""
    if options.remat not in ("auto", "override") or "B" not in place.graph.tasks:
        return False
    return not planned.fits or planned.step_seconds > PAYS * planned.least_seconds


def recomputing_stage(
    planned: PlannedStage, place: PlaceInPipeline, options: Options, part: Cluster
) -> PlannedStage:
    """The plan of a stage that computes least again and fits, if that is quicker; else itself.

    Args:
      planned: the best plan that keeps all values, or computes all of the forward pass again.
      place: the stage, and what it has in flight.
      options: method, memory limit and so on, of this stage.
      part: the devices of its mesh.
    """
    free = planned.unlimited or planned
    missing = part.num_devices * (free.peak.bytes - memory_limit_of(options, part))
    if missing <= 0:
        return planned
    steps = RecomputedSteps.of(planned.split, part, at_once=place.at_once)
    needed, best = missing / max(place.in_flight.values(), default=1), planned
    apart: list[KeptChoice] = []  # what passes between layers is kept
    if steps.most_saved_bytes >= needed:
        apart = [steps.values.family[number] for number in _evenly(len(steps))]

    @cache
    def joined() -> Sequence[KeptChoice]:
        return _joined(steps, free, planned, needed)

    if not apart and not joined():
        return planned
    keeping = planned.fits and not planned.remat
    for mesh in dict.fromkeys((free.mesh, planned.mesh)):
        found = _on_mesh(steps, apart, joined, mesh, place, options, part, keeping)
        if found is not None and _order(found) < _order(best):
            best = found
        if found is not None and found.fits:
            break
    return best if best is planned else noted(best, free)


def _order(planned: PlannedStage) -> tuple[bool, float]:
    """The better plan comes first: what fits by its time, the rest by its memory."""
    return not planned.fits, planned.step_seconds if planned.fits else planned.peak.bytes


def noted(planned: PlannedStage, free: PlannedStage) -> PlannedStage:
    """A plan that computes values again, with what that adds to the one with any memory."""
    again = planned.split.recomputation
    assert again is not None
    again = replace(again, seconds=max(planned.step_seconds - free.step_seconds, 0.0))
    split = replace(planned.split, recomputation=again)
    return replace(planned, split=split, unlimited=free)


def _joined(
    steps: RecomputedSteps, free: PlannedStage, planned: PlannedStage, needed: float
) -> Sequence[KeptChoice]:
    """The choices with joined blocks that spare what is `needed` of a microbatch and may pay.

    So many bytes of all devices; they may be quicker than what is `planned`, if that fits.
    """
    numbers = range(len(steps.joined))
    first = bisect_left(numbers, needed, key=lambda number: steps.joined[number].saved_bytes)
    if first == len(numbers):
        return []
    count, devices = steps.split.num_microbatches, steps.num_devices
    longer = steps.joined[first].seconds * count / devices
    if planned.fits and free.step_seconds + longer >= planned.step_seconds:
        return []
    return [steps.joined[first + more] for more in _evenly(len(numbers) - first)]


def _on_mesh(
    steps: RecomputedSteps,
    apart: Sequence[KeptChoice],
    joined: Callable[[], Sequence[KeptChoice]],
    mesh: tuple[int, ...],
    place: PlaceInPipeline,
    options: Options,
    part: Cluster,
    keeping: bool,
) -> PlannedStage | None:
    """The plan on a logical mesh with the choice that keeps most with which the quickest fits.

    Of those with `joined` blocks, if it does with none of layers that are `apart`. Where it does
    not with any, the one within the memory with the choice of the latter that keeps least; None if
    there is none, or a plan that is `keeping` everything fits: it is the better one then.
    """
    own, kept = replace(options, remat="none"), [*apart]

    @cache
    def search(number: int) -> MeshSearch:
        split = steps.made(kept[number])
        graph = replace(place.graph, step=split.step)
        return MeshSearch.of(split, mesh, own, part, None, place._replace(graph=graph))

    @cache
    def free(number: int) -> PlannedStage:
        return search(number).free()

    def first_that_fits(numbers: Sequence[int]) -> PlannedStage | None:
        place = bisect_left(numbers, True, key=lambda number: free(number).fits)
        return free(numbers[place]) if place < len(numbers) else None

    if (found := first_that_fits(range(len(apart)))) is not None:
        return found
    kept += joined()
    if (found := first_that_fits(range(len(apart), len(kept)))) is not None:
        return found
    least = len(apart) - 1
    return None if keeping or least < 0 else search(least).within(free(least))


def _evenly(count: int) -> Sequence[int]:
    """Some numbers below, the last one among them."""
    some = min(count, CHOICES)
    return [(place + 1) * count // some - 1 for place in range(some)]
