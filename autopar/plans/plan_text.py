"""A plan as plain text: what `print(plan)` shows, and what tests compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.base.units import format_bytes, format_flops, format_mesh, format_seconds
from autopar.plans.stage_summaries import (
    format_homes,
    format_layers,
    format_stages,
    group_stage_collectives,
    group_transfers,
)
from autopar.plans.summaries import (
    describe_cluster,
    fold_tensors,
    format_value,
    group_certificate,
    results_of,
)

if TYPE_CHECKING:
    from autopar.base.plan_records import (
        Candidate,
        PipelinePlan,
        PlanRecord,
        SolverSummary,
        TensorPlan,
    )


def render(plan: PlanRecord) -> str:
    """The summary of a plan, its tensors, collectives, certificate and candidates."""
    blocks = [_summary(plan)]
    if plan.pipeline is not None:
        blocks += [_stages(plan), _transfers(plan)]
    blocks.append(_tensors("inputs", plan.inputs, plan))
    if results := results_of(plan):
        blocks.append(_tensors("results", results, plan))
    blocks.append(_collectives(plan))
    if plan.certificate:
        blocks.append(_certificate(plan))
    if plan.candidates:
        blocks.append(_candidates(plan.candidates))
    return "\n\n".join("\n".join(block) for block in blocks)


def describe_solver(solver: SolverSummary) -> str:
    """One line: the problem's size, and how far the choice may be from the best."""
    size = f"{solver.nodes} nodes, {solver.edges} edges"
    if solver.gap is None:
        return f"{size}; no bound was proved"
    if solver.gap == 0:
        return f"{size}; proved optimal for the cost model"
    return f"{size}; at most {solver.gap:.2%} of the cost above the best"


def describe_pipeline(pipeline: PipelinePlan, num_stages: int) -> str:
    """One line: the stages, their meshes, the schedule, and how long the meshes wait."""
    chunks = f", {pipeline.num_chunks} to a mesh" if pipeline.num_chunks > 1 else ""
    return (
        f"{num_stages} stages on {pipeline.num_meshes} meshes{chunks}, "
        f"schedule {pipeline.schedule}, {pipeline.bubble_fraction:.0%} bubble"
    )


def _stages(plan: PlanRecord) -> list[str]:
    rows = [
        (
            f"  {number}",
            format_layers(stage.layers),
            str(stage.mesh),
            format_mesh(stage.logical_mesh, stage.axis_names),
            format_seconds(sum(item.seconds * item.times for item in stage.collectives)),
            format_bytes(stage.peak_bytes_per_device),
        )
        for number, stage in enumerate(plan.stages)
    ]
    header = ("stage", "layers", "mesh", "axes", "collectives", "peak on its mesh")
    return _table(header, rows, "llrlrr")


def _transfers(plan: PlanRecord) -> list[str]:
    assert plan.pipeline is not None
    rows = [
        (f"  {group.routes}", group.what, group.value, str(group.count), format_bytes(group.bytes))
        for group in group_transfers(plan.pipeline.transfers, len(plan.stages))
    ]
    if not rows:
        return ["sent between stages: nothing"]
    header = ("sent between stages", "what", "value", "times", "bytes a step")
    return _table(header, rows, "lllrr")


def _summary(plan: PlanRecord) -> list[str]:
    estimates = plan.estimates
    lines = [f"autopar plan: {plan.method}"]
    meshes = {format_mesh(stage.logical_mesh, stage.axis_names): None for stage in plan.stages}
    lines.append(f"  mesh          {', '.join(meshes)} ({describe_cluster(plan.cluster)})")
    if plan.pipeline is not None:
        lines.append(f"  pipeline      {describe_pipeline(plan.pipeline, len(plan.stages))}")
    step = (
        f"{format_seconds(estimates.step_seconds)}: "
        f"compute {format_seconds(estimates.compute_seconds)}, "
        f"communication {format_seconds(estimates.communication_seconds)}, "
        f"{format_flops(estimates.flops)}"
    )
    memory = (
        f"{format_bytes(estimates.peak_bytes_per_device)} at the peak on each device, "
        f"{format_bytes(estimates.state_bytes_per_device)} of it state"
    )
    lines += [
        f"  microbatches  {plan.num_microbatches} ({plan.reason_for_microbatches})",
        f"  step          {step}",
        f"  memory        {memory}",
    ]
    if plan.solver is not None:
        lines.append(f"  solver        {describe_solver(plan.solver)}")
    return lines


def _tensors(title: str, tensors: Sequence[TensorPlan], plan: PlanRecord) -> list[str]:
    staged = plan.pipeline is not None
    rows = [
        (
            f"  {group.path}",
            group.tensor.role + (", donated" if group.tensor.donated else ""),
            format_value(group.tensor),
            str(group.count),
            format_bytes(group.bytes_per_device),
            *((format_homes(group.stages),) if staged else ()),
        )
        for group in fold_tensors(tensors, [stage.mesh for stage in plan.stages])
    ]
    header = (title, "role", "value (n/x: cut along x)", "of", "per device")
    if staged:
        return _table((*header, "stage"), rows, "lllrrl")
    return _table(header, rows, "lllrr")


def _collectives(plan: PlanRecord) -> list[str]:
    staged = plan.pipeline is not None
    rows = [
        (
            f"  {group.purpose}",
            group.kind,
            ",".join(group.axes),
            str(group.count),
            format_bytes(group.bytes),
            format_seconds(group.seconds),
            *((format_stages(stages),) if staged else ()),
        )
        for group, stages in group_stage_collectives(plan.stages)
    ]
    if not rows:
        return ["collectives a step: none"]
    header = ("collectives a step", "kind", "axes", "times", "bytes", "estimate")
    if staged:
        return _table((*header, "stage"), rows, "lllrrrl")
    return _table(header, rows, "lllrrr")


def _certificate(plan: PlanRecord) -> list[str]:
    rows = [
        (f"  {how}" if i == 0 else "", str(count) if i == 0 else "", name)
        for how, count, names in group_certificate(plan)
        for i, name in enumerate(names)
    ]
    return _table(("microbatch certificate", "outputs", ""), rows, "lrl")


def _candidates(candidates: Sequence[Candidate]) -> list[str]:
    rows = [
        (
            f"{'*' if item.chosen else ' '} {item.method}",
            "x".join(map(str, item.logical_mesh)),
            str(item.num_microbatches),
            "-" if item.step_seconds is None else format_seconds(item.step_seconds),
            "-" if item.peak_bytes_per_device is None else format_bytes(item.peak_bytes_per_device),
            item.note,
        )
        for item in candidates
    ]
    header = ("considered", "mesh", "microbatches", "step", "peak memory", "note")
    return _table(header, rows, "llrrrl")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Aligned columns; `sides` has an "l" or "r" for each."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, sides, strict=True)
        ).rstrip()
        for row in (header, *rows)
    ]
