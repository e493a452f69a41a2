"""Stages with fewer microbatches, where a stage's devices cannot share the rows of one.

Pipelines begin with some microbatches for each mesh, so that meshes wait little for each other
(Huang et al., "GPipe", 2019, section 3). With few rows in each of them, devices that would have
shared the rows share less, or compute the same: then fewer microbatches may be quicker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from autopar.base.errors import BatchArgumentError, InexactMicrobatchError, ScheduleError
from autopar.base.methods import BATCH_METHODS
from autopar.base.options import Options
from autopar.passes.graph.graph import batch_sizes
from autopar.passes.planner.candidates import PlannedStep, quickest
from autopar.passes.planner.layout_search import LayoutSearch

PlanStages = Callable[[LayoutSearch], list[PlannedStep]]

MISSES = 2  # numbers in a row that are no quicker, after which no more are tried


def automatic_stages(search: LayoutSearch) -> list[PlannedStep]:
    """Pipelines whose stages are chosen; of methods that cut only rows, with fewer microbatches."""
    made = search.automatic_pipelines()
    if _cut_only_rows(search.options):
        made += with_fewer_microbatches(search, made, LayoutSearch.automatic_pipelines)
    return made


def with_fewer_microbatches(
    search: LayoutSearch, made: Sequence[PlannedStep], plan: PlanStages
) -> list[PlannedStep]:
    """Plans with half of the microbatches and so on, where devices do not share their rows evenly.

    Also with the most with which they do. It ends where numbers are no quicker; of methods that cut
    only rows not before devices share these evenly, for uneven shares tell nothing of even ones.
    There are none where the number is asked for, the schedule is a function of the user's (which
    need not know other numbers), or nothing fits of what was `made`.
    """
    first, sizes = quickest(made), batch_sizes(search.graph)
    asked = search.options.microbatches != "auto" or callable(search.options.schedule)
    if asked or first is None or not sizes or _share_evenly(first, sizes):
        return []
    least, misses, more = first.step_seconds, 0, list[PlannedStep]()
    for count in _fewer(first, sizes):
        options = replace(search.options, microbatches=count)
        try:
            found = plan(replace(search, options=options))
        except (BatchArgumentError, InexactMicrobatchError, ScheduleError):
            continue  # some numbers the batch does not divide into, some a schedule does not take
        more += found
        best = quickest(found)
        misses = 0 if best is not None and best.step_seconds < least else misses + 1
        least = min(least, math.inf if best is None else best.step_seconds)
        if _cut_only_rows(search.options):
            is_over = misses > 0 and best is not None and _share_evenly(best, sizes)
        else:
            is_over = misses >= MISSES
        if is_over:
            break
    return more


def _cut_only_rows(options: Options) -> bool:
    return options.methods.issubset(BATCH_METHODS)


def _share_evenly(planned: PlannedStep, sizes: Collection[int]) -> bool:
    """Whether the devices of every stage divide the rows of a microbatch."""
    count = planned.split.num_microbatches
    return all(size // count % devices == 0 for size in sizes for devices in _devices(planned))


def _devices(planned: PlannedStep) -> set[int]:
    return {math.prod(stage.mesh) for stage in planned.planned}


def _fewer(planned: PlannedStep, sizes: Collection[int]) -> list[int]:
    """Halves, and the most that leave a multiple of a stage's devices, from many to few."""
    count, most = planned.split.num_microbatches, max(_devices(planned))
    rows = math.gcd(*sizes)
    even = [x for x in range(1, count) if rows % x == 0 and rows // x % most == 0]
    halves = [count >> n for n in range(1, count.bit_length())]
    return sorted({*halves, *even[-1:]}, reverse=True)
