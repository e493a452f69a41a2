"""Steps on one mesh that compute values of the forward pass again, from most kept to least."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autopar.base.cluster import Cluster
from autopar.base.errors import BatchArgumentError, InexactMicrobatchError, OptionError
from autopar.base.options import Options
from autopar.passes.graph.graph import Graph
from autopar.passes.planner.candidates import PlannedStep, plan_layout
from autopar.passes.planner.layouts import StageLayout
from autopar.passes.planner.least_memory import state_on_devices
from autopar.passes.planner.mesh_choice import SearchSoFar
from autopar.passes.planner.recomputed_steps import RecomputedSteps
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_shardings import memory_limit_of


def recomputed_plans(
    graph: Graph,
    split: Callable[[int, bool], SplitStep],
    layout: StageLayout,
    options: Options,
    cluster: Cluster,
    report: Callable[[str], None],
    counts: Iterable[int],
    only: tuple[tuple[int, ...], ...] = (),
) -> list[PlannedStep]:
    """Plans for one mesh that compute again what they cannot keep.

    With the fewest microbatches with which any fits; of these what computes least again.

    Args:
      graph: the traced step.
      split: the step in a number of microbatches; with a second argument that is true, with a loop.
      layout: one stage.
      options: memory limit, method and so on.
      cluster: all devices.
      report: takes a line of progress.
      counts: numbers of microbatches that are tried, ascending.
      only: the logical shapes that are worth trying, if not all are.
    """
    made: list[PlannedStep] = []
    state = state_on_devices(graph, options, cluster)
    if state > cluster.num_devices * memory_limit_of(options, cluster):
        return []

    def fits(step: SplitStep) -> bool:
        others = SearchSoFar(only=only)
        planned = plan_layout(step, layout, options, cluster, report, others=others)
        made.extend(planned)
        return any(candidate.fits for candidate in planned)

    for count in counts:
        try:
            hosting = options.offload == "auto"
            steps = RecomputedSteps.of(split(count, True), cluster, hosting)
        except (InexactMicrobatchError, BatchArgumentError, OptionError):
            break
        if steps.least_that_fits(fits, report):
            break
    return made
