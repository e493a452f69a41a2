"""On which logical mesh a stage, or the whole step, takes least time and fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.passes.graph.casts_again import CastsAgain, casts_again
from autopar.passes.planner.fitting_plan import ComputesAgain, fitting_plan
from autopar.passes.planner.layouts import ExpectedSeconds, logical_meshes
from autopar.passes.planner.planned_stage import PlaceInPipeline, PlannedStage
from autopar.passes.planner.recomputing_stages import RecomputingStage, beside_free
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_shardings import (
    ENOUGH_OF_LARGE,
    LARGE_PROBLEM,
    Allowed,
    MeshSearch,
)
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding.pins import pins_of
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.slicing.stage_graphs import StageGraph

# Times what a stage takes with any memory: where it takes more, so do shapes that are not expected
# to be as quick.
SLOWED = 1.1


def plan_mesh(
    split: SplitStep,
    mesh: tuple[int, ...],
    options: Options,
    cluster: Cluster,
    allowed_in: Callable[[StrategyGraph], Allowed] | None = None,
    place: PlaceInPipeline | None = None,
) -> PlannedStage:
    """The cheapest program that fits; if none does, the one that needs least memory.

    Args:
      split: the step, or a stage of it.
      mesh: the logical mesh.
      options: method, pins, memory limit, remat and so on.
      cluster: the devices of the mesh.
      allowed_in: restricts what the nodes may choose; None: nothing does.
      place: where it is a stage of a pipeline. With remat="auto", its forward pass is computed
        again where that is quicker than other shardings that fit.
    """
    search = MeshSearch.of(split, mesh, options, cluster, allowed_in, place)
    first = search.free()
    return first if first.fits else fitting_plan(search, first)


def plan_on_any(
    split: SplitStep,
    meshes: Sequence[tuple[int, ...]],
    options: Options,
    cluster: Cluster,
    place: PlaceInPipeline,
    expected: ExpectedSeconds = MappingProxyType({}),
    computes_again: ComputesAgain | None = None,
) -> list[PlannedStage]:
    """`plan_mesh` of a stage for each mesh, as far as that can be the cheapest of all that fit.

    A mesh whose cheapest program exceeds the memory and costs more than one that fits on another
    mesh is not planned within the limit; nor is one of a large stage that costs hardly less. Where
    it is known what a stage is `expected` to take, meshes are planned in that order, and not where
    it is hardly less than with what fits; the others, which are known to be slower with any memory,
    only where none of these fits, or memory makes it much slower (`SLOWED`). One that fits neither
    at a price of memory nor as it `computes_again` what it can is looked at further when the others
    are known.
    """
    if expected:
        return _plan_in_order(split, meshes, options, cluster, place, expected, computes_again)
    searches = [MeshSearch.of(split, mesh, options, cluster, None, place) for mesh in meshes]
    found = [search.free() for search in searches]
    best = min((x.step_seconds for x in found if x.fits), default=math.inf)
    exceeding = [i for i, planned in enumerate(found) if not planned.fits]
    for i in sorted(exceeding, key=lambda i: found[i].least_seconds):
        enough = ENOUGH_OF_LARGE if searches[i].is_large else 1.0
        if enough * found[i].least_seconds <= best:
            found[i] = fitting_plan(searches[i], found[i], computes_again=computes_again)
            best = min(best, found[i].step_seconds if found[i].fits else math.inf)
    return found


def plan_stage(
    place: PlaceInPipeline,
    options: Options,
    part: Cluster,
    expected: ExpectedSeconds = MappingProxyType({}),
    casts: bool = False,
) -> PlannedStage:
    """The best plan of one stage on the logical shapes of its mesh; one that fits, if any does.

    Where memory binds, also one that casts parameters in every microbatch is looked for, and one
    whose backward pass computes some of the forward pass again.

    Args:
      place: its graph, with the batch labelled, and what it has in flight.
      options: method, pins, memory limit, remat and so on.
      part: the devices of its mesh.
      expected: what it is expected to take on logical shapes, where that is known.
      casts: whether it is expected to fit only if it casts in every microbatch: that is tried
        first then, and is enough unless all fits on that mesh anyway.
    """
    again = RecomputingStage(place, stage_options(place.graph, options), part)
    return again.beside(_plan_keeping(place, options, part, expected, casts, again))


def _plan_keeping(
    place: PlaceInPipeline,
    options: Options,
    part: Cluster,
    expected: ExpectedSeconds,
    casts: bool,
    recomputing: RecomputingStage,
) -> PlannedStage:
    """`plan_stage` with everything kept for the backward pass, or the forward pass run again.

    A large one may compute only some of it again.
    """
    again = casts_again(place.graph.step) if casts else None
    more = options, part, expected, recomputing
    other: PlannedStage | None = None
    if again is not None:
        other = _plan_casting(_casting(place, again), *more, "microbatch")
        if not other.fits and place.must_fit:
            return other
        if other.fits and not (free := plan_free(place, options, part, other.mesh)).fits:
            # What fits by computing again may do so with casts once a step, too.
            once = recomputing.instead_of(free, other) if other.split.recomputation else None
            is_quicker = once is not None and once.step_seconds < other.step_seconds
            return once if once is not None and is_quicker else beside_free(other, free)
    kept = _plan_casting(place, *more, "once")
    if kept.fits and (kept.unlimited is None or _is_enough(kept, expected)):
        return kept
    again = again or casts_again(place.graph.step)
    if again is None or (kept.fits and kept.step_seconds <= _least_casting(kept, again, part)):
        return kept
    if other is None:
        other = _plan_casting(_casting(place, again), *more, "microbatch")
    free = kept.unlimited or kept
    if kept.fits and other.fits:
        return beside_free(other, free) if other.step_seconds < kept.step_seconds else kept
    smaller = other.peak.bytes < kept.peak.bytes
    return beside_free(other, free) if other.fits or (not kept.fits and smaller) else kept


def _is_enough(planned: PlannedStage, expected: ExpectedSeconds) -> bool:
    """Whether a large stage takes hardly more than what is expected of it, however it casts."""
    promised = min(expected.values(), default=0.0)
    large = len(planned.built.nodes) > LARGE_PROBLEM
    return large and planned.step_seconds <= ENOUGH_OF_LARGE * promised < math.inf


def _casting(place: PlaceInPipeline, again: CastsAgain) -> PlaceInPipeline:
    return place._replace(graph=replace(place.graph, step=again.step))


def plan_free(
    place: PlaceInPipeline, options: Options, part: Cluster, mesh: tuple[int, ...]
) -> PlannedStage:
    """The best plan of a stage on a logical mesh with any memory; it casts parameters once."""
    stage = place.graph
    split = SplitStep(stage.step, populate(stage.graph.jaxpr), casts="once")
    return MeshSearch.of(split, mesh, stage_options(stage, options), part, None, place).free()


def _least_casting(kept: PlannedStage, again: CastsAgain, part: Cluster) -> float:
    """What a stage takes at the least that casts parameters in every microbatch.

    Its devices share the casts at the best; all else takes at least what it takes with any memory.
    """
    loop = again.step.loop
    assert loop is not None
    more = loop.num_microbatches * again.bytes_per_microbatch - again.once_bytes
    return kept.least_seconds + more / (part.num_devices * part.device.memory_bandwidth)


def _plan_casting(
    place: PlaceInPipeline,
    options: Options,
    part: Cluster,
    expected: ExpectedSeconds,
    recomputing: RecomputingStage,
    casts: str,
) -> PlannedStage:
    stage = place.graph
    own = stage_options(stage, options)
    one = SplitStep(stage.step, populate(stage.graph.jaxpr), casts=casts)
    meshes = logical_meshes(own, part, stage.graph, of_stage=True)
    computes_again = recomputing.instead_of if recomputing.is_possible else None
    candidates = plan_on_any(one, meshes, own, part, place, expected, computes_again)
    fitting = [c for c in candidates if c.fits] or candidates

    def key(planned: PlannedStage) -> tuple[float, int]:
        return planned.step_seconds, len(planned.mesh)

    best, free = min(fitting, key=key), min((c.unlimited or c for c in candidates), key=key)
    return replace(best, unlimited=None) if free is best else beside_free(best, free)


def stage_options(stage: StageGraph, options: Options) -> Options:
    """The options with the pins that are for a stage's own inputs."""
    return replace(options, pins=pins_of(stage.graph, options.pins))


