"""What is said where no plan fits."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.base.cluster import Cluster
from autopar.base.errors import MemoryLimitError
from autopar.base.methods import BATCH_METHODS, LOOP_METHODS
from autopar.base.options import Options
from autopar.base.units import format_bytes, format_microbatches
from autopar.passes.planner.candidates import PlannedStep
from autopar.passes.planner.least_memory import state_on_devices
from autopar.passes.planner.planned_stage import PlannedStage
from autopar.passes.planner.stage_shardings import memory_limit_of
from autopar.passes.sharding.spmd_program import local_bytes


def smallest(candidates: Sequence[PlannedStep]) -> PlannedStep:
    """The candidate that needs least memory; of equal ones the first on one mesh."""
    return min(candidates, key=lambda c: (max(c.peak_bytes), c.is_pipeline))


def out_of_memory(
    candidates: Sequence[PlannedStep],
    options: Options,
    cluster: Cluster,
    reason: str,
    would_fit: Sequence[str] = (),
) -> MemoryLimitError:
    """The error that says the least memory that would do, and what to try.

    Args:
      candidates: what was planned; none fits.
      options: what was asked for.
      cluster: all devices.
      reason: why there are no more microbatches.
      would_fit: changes with which a plan that fits was found.
    """
    limit = memory_limit_of(options, cluster)
    best = smallest(candidates)
    if max(best.peak_bytes) <= limit:
        return _hosts_too_small(best, cluster)
    what = f"No plan keeps within {limit:,} bytes per device"
    if not best.is_pipeline:
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
    what += f" ({reason.removesuffix('.')})." if reason else "."
    if would_fit:
        hint = "would fit, tried one by one: " + "; or ".join(would_fit) + "."
    return MemoryLimitError(
        what,
        where=where,
        hint=hint,
        least_bytes=max(best.peak_bytes),
        least_plan=_in_words(best),
        largest_tensors=alive[:5],
        would_fit=would_fit,
        state=_state_of(best, options, cluster),
    )


def _state_of(best: PlannedStep, options: Options, cluster: Cluster) -> str:
    """How much of what a candidate needs is the state, in words; and whether that is too much."""
    needs = dict.fromkeys(best.schedule.mesh_of_stage, 0)
    for mesh, planned in zip(best.schedule.mesh_of_stage, best.planned, strict=True):
        needs[mesh] += state_bytes(planned)
    mesh = best.peak_bytes.index(max(best.peak_bytes))
    share = state_on_devices(best.split.graph, options, cluster) // cluster.num_devices
    if share > memory_limit_of(options, cluster):
        return (
            f"its state (parameters, optimizer) alone, shared evenly among all "
            f"{cluster.num_devices} devices, is {format_bytes(share)} on each: no plan can fit."
        )
    return f"{format_bytes(needs[mesh])} of that are state (parameters, optimizer)."


def state_bytes(planned: PlannedStage) -> int:
    """Bytes of a device that hold the state."""
    leaves = zip(planned.program.block.inputs, planned.split.graph.inputs, strict=True)
    mesh = planned.program.mesh
    return sum(local_bytes(value, mesh) for value, label in leaves if label.role == "state")


def _hosts_too_small(best: PlannedStep, cluster: Cluster) -> MemoryLimitError:
    """The error of a step that fits the devices, and not the memory of their hosts."""
    needed = best.host_bytes * cluster.devices_per_node
    return MemoryLimitError(
        f"The hosts of {cluster.name} have too little memory for what offload= puts there.",
        where=f"{_in_words(best)}",
        why=f"a node has {cluster.host_memory_bytes:,} bytes (host_memory_bytes of the cluster), "
        f"and {needed:,} would be in it.",
        hint="put less there, cut the state over more devices (method='zero3'), or use more nodes.",
        least_bytes=max(best.peak_bytes),
    )


def _in_words(candidate: PlannedStep) -> str:
    """What a candidate is, in a line."""
    parts = [format_microbatches(candidate.split.num_microbatches)]
    if candidate.is_pipeline:
        parts.append(f"{candidate.schedule.num_stages} stages, {candidate.schedule.name}")
    else:
        parts.append("a mesh of " + " x ".join(map(str, candidate.planned[0].mesh)))
    splits = (candidate.split, *(planned.split for planned in candidate.planned))
    found = [split.recomputation for split in splits if split.recomputation is not None]
    if any(again.operations or not again.weights for again in found) or any(candidate.remat):
        parts.append("values computed again")
    if any(again.weights for again in found):
        parts.append("weights gathered again")
    return ", ".join(parts)
