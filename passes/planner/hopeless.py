"""Whether no plan can fit at all, told by what every plan has at some time, before any is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.passes.planner.least_memory import LeastMemory, state_on_devices
from autopar.passes.planner.searched_step import SearchedStep
from autopar.passes.planner.stage_shardings import memory_limit_of

MOST_SUMS = 2.0  # bytes of gradients, or of sums over microbatches, for each byte of the state
FAR = 1.25  # times the limit: where a small plan needs more, no other one fits


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
