"""On which logical mesh a stage, or the whole step, takes least time and fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.base.units import format_bytes
from autopar.passes.planner.layouts import submesh
from autopar.passes.planner.stage_shardings import (
    ENOUGH_OF_LARGE,
    LARGE_PROBLEM,
    Allowed,
    MeshSearch,
    PlaceInPipeline,
    PlannedStage,
    SplitStep,
    memory_limit_of,
)
from autopar.passes.sharding.strategy_graph import StrategyGraph

MESHES_TRIED = 2  # of those that do not fit, before more microbatches are


class SearchSoFar(NamedTuple):
    """What is known when meshes are planned: a step that fits takes so long elsewhere.

    And whether `more_microbatches` can be tried after these.
    """

    seconds: float = math.inf
    more_microbatches: bool = False


NOTHING_SO_FAR = SearchSoFar()


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
    first = search.attempt(None, search.remats[0])
    return first if first.fits else search.within(first)


def plan_on_any(
    split: SplitStep,
    meshes: Sequence[tuple[int, ...]],
    options: Options,
    cluster: Cluster,
    place: PlaceInPipeline,
) -> list[PlannedStage]:
    """`plan_mesh` of a stage for each mesh, as far as that can be the cheapest of all that fit.

    A mesh whose cheapest program exceeds the memory and costs more than one that fits on another
    mesh is not planned within the limit; nor is one of a large stage that costs hardly less.
    """
    searches = [MeshSearch.of(split, mesh, options, cluster, None, place) for mesh in meshes]
    found = [search.attempt(None, search.remats[0]) for search in searches]
    best = min((x.step_seconds for x in found if x.fits), default=math.inf)
    exceeding = [i for i, planned in enumerate(found) if not planned.fits]
    for i in sorted(exceeding, key=lambda i: found[i].least_seconds):
        enough = ENOUGH_OF_LARGE if searches[i].is_large else 1.0
        if enough * found[i].least_seconds <= best:
            found[i] = searches[i].within(found[i])
            best = min(best, found[i].step_seconds if found[i].fits else math.inf)
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
    not planned within the limit: that would only cost more. Meshes of the same devices need about
    the same at the least: where more microbatches can be tried and two meshes of a large program do
    not fit with these, the others are not planned within the limit either.

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
    searches, found = [], list[PlannedStage]()
    for number, mesh in enumerate(meshes):
        of = f", {number + 1} of {len(meshes)}" if len(meshes) > 1 else ""
        report(f"choosing shardings on a mesh of {_shape(mesh)}{of}")
        part = submesh(cluster, math.prod(mesh))
        searches.append(MeshSearch.of(split, mesh, options, part, None, None))
        found.append(searches[-1].attempt(None, False))
        if found[-1].fits:
            fits(found[-1])
    firsts = list(found)
    exceeding = [i for i, planned in enumerate(found) if not planned.fits]
    failed = 0
    for i in sorted(exceeding, key=lambda i: firsts[i].solution.lower_bound):
        fitting = (_whole_seconds(x, cluster) for x in found if x.fits)
        if firsts[i].least_seconds > min(fitting, default=others.seconds):
            continue
        hurries = others.more_microbatches and len(searches[i].built.nodes) > LARGE_PROBLEM
        if hurries and failed == MESHES_TRIED:
            break
        missing = format_bytes(firsts[i].peak.bytes - limit)
        report(f"{missing} a device are missing on {_shape(meshes[i])}: solving within the limit")
        within = searches[i].tightened(firsts[i])
        if not within.fits:
            failed += 1
            small = [] if hurries else searches[i].small(firsts[i]) + searches[i].least(False)
            within = min([firsts[i], within, *small], key=lambda x: x.peak.bytes)
        if within is not firsts[i]:
            found[i] = replace(within, unlimited=firsts[i])
            if within.fits:
                fits(found[i])
    return found


def _whole_seconds(planned: PlannedStage, cluster: Cluster) -> float:
    """With what no node decides."""
    return planned.step_seconds + planned.costs(cluster).scalar_sums(planned.program.block)


def _shape(mesh: Sequence[int]) -> str:
    return " x ".join(map(str, mesh))
