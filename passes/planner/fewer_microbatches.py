"""Stages with fewer microbatches, where one of them has more devices than a microbatch has rows.

Pipelines begin with some microbatches for each mesh, so that meshes wait little for each other
(Huang et al., "GPipe", 2019, section 3). With few rows in each of them, devices that would have
shared the rows share less, or compute the same: then fewer microbatches may be quicker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.base.errors import BatchArgumentError, InexactMicrobatchError, ScheduleError
from autopar.base.methods import BATCH_METHODS
from autopar.passes.graph.graph import batch_sizes
from autopar.passes.planner.candidates import PlannedStep, quickest
from autopar.passes.planner.layout_search import LayoutSearch

PlanStages = Callable[[LayoutSearch], list[PlannedStep]]


def automatic_stages(search: LayoutSearch) -> list[PlannedStep]:
    """Pipelines whose stages are chosen; of methods that cut only rows, with fewer microbatches."""
    made = search.automatic_pipelines()
    if search.options.method in BATCH_METHODS:
        made += with_fewer_microbatches(search, made, LayoutSearch.automatic_pipelines)
    return made


def with_fewer_microbatches(
    search: LayoutSearch, made: Sequence[PlannedStep], plan: PlanStages
) -> list[PlannedStep]:
    """Plans with half of the microbatches, and half of these, while that is quicker.

    And as long as a microbatch has fewer rows than a stage has devices; of methods that cut only
    rows until it has as many, for till then nothing tells how quick they are. None where their
    number is asked for, or nothing fits of what was `made`.
    """
    last, sizes = quickest(made), batch_sizes(search.graph)
    least = math.inf if last is None else last.step_seconds
    more: list[PlannedStep] = []
    while search.options.microbatches == "auto" and last is not None and sizes:
        count = last.split.num_microbatches
        most = max(math.prod(planned.mesh) for planned in last.planned)
        if count < 2 or min(sizes) // count >= most:
            break
        options = replace(search.options, microbatches=count // 2)
        try:
            found = plan(replace(search, options=options))
        except (BatchArgumentError, InexactMicrobatchError, ScheduleError):
            break  # a schedule may want more of them
        more += found
        last = quickest(found)
        is_quicker = last is not None and last.step_seconds < least
        if not is_quicker and search.options.method not in BATCH_METHODS:
            break
        least = min(least, math.inf if last is None else last.step_seconds)
    return more
