"""On which logical mesh a stage, or the whole step, takes least time and fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.base.units import format_bytes
from autopar.passes.graph.casts_again import CastsAgain, casts_again
from autopar.passes.planner.layouts import ExpectedSeconds, logical_meshes, submesh
from autopar.passes.planner.planned_stage import PlaceInPipeline, PlannedStage
from autopar.passes.planner.recomputing_stages import may_pay, recomputing_stage
from autopar.passes.planner.search_so_far import NOTHING_SO_FAR, SearchSoFar
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_shardings import (
    DEAR,
    ENOUGH_MEMORY_GAP,
    ENOUGH_OF_LARGE,
    HOPELESS,
    HOPELESS_AS_EXPECTED,
    LARGE_PROBLEM,
    Allowed,
    MeshSearch,
    memory_limit_of,
)
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding.pins import pins_of
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.slicing.stage_graphs import StageGraph
from autopar.passes.solver import TooDear

NEARLY = 1.05  # times the limit, what may need less where it is chosen to fit
MESHES_TRIED = 2  # of those that do not fit, before more microbatches are


def plan_mesh(
    split: SplitStep,
    mesh: tuple[int, ...],
    options: Options,
    cluster: Cluster,
    allowed_in: Callable[[StrategyGraph], Allowed] | None = None,
    place: PlaceInPipeline | None = None,
    expected: float = 0.0,
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
      expected: the seconds that are expected of it; a large stage that takes hardly more is enough.
    """
    search = MeshSearch.of(split, mesh, options, cluster, allowed_in, place)
    first = search.free()
    return first if first.fits else search.within(first, expected)


def plan_on_any(
    split: SplitStep,
    meshes: Sequence[tuple[int, ...]],
    options: Options,
    cluster: Cluster,
    place: PlaceInPipeline,
    expected: ExpectedSeconds = MappingProxyType({}),
) -> list[PlannedStage]:
    """`plan_mesh` of a stage for each mesh, as far as that can be the cheapest of all that fit.

    A mesh whose cheapest program exceeds the memory and costs more than one that fits on another
    mesh is not planned within the limit; nor is one of a large stage that costs hardly less. Where
    it is known what a stage is `expected` to take, meshes are planned in that order, and not where
    it is hardly less than with what fits.
    """
    if expected:
        return _plan_in_order(split, meshes, options, cluster, place, expected)
    searches = [MeshSearch.of(split, mesh, options, cluster, None, place) for mesh in meshes]
    found = [search.free() for search in searches]
    best = min((x.step_seconds for x in found if x.fits), default=math.inf)
    exceeding = [i for i, planned in enumerate(found) if not planned.fits]
    for i in sorted(exceeding, key=lambda i: found[i].least_seconds):
        enough = ENOUGH_OF_LARGE if searches[i].is_large else 1.0
        if enough * found[i].least_seconds <= best:
            found[i] = searches[i].within(found[i])
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
    planned = _plan_keeping(place, options, part, expected, casts)
    if not may_pay(planned, place, options):
        return planned
    return recomputing_stage(planned, place, stage_options(place.graph, options), part)


def _plan_keeping(
    place: PlaceInPipeline,
    options: Options,
    part: Cluster,
    expected: ExpectedSeconds,
    casts: bool,
) -> PlannedStage:
    """`plan_stage` with everything kept for the backward pass, or the forward pass run again."""
    again = casts_again(place.graph.step) if casts else None
    other: PlannedStage | None = None
    if again is not None:
        other = _plan_casting(_casting(place, again), options, part, expected, "microbatch")
        if not other.fits and place.must_fit:
            return other
        if other.fits and not (free := plan_free(place, options, part, other.mesh)).fits:
            return replace(other, unlimited=free)
    kept = _plan_casting(place, options, part, expected, "once")
    if kept.fits and (kept.unlimited is None or _is_enough(kept, expected)):
        return kept
    again = again or casts_again(place.graph.step)
    if again is None or (kept.fits and kept.step_seconds <= _least_casting(kept, again, part)):
        return kept
    if other is None:
        other = _plan_casting(_casting(place, again), options, part, expected, "microbatch")
    free = kept.unlimited or kept
    if kept.fits and other.fits:
        return replace(other, unlimited=free) if other.step_seconds < kept.step_seconds else kept
    smaller = other.peak.bytes < kept.peak.bytes
    return replace(other, unlimited=free) if other.fits or (not kept.fits and smaller) else kept


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
    casts: str,
) -> PlannedStage:
    stage = place.graph
    own = stage_options(stage, options)
    one = SplitStep(stage.step, populate(stage.graph.jaxpr), casts=casts)
    meshes = logical_meshes(own, part, stage.graph, of_stage=True)
    candidates = plan_on_any(one, meshes, own, part, place, expected)
    fitting = [c for c in candidates if c.fits] or candidates

    def key(planned: PlannedStage) -> tuple[float, int]:
        return planned.step_seconds, len(planned.mesh)

    best, free = min(fitting, key=key), min((c.unlimited or c for c in candidates), key=key)
    return replace(best, unlimited=None if free is best else free)


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
) -> list[PlannedStage]:
    found = list[PlannedStage]()
    for mesh in sorted(meshes, key=lambda mesh: expected.get(mesh, 0.0)):
        fitting = [x for x in found if x.fits]
        best = min((x.step_seconds for x in fitting), default=math.inf)
        known = (x for x in fitting if 0 < expected.get(x.mesh, 0.0) < math.inf)
        wrong = min((x.step_seconds / expected[x.mesh] for x in known), default=0.0)
        if not wrong or ENOUGH_OF_LARGE * wrong * expected.get(mesh, 0.0) <= best:
            least = expected.get(mesh, 0.0) if expected.get(mesh) != math.inf else 0.0
            found.append(plan_mesh(split, mesh, options, cluster, None, place, least))
    return found