def _plan_in_order(
    split: SplitStep,
    meshes: Sequence[tuple[int, ...]],
    options: Options,
    cluster: Cluster,
    place: PlaceInPipeline,
    expected: ExpectedSeconds,
    computes_again: ComputesAgain | None,
) -> list[PlannedStage]:
    def rank(mesh: tuple[int, ...]) -> tuple[int, float]:
        seconds = expected.get(mesh, 0.0)
        return (0 if mesh in expected else 1, seconds) if seconds < math.inf else (2, 0.0)

    found, left = list[PlannedStage](), list[tuple[float, int, Callable[[], PlannedStage]]]()
    order = sorted(meshes, key=rank)
    for number, mesh in enumerate(order, start=1):
        fitting = [x for x in found if x.fits]
        best = min((x.step_seconds for x in fitting), default=math.inf)
        known = (x for x in fitting if 0 < expected.get(x.mesh, 0.0) < math.inf)
        wrong = min((x.step_seconds / expected[x.mesh] for x in known), default=0.0)
        unlimited = min((x.least_seconds for x in fitting), default=0.0)
        if mesh in expected:
            may_be_quicker = ENOUGH_OF_LARGE * wrong * expected[mesh] <= best
        else:
            may_be_quicker = SLOWED * unlimited < best
        if not wrong or may_be_quicker:
            least = expected.get(mesh, 0.0) if expected.get(mesh) != math.inf else 0.0
            others = any(expected.get(x, 0.0) < math.inf for x in order[number:])
            search = MeshSearch.of(split, mesh, options, cluster, None, place)
            free = search.free()
            enough = ENOUGH_OF_LARGE if search.is_large else 1.0
            if free.fits or enough * free.least_seconds > best:
                found.append(free)
                continue
            within = partial(fitting_plan, search, free, least, computes_again=computes_again)
            found.append(within(is_only=not others))
            if others and not found[-1].fits and not place.must_fit:
                left.append((max(least, free.least_seconds), len(found) - 1, within))
    for least, number, again in sorted(left, key=lambda each: each[:2]):
        best = min((x.step_seconds for x in found if x.fits), default=math.inf)
        if ENOUGH_OF_LARGE * least <= best:
            found[number] = again()
    return found
