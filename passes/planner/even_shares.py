"""Stages that are chosen since the devices of one mesh do not share the batch evenly.

A data-parallel method gives every device an equal share of every microbatch; stages have fewer
devices, so that they may do where one mesh does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.base.cluster import Cluster
from autopar.base.errors import AutoparWarning, BatchArgumentError
from autopar.base.options import Options
from autopar.base.user_code import warn_at_call
from autopar.passes.graph.graph import Graph
from autopar.passes.planner.candidates import PlannedStep
from autopar.passes.planner.layouts import logical_meshes
from autopar.passes.sharding.restrict import check_batch


def with_even_shares(
    candidates: Sequence[PlannedStep], graph: Graph, method: str
) -> list[PlannedStep]:
    """Those whose stages share every microbatch evenly, as the method says."""
    return [
        candidate
        for candidate in candidates
        if all(
            _divides(graph, method, planned.mesh, candidate.split.num_microbatches)
            for planned in candidate.planned
        )
    ]


def warn_of_stages(chosen: PlannedStep, graph: Graph, options: Options, cluster: Cluster) -> None:
    """Say that there are stages, nobody having asked, because one mesh cannot share the batch."""
    if options.stages != "auto" or not chosen.is_pipeline:
        return
    meshes = logical_meshes(options, cluster, graph, of_stage=False)
    if any(_divides(graph, options.method, mesh, 1) for mesh in meshes):
        return
    warn_at_call(
        f"method={options.method!r} is planned in {chosen.schedule.num_stages} stages: a batch of "
        f"this size cannot be divided among {cluster.num_devices} devices, but among those of each "
        "stage. stages=1 refuses it, and says what would do.",
        AutoparWarning,
    )


def _divides(graph: Graph, method: str, mesh: tuple[int, ...], count: int) -> bool:
    try:
        check_batch(graph, method, mesh, count)
    except BatchArgumentError:
        return False
    return True
