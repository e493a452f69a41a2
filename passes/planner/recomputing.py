"""Steps on one mesh that compute values of the forward pass again, from most kept to least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.base.cluster import Cluster
from autopar.base.errors import BatchArgumentError, InexactMicrobatchError, OptionError
from autopar.base.options import Options
from autopar.passes.graph.graph import Graph
from autopar.passes.planner.candidates import PlannedStep, plan_layout
from autopar.passes.planner.layouts import StageLayout
from autopar.passes.planner.least_memory import state_on_devices
from autopar.passes.planner.one_mesh import WORTH_GATHERING
from autopar.passes.planner.recomputed_steps import RecomputedSteps
from autopar.passes.planner.refusals import state_bytes
from autopar.passes.planner.search_so_far import SearchSoFar
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_shardings import memory_limit_of
from autopar.passes.sharding.gathered_twice import gathered_for_both

SAVED_AT_MOST = 4  # times what devices would save that share it evenly: some is cut less


def recomputed_plans(
    graph: Graph,
    split: Callable[[int, bool], SplitStep],
    layout: StageLayout,
    options: Options,
    cluster: Cluster,
    report: Callable[[str], None],
    counts: Sequence[int],
    even: int = 0,
    only: tuple[tuple[int, ...], ...] = (),
    others: Sequence[PlannedStep] = (),
) -> list[PlannedStep]:
    """Plans for one mesh that compute again what they cannot keep.

    With the fewest microbatches with which any fits; of these what computes least again. Weights
    that devices would have for both passes are gathered for each, if they are much of what is
    missing. Where the fewest of all do not fit, the largest `even` number is tried next and the
    most, and where none of these fits, nothing does; else those in the middle.

    Args:
      graph: the traced step.
      split: the step in a number of microbatches; with a second argument that is true, with a loop.
      layout: one stage.
      options: memory limit, method and so on.
      cluster: all devices.
      report: takes a line of progress.
      counts: numbers of microbatches that may be tried, ascending.
      even: the most of them of which each device has a row: with more, less is cut.
      only: the logical shapes that are worth trying, if not all are.
      others: plans that keep all, of which none fits: what more than they keep cannot be saved.
    """
    made: list[PlannedStep] = []
    limit, state = memory_limit_of(options, cluster), state_on_devices(graph, options, cluster)
    if state > cluster.num_devices * limit:
        return []

    fitting = dict[int, RecomputedSteps]()  # by microbatches

    def fits(step: SplitStep) -> bool:
        others = SearchSoFar(only=only)
        planned = plan_layout(step, layout, options, cluster, report, others=others)
        made.extend(planned)
        return any(candidate.fits for candidate in planned)

    def steps(count: int) -> RecomputedSteps | None:
        try:
            ways = RecomputedSteps.of(split(count, True), cluster, options.offload == "auto")
        except (InexactMicrobatchError, BatchArgumentError, OptionError):
            return None
        return replace(ways, weights=any(spared(x) >= WORTH_GATHERING * limit for x in others))

    def spared(step: PlannedStep) -> int:
        """Bytes of weights on a device that it need not have for both passes."""
        if step.is_pipeline:
            return 0
        plan = step.planned[0]
        more = max(state_bytes(plan) - state // cluster.num_devices, 0)
        ways = (plan, plan.unlimited)
        return more + max(gathered_for_both(x.program) for x in ways if x is not None)

    def may_do(count: int) -> bool:
        """Whether what keeps least fits."""
        ways = steps(count)
        if ways is None:
            return False
        alike = (x for x in others if x.split.num_microbatches == count and not x.is_pipeline)
        peaks = [max(x.peak_bytes) for x in alike]
        saved = SAVED_AT_MOST * ways.most_saved_bytes // cluster.num_devices
        if peaks and min(peaks) - saved > limit:
            return False
        before, does = len(made), ways.smallest_fits(fits, report)
        if not (does or ways.weights):
            missing = ((spared(x), max(x.peak_bytes) - limit) for x in made[before:])
            if any(held >= WORTH_GATHERING * most for held, most in missing):
                ways = replace(ways, weights=True)
                does = ways.smallest_fits(fits, report)
        if does:
            fitting[count] = ways
        return does

    if fewest := fewest_that_fit(counts, even, may_do):
        fitting[fewest].least_that_fits(fits, report)
    return made


def fewest_that_fit(counts: Sequence[int], even: int, fits: Callable[[int], bool]) -> int:
    """The fewest microbatches that fit, if more take less memory up to an even number; 0: none do.

    Where no number but the fewest is even, those in the middle may do as well as the most.

    >>> asked = []
    >>> def fits(count):
    ...     asked.append(count)
    ...     return count >= 8
    >>> fewest_that_fit([1, 2, 4, 8, 16, 32, 64, 128], 32, fits), asked
    (8, [1, 32, 4, 8])
    """
    if not counts or fits(counts[0]):
        return counts[0] if counts else 0
    likely = even if even in counts[1:] else counts[len(counts) // 2]
    for most in dict.fromkeys(x for x in (likely, counts[-1]) if x in counts[1:]):
        if fits(most):
            low, high = 0, counts.index(most)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if fits(counts[middle]) else (middle, high)
            return counts[high]
    return 0
