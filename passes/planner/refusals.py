"""What is said where no plan fits."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.base.cluster import Cluster
from autopar.base.errors import MemoryLimitError
from autopar.base.methods import BATCH_METHODS, LOOP_METHODS
from autopar.base.options import Options
from autopar.passes.planner.candidates import PlannedStep
from autopar.passes.planner.stage_shardings import memory_limit_of


def out_of_memory(
    candidates: Sequence[PlannedStep], options: Options, cluster: Cluster, reason: str
) -> MemoryLimitError:
    """The error that says the least memory that would do, and what to try."""
    limit = memory_limit_of(options, cluster)
    whole = [c for c in candidates if not c.is_pipeline]
    best = min(whole or candidates, key=lambda c: max(c.peak_bytes))
    what = f"No plan keeps within {limit:,} bytes per device"
    if whole:
        hints = ["a smaller batch", "more devices"]
        if options.method in (*BATCH_METHODS, *LOOP_METHODS):
            hints.insert(0, "method='auto'")
        if options.microbatches != "auto":
            hints.insert(0, "microbatches='auto'")
        where = f"method={options.method!r}, {cluster.num_devices} devices"
        alive = best.planned[0].peak.alive
        hint = f"raise memory_limit, or use {', '.join(hints)}."
    else:
        schedule, mesh = best.schedule, best.peak_bytes.index(max(best.peak_bytes))
        stages = [s for s, m in enumerate(schedule.mesh_of_stage) if m == mesh]
        names = " and ".join(map(str, stages))
        what += f": stage {names} needs {best.peak_bytes[mesh]:,}"
        count = schedule.num_microbatches
        asked = list(options.stages) if isinstance(options.stages, tuple) else options.stages
        where = f"stages={asked!r}, schedule {schedule.name}, {count} microbatches"
        tensors = (item for s in stages for item in best.planned[s].peak.alive)
        alive = tuple(sorted(tensors, key=lambda item: -item[1]))
        use = "more stages, " if reason else "more stages, more microbatches, "
        hint = f"raise memory_limit, or use {use}or a schedule with fewer in flight (1f1b)."
    what += f" ({reason})." if reason else "."
    return MemoryLimitError(
        what, where=where, hint=hint, least_bytes=max(best.peak_bytes), largest_tensors=alive[:5]
    )
