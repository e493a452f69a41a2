"""Plans of a step that are made to need little memory, and soon: what would fit, and what is least.

With as many microbatches as there may be, at a price of a byte that outweighs its seconds; and with
the backward pass computing again what it may, where that spares enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.base.cluster import Cluster
from autopar.base.costs import PICOSECONDS
from autopar.base.errors import BatchArgumentError, InexactMicrobatchError, OptionError
from autopar.base.options import Options
from autopar.passes.planner.layouts import logical_meshes, submesh
from autopar.passes.planner.planned_stage import PlannedStage
from autopar.passes.planner.recomputed_steps import RecomputedSteps
from autopar.passes.planner.searched_step import SearchedStep
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_shardings import DEAR, MeshSearch, memory_limit_of
from autopar.passes.sharding.memory_price import MemoryPrices
from autopar.passes.sharding.memory_rows import memory_rows, rows_peak
from autopar.passes.sharding.restrict import check_batch

NEARLY = 1.1  # times the limit: a plan that needs more is not looked for at another price
EVENLY = 2.0  # times an even share, what may be spared of what is not cut so
LITTLE = 0.1  # of what a plan needs: to spare less is not worth planning again


def small_plans(search: SearchedStep, counts: Sequence[int]) -> Iterator[PlannedStage]:
    """Small plans on one mesh: one that keeps all values, one that computes some again.

    The second only where the first does not fit, and where it may fit or spares not little.

    Args:
      search: the step.
      counts: numbers of microbatches, ascending; the most that are possible are taken.
    """
    options, cluster = search.options, search.cluster
    (mesh, *_) = logical_meshes(options, cluster, search.graph, of_stage=False)
    for count in reversed(counts):
        try:
            check_batch(search.graph, options.method, mesh, count)
            split = search.split(count)
        except (BatchArgumentError, InexactMicrobatchError):
            continue
        kept = _small(split, mesh, options, cluster)
        yield kept
        if options.remat not in ("auto", "override") or kept.fits:
            break
        try:
            steps = RecomputedSteps.of(search.split(count, True), cluster)
        except (InexactMicrobatchError, OptionError):
            break  # several loops over the microbatches
        spared = EVENLY * steps.most_saved_bytes / cluster.num_devices
        missing = kept.peak.bytes - memory_limit_of(options, cluster)
        if len(steps) and spared >= min(missing, LITTLE * kept.peak.bytes):
            yield _small(steps[len(steps) - 1], mesh, options, cluster)
        break


def _small(
    split: SplitStep, mesh: tuple[int, ...], options: Options, cluster: Cluster
) -> PlannedStage:
    """A plan that is chosen for its bytes more than for its time."""
    part = submesh(cluster, math.prod(mesh))
    search = MeshSearch.of(split, mesh, options, part, None, None)
    rows = memory_rows(search.built)
    prices = MemoryPrices(search.built, rows)
    free = search.hurried(prices.free)
    once = free.cost / PICOSECONDS / max(rows_peak(search.built, rows, free.assignment), 1)
    found = list[PlannedStage]()
    for dear in reversed(DEAR):
        planned = search.lowered(prices.solved(dear * once, search.hurried), False)
        found.append(planned)
        if planned.fits or planned.peak.bytes > NEARLY * search.limit:
            break
    return min(found, key=lambda x: x.peak.bytes)
