"""`autopar.scaling`: one step planned for several clusters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from autopar.absent_devices import capability_of
from autopar.base.cluster import Cluster
from autopar.base.errors import AutoparError, OptionError, TraceError
from autopar.base.progress import Progress
from autopar.building import plan_traced, trace_step
from autopar.report.scaling_report import ScaledStep, Scaling
from autopar.requests import ClusterOrName, make_request, name_of, read_arguments
from autopar.shown_options import shows_options

if TYPE_CHECKING:
    from autopar.passes.trace.trace import Traced

GPUS = "GPUs with cuDNN's attention"


@shows_options
def scaling(
    fn: Callable[..., Any],
    *args: Any,
    clusters: Sequence[ClusterOrName],
    **options_and_kwargs: Any,
) -> Scaling:
    """Plan a step for several clusters: step, throughput, efficiency and memory side by side.

    It is a function and no method of a plan, because a plan has no program and could only be
    stretched: here the step is traced once for each kind of device, and planned anew for every
    cluster, with the same arguments, so with the same batch.

    Args:
      fn: as for `autopar.plan`.
      *args: the arguments, or `jax.ShapeDtypeStruct`s in their place.
      clusters: for which it is planned, or their names ("2x8 h100"); no device is needed.
      **options_and_kwargs: what is asked of the plans, as on the page Options, the same for
        all clusters; other names are the step's own arguments by keyword.

    Ctrl-C ends it with the rows that are there, of which the last may be the best so far.

    Returns:
      A `Scaling`: it prints as a table, has `rows` with the plan for each cluster or the reason why
      there is none, and `plot()` and `save_plot(path)` for a picture.

    Raises:
      OptionError, TraceError: what would be wrong on every cluster.

    >>> import jax, numpy as np, autopar
    >>> shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((8, 8), (64, 8))]
    >>> nodes = [autopar.Cluster.preset("dgx-h100", nodes=n) for n in (1, 2)]
    >>> found = autopar.scaling(lambda w, x: w + x.T @ x, *shapes, clusters=nodes, method="data")
    >>> [row.cluster.num_devices for row in found.rows]
    [8, 16]
    """
    found = tuple(clusters) if isinstance(clusters, Sequence) else ()
    if not found or isinstance(clusters, str):
        raise OptionError(
            f"clusters={clusters!r} is not possible.",
            why="it must be a sequence of clusters, one at least.",
            hint="clusters=['1x8 h100', '2x8 h100', '4x8 h100'].",
        )
    asked = [make_request({}, cluster, None).cluster or Cluster.local() for cluster in found]
    fn, request, kwargs = read_arguments(fn, None, None, options_and_kwargs, "scaling")
    rows = list[ScaledStep]()
    with Progress(
        f"planning {name_of(fn)} for {len(found)} clusters", request.progress
    ) as progress:
        traced: dict[str, Traced | TraceError] = {}
        # GPUs first: of functions that are jitted inside, JAX remembers how it traced them before.
        for kind, cluster in sorted(_oldest(asked).items(), key=lambda item: item[0] != GPUS):
            try:
                traced[kind] = trace_step(fn, args, kwargs, request, cluster, progress)
            except TraceError as error:
                traced[kind] = error
        wrong = [each for each in traced.values() if isinstance(each, TraceError)]
        if len(wrong) == len(traced):
            raise wrong[0]
        for cluster in asked:
            started, own = time.monotonic(), traced[_kind(cluster)]
            if isinstance(own, TraceError):
                rows.append(ScaledStep(cluster, None, own))
                continue
            try:
                progress.report(f"planning for {cluster.num_devices} devices")
                made = plan_traced(own, request, cluster, None, progress).plan
            except TraceError:
                raise
            except KeyboardInterrupt:
                if not rows:
                    raise
                return Scaling(tuple(rows), interrupted=True)
            except AutoparError as error:
                rows.append(ScaledStep(cluster, None, error))
            else:
                rows.append(ScaledStep(cluster, made))
                seconds = time.monotonic() - started
                if made.interrupted and seconds < (request.options.planning_time_limit or math.inf):
                    return Scaling(tuple(rows), interrupted=True)  # by Ctrl-C
    return Scaling(tuple(rows))


def _oldest(clusters: Sequence[Cluster]) -> dict[str, Cluster]:
    """By kinds of devices, the cluster for which a step is traced: what the oldest can, all can."""
    found = dict[str, Cluster]()
    for cluster in clusters:
        other = found.setdefault(_kind(cluster), cluster)
        if capability_of(cluster.device.name) < capability_of(other.device.name):
            found[_kind(cluster)] = cluster
    return found


def _kind(cluster: Cluster) -> str:
    """What devices have in common whose programs are traced alike."""
    return GPUS if capability_of(cluster.device.name) else cluster.device.name