def plan_meshes(
    split: SplitStep,
    meshes: Sequence[tuple[int, ...]],
    options: Options,
    cluster: Cluster,
    report: Callable[[str], None],
    fits: Callable[[PlannedStage], None] = lambda planned: None,
    others: SearchSoFar = NOTHING_SO_FAR,
) -> list[PlannedStage]:
    """`plan_mesh` for each mesh, as far as that can be the cheapest of all that fit.

    A mesh whose cheapest program exceeds the memory and costs more than one that fits elsewhere is
    not planned within the limit. Where it is known what a step may be expected to take, the meshes
    are planned in that order, and not at all if it is hardly less than with what fits; by how much
    such expectations are wrong, the planned ones tell. Meshes of the same devices need about the
    same at the least: where more microbatches can be tried and two meshes of a large program do not
    fit with these, or one on which layers need no more, the others are not planned within the limit
    either. Nor are they planned at all where two need far too much, also chosen for their bytes; or
    one needs too much, where nothing was expected to fit and `others.only` are tried; or, where
    more microbatches can be tried, on two what needs more than there is takes longer than what
    fits. Nor is a mesh planned within the limit, where more can be tried, that plans chosen for
    their bytes miss by more than little. To plan within the limit ends where the solver proves that
    a mesh takes longer than what fits. Where nothing fits the smallest plan of all is looked for.

    Args:
      split: the whole step.
      meshes: logical shapes.
      options: method, memory limit and so on.
      cluster: the devices; a mesh may have fewer.
      report: takes a line of progress.
      fits: takes what fits, as it is found.
      others: what is known from elsewhere.
    """
    limit = memory_limit_of(options, cluster)
    searches, found = dict[int, MeshSearch](), dict[int, PlannedStage]()
    smaller = dict[int, list[PlannedStage]]()  # chosen for their bytes
    failed, too_dear, left, last, again = 0, 0, [*range(len(meshes))], list[int](), None

    def least(i: int) -> float:
        """What is known of the seconds on a mesh before it is planned (within the limit)."""
        if i in found:
            return slack(i) * found[i].least_seconds
        known = others.expected
        wrong = [
            (x.step_seconds if x.fits else x.least_seconds) / known[x.mesh]
            for x in found.values()
            if known.get(x.mesh)
        ]
        enough = ENOUGH_OF_LARGE if wrong else 1.0
        return known.get(meshes[i], 0.0) * min(wrong, default=1.0) * enough

    def small(i: int, count: int = len(DEAR)) -> list[PlannedStage]:
        """Plans on a mesh that are chosen for their bytes."""
        known = smaller.setdefault(i, [])
        known += (searches[i].dear(found[i], number) for number in range(len(known), count))
        return known[:count]

    def hopeless(i: int) -> bool:
        """Whether a large program needs far too much on a mesh, also if chosen for its bytes."""
        far = (HOPELESS_AS_EXPECTED if others.only else HOPELESS) * limit
        if not searches[i].is_large or found[i].bytes_at_least <= far:
            return False
        return min(x.bytes_at_least for x in small(i)) > far

    def nearly(i: int) -> bool:
        """Whether one of them fits, or hardly exceeds the limit."""
        return any(small(i, n + 1)[n].peak.bytes <= NEARLY * limit for n in range(len(DEAR)))

    def slack(i: int) -> float:
        """Times what a mesh takes at the least: what is found within the limit may lack as much."""
        return 1 + ENOUGH_MEMORY_GAP if i in found and searches[i].is_large else 1.0

    def asks(i: int, quickest: float) -> bool:
        """Whether values may be computed again instead; of a large step, before other shards do."""
        is_far = found[i].peak.bytes > NEARLY * limit
        return not searches[i].is_large or (is_far and least(i) <= quickest)

    def least_of(i: int) -> PlannedStage:
        """The smallest of the plans on a mesh so far."""
        best = min([found[i], *small(i)], key=lambda x: x.peak.bytes)
        return best if best is found[i] else replace(best, unlimited=found[i])

    while left:
        i = min(left, key=least)
        shape = " x ".join(map(str, meshes[i]))
        fitting = [_whole_seconds(x, cluster) for x in found.values() if x.fits]
        quickest = min(again or math.inf, *(fitting or [others.seconds]))
        if i in found and again is None and asks(i, quickest):
            quickest = min(quickest, again := others.again(found[i]))
        if found and least(i) > quickest:
            break
        if i not in found:
            of = f", {len(found) + 1} of {len(meshes)}" if len(meshes) > 1 else ""
            report(f"choosing shardings on a mesh of {shape}{of}")
            part = submesh(cluster, math.prod(meshes[i]))
            searches[i] = MeshSearch.of(split, meshes[i], options, part, None, None)
            found[i] = searches[i].attempt(None, False)
            if found[i].fits:
                fits(found[i])
                left.remove(i)
            enough = 1 if others.only else MESHES_TRIED
            may_stop = len(found) == enough and not others.more_microbatches
            if may_stop and all(i in left and hopeless(i) for i in found):
                return [least_of(i) for i in found]
            continue
        left.remove(i)
        first = found[i]
        may_wait = others.more_microbatches and searches[i].is_large
        hurries = may_wait and not others.expected.get(meshes[i])
        if hurries and failed == MESHES_TRIED:
            break
        missing = format_bytes(first.peak.bytes - limit)
        if others.more_microbatches and not (fitting or searches[i].is_large or nearly(i)):
            report(f"{missing} a device are missing on {shape}: too much")
            found[i] = least_of(i)
            continue
        report(f"{missing} a device are missing on {shape}: solving within the limit")
        tries = 1 if may_wait and not hurries else None
        at_most = quickest if searches[i].is_large else min(fitting, default=math.inf)
        by_price = searches[i].is_better_priced(first)
        try:
            if by_price:
                near = searches[i].at_least_price(first)
            else:
                near = searches[i].tightened(first, tries, at_most)
            is_dear = may_wait and not near.fits and near.step_seconds > at_most
        except TooDear:
            is_dear = True
        if is_dear:
            again = others.again(first) if again is None else again
            too_dear += may_wait
            if too_dear == MESHES_TRIED:
                break
            continue
        if tries and not near.fits:
            hurries = not small(i, 1)[0].fits  # then nothing fits, or hardly
            near = near if hurries or by_price else searches[i].tightened(near)
        tried = [first, near]
        if not near.fits:
            tried += small(i, 1 if hurries else len(DEAR))
            if any(x.fits for x in tried) and not by_price:
                tried.append(searches[i].at_least_price(first))
            elif not hurries and not hopeless(i):
                last.append(i)
            if not any(x.fits for x in tried):
                failed += 1
                need = others.need.get(meshes[i], math.inf) if may_wait else math.inf
                left = [j for j in left if others.need.get(meshes[j], 0) < need]
        within = min(
            (x for x in tried if x.fits),
            key=lambda x: x.step_seconds,
            default=min(tried, key=lambda x: x.peak.bytes),
        )
        if within is not first:
            found[i] = replace(within.proven_by(first), unlimited=first)
            if within.fits:
                fits(found[i])
        is_enough = within.fits and within.step_seconds <= slack(i) * first.least_seconds
        again = others.again(first) if again is None and not is_enough else again
    for i in last:
        if any(x.fits for x in found.values()):
            break
        found[i] = searches[i].smaller_than(found[i])
        if found[i].fits:
            fits(found[i])
    return [found[i] for i in sorted(found)]


def _whole_seconds(planned: PlannedStage, cluster: Cluster) -> float:
    """With what no node decides."""
    return planned.step_seconds + planned.costs(cluster).scalar_sums(planned.program.block)
