"""Pipelines of a small program as they are asked for by their number: even stages.

The search for stages adds up what layers cost alone, which tells little of a small program: its
collectives and kernels take as long as the shortest do, and it may have one layer only, or one
microbatch. To plan such a program takes about as long as to price its layers, so a few pipelines
are planned.
"""

from __future__ import annotations

from dataclasses import replace

from jax.extend.core import Jaxpr

from autopar.base.errors import BatchArgumentError, InexactMicrobatchError, OptionError
from autopar.passes.graph.graph import batch_sizes, inner_jaxprs
from autopar.passes.planner.candidates import PlannedStep
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.layouts import asked_layout, largest_count
from autopar.passes.planner.stages_within import seconds_of_best

SMALL_PROGRAM = 2000  # equations, with those of every trip of a scan
FIRST = 8  # microbatches, if their number is not asked for
HOPELESS = 1.2  # times what all else takes: other numbers of microbatches are not tried


def even_pipelines(search: LayoutSearch) -> list[PlannedStep]:
    """Two stages of about the same FLOPs on submeshes of one size, then four, and so on.

    As long as twice as many take less time than all else; of a small program only.
    """
    made: list[PlannedStep] = []
    is_small = _equations(search.graph.jaxpr) <= SMALL_PROGRAM
    if not is_small or search.options.logical_mesh is not None:
        return made
    best, stages, asked = search.best_seconds, 2, search.options.microbatches
    count = largest_count(batch_sizes(search.graph), FIRST) if asked == "auto" else int(asked)
    while search.cluster.num_devices % stages == 0:
        found = _planned(search, stages, count)
        is_hopeful = bool(found) and seconds_of_best(found) <= HOPELESS * best
        if asked == "auto" and stages == 2 and is_hopeful:
            found += _around(search, stages, found)
        made += found
        if seconds_of_best(found) >= best:
            break
        best, stages = seconds_of_best(found), 2 * stages
        if asked == "auto":
            quickest = min(found, key=lambda step: step.step_seconds)
            count = largest_count(batch_sizes(search.graph), 2 * quickest.split.num_microbatches)
    return made


def _around(search: LayoutSearch, stages: int, made: list[PlannedStep]) -> list[PlannedStep]:
    """With more microbatches than were planned, or else with fewer, as long as that is quicker."""
    first, sizes = made[0].split.num_microbatches, batch_sizes(search.graph)
    others: list[PlannedStep] = []
    for more in (True, False):
        best, count, last = seconds_of_best(made), first, 0
        while count != last:
            last = count
            count = largest_count(sizes, 2 * count) if more else max(count // 2, 2)
            found = _planned(search, stages, count) if count != last else []
            others += found
            if seconds_of_best(found) >= best:
                break
            best = seconds_of_best(found)
        if best < seconds_of_best(made):
            break
    return others


def _planned(search: LayoutSearch, stages: int, count: int) -> list[PlannedStep]:
    options = replace(search.options, stages=stages, microbatches=count)
    asked = replace(search, options=options)
    try:
        return asked.candidates(asked_layout(options, search.cluster), optional=True)[0]
    except (OptionError, BatchArgumentError, InexactMicrobatchError):
        return []  # it has fewer layers, say


def _equations(jaxpr: Jaxpr) -> int:
    """How many a program runs: those of a scan's body in every trip."""
    count = len(jaxpr.eqns)
    for eqn in jaxpr.eqns:
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        count += trips * sum(map(_equations, inner_jaxprs(eqn)))
    return count
