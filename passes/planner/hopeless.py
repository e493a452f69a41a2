"""Steps that no plan can fit, told by what every plan has at some time: small plans instead of all.

They tell the least bytes that would do, for the refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.passes.graph.graph import batch_sizes
from autopar.passes.planner.automatic_stages import AutomaticStages
from autopar.passes.planner.candidates import PlannedStep, on_one_mesh
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.layouts import StageLayout, microbatch_counts
from autopar.passes.planner.least_memory import LeastMemory, state_on_devices
from autopar.passes.planner.one_mesh import largest_even
from autopar.passes.planner.searched_step import SearchedStep
from autopar.passes.planner.small_plans import small_plans
from autopar.passes.planner.stage_shardings import memory_limit_of

LITTLE_STATE = 2**30  # bytes; a step with less is searched through in any case
MOST_SUMS = 2.0  # bytes of gradients, or of sums over microbatches, for each byte of the state
FAR = 1.25  # times the limit: where a small plan needs more, no other one fits


def hopeless_plans(search: LayoutSearch, layout: StageLayout) -> list[PlannedStep]:
    """Small plans, where no plan can fit on one mesh or in stages that are chosen; else none.

    Stages have several microbatches. Where bounds leave only the whole batch of a long program, a
    small plan of it tells, if the devices divide its rows. A small model is searched through in any
    case, and so are stages that are asked for.
    """
    graph, options, cluster = search.graph, search.options, search.cluster
    if layout.is_pipeline or state_on_devices(graph, options, cluster) < LITTLE_STATE:
        return []
    counts = [*microbatch_counts(graph, options, layout)]
    likely = [count for count in AutomaticStages(search).counts()[:1] if count in counts]
    possible = may_fit(search, likely or counts, lambda: search.least_memory)
    possible = possible or may_fit(search, counts, lambda: search.least_memory)
    if possible:
        is_even = largest_even(possible, batch_sizes(graph), cluster.num_devices)
        if possible != [1] or counts == [1] or not search.is_long or not is_even:
            return []
    hardly = "hardly a" if possible else "no"
    search.report(f"{hardly} plan can fit: looking for the least that would do")
    limit = memory_limit_of(options, cluster)
    tried = (planned for each in (counts, possible) for planned in small_plans(search, each))
    small = [on_one_mesh(planned, cluster, limit) for planned in tried]
    least = min((max(step.peak_bytes) for step in small), default=0)
    return small if least > (FAR if possible else 1) * limit else []


def may_fit(
    search: SearchedStep, counts: Sequence[int], least: Callable[[], LeastMemory]
) -> list[int]:
    """The numbers of microbatches with which a step may fit, however it is cut.

    Not where its state alone is more than all devices have, or that and what is there beside it
    however few rows a microbatch has. With the most is looked first, which tells of fewer.

    Args:
      search: the step.
      counts: numbers of microbatches, ascending, of one mesh or of stages.
      least: what every plan has.
    """
    have = search.cluster.num_devices * memory_limit_of(search.options, search.cluster)
    state = state_on_devices(search.graph, search.options, search.cluster)
    if state > have or state * (1 + MOST_SUMS) <= have:
        return [] if state > have else [*counts]
    memory = least()
    first = memory.at_any_time(counts[-1]) <= have
    return [*counts] if first else [x for x in counts if memory.at_any_time(x) <= have]
