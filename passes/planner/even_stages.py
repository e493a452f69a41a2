"""Pipelines of a small program as they are asked for by their number: even stages.

The search for stages adds up what layers cost alone, which tells little of a small program: its
collectives and kernels take as long as the shortest do, and it may have one layer only, or one
microbatch. To plan such a program takes about as long as to price its layers, so a few pipelines
are planned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from jax.extend.core import Jaxpr

from autopar.base.errors import (
    BatchArgumentError,
    InexactMicrobatchError,
    OptionError,
    PinError,
    ScheduleError,
)
from autopar.passes.graph.graph import batch_sizes, inner_jaxprs
from autopar.passes.planner.candidates import PlannedStep, quickest
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.layouts import asked_layout, largest_count
from autopar.passes.planner.stage_shardings import memory_limit_of
from autopar.passes.planner.stages_within import seconds_of_best

SMALL_PROGRAM = 2000  # equations, with those of every trip of a scan
_REFUSALS = BatchArgumentError, InexactMicrobatchError, OptionError, PinError, ScheduleError
FIRST = 4  # microbatches of two stages, if their number is not asked for
HOPELESS = 1.15  # times what all else takes: neither other numbers nor more stages are tried
FAR_FROM_FITTING = 2.0  # times the memory limit, what else was tried: these would not fit either
MOST_MISFITS = 8  # stages of which each may need too much memory: with more it is not tried


def even_pipelines(search: LayoutSearch, tried: Sequence[PlannedStep]) -> list[PlannedStep]:
    """Two stages of about the same FLOPs on submeshes of one size, then four, and so on.

    As long as they take hardly longer than all else, or do not fit; of a small program only, and
    none where the logical mesh is asked for. Where nothing fits of what was `tried`, but one nearly
    does, they begin with the most microbatches.
    """
    made: list[PlannedStep] = []
    is_small = _equations(search.graph.jaxpr) <= SMALL_PROGRAM
    if not is_small or search.options.logical_mesh is not None:
        return made
    best, stages = search.best_seconds, 2
    if math.isinf(best) and _is_far_from_fitting(search, tried):
        return made
    most = max(batch_sizes(search.graph), default=1)
    count = most if math.isinf(best) else FIRST
    while search.cluster.num_devices % stages == 0:
        found = _planned(search, stages, count)
        first = quickest(found)
        if first is not None and first.step_seconds <= HOPELESS * best:
            found += _around(search, first)
            first = quickest(found)
        made += found
        if first is not None:
            if first.step_seconds > HOPELESS * best:
                break
            best = min(best, first.step_seconds)
            count = 2 * first.split.num_microbatches
        elif not found or stages >= MOST_MISFITS:
            break
        stages *= 2
    return made


def _is_far_from_fitting(search: LayoutSearch, tried: Sequence[PlannedStep]) -> bool:
    least = min((max(step.peak_bytes) for step in tried), default=0)
    return least > FAR_FROM_FITTING * memory_limit_of(search.options, search.cluster)


def _around(search: LayoutSearch, first: PlannedStep) -> list[PlannedStep]:
    """As many stages with more microbatches, or else with fewer, as long as that is quicker."""
    made: list[PlannedStep] = []
    if search.options.microbatches != "auto":
        return made
    sizes, stages = batch_sizes(search.graph), first.schedule.num_meshes
    for more in (True, False):
        best, count = first.step_seconds, first.split.num_microbatches
        while True:
            count = 2 * count if more else count // 2
            if count < 1 or largest_count(sizes, count) != count:
                break
            found = _planned(search, stages, count)
            made += found
            if seconds_of_best(found) >= best:
                break
            best = seconds_of_best(found)
        if best < first.step_seconds:
            break
    return made


def _planned(search: LayoutSearch, stages: int, count: int) -> list[PlannedStep]:
    """With about so many microbatches, unless a number of them is asked for."""
    options = replace(search.options, stages=stages)
    if options.microbatches == "auto":
        count = largest_count(batch_sizes(search.graph), count)
        options = replace(options, microbatches=count)
    asked = replace(search, options=options)
    try:
        return asked.candidates(asked_layout(options, search.cluster), optional=True)[0]
    except _REFUSALS:
        return []  # it has fewer layers, say, or a schedule is not for so many meshes


def _equations(jaxpr: Jaxpr) -> int:
    """How many a program runs: those of a scan's body in every trip."""
    count = len(jaxpr.eqns)
    for eqn in jaxpr.eqns:
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        count += trips * sum(map(_equations, inner_jaxprs(eqn)))
    return count
