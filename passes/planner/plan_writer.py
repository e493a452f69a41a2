"""Between a solved candidate and the `Plan` that people read, save and run again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax

from autopar.base.cluster import Cluster
from autopar.base.costs import collective_seconds
from autopar.base.options import Options
from autopar.base.plan_edits import digests
from autopar.base.plan_records import (
    Candidate,
    Collective,
    Estimates,
    NodeStrategy,
    PipelinePlan,
    SolverSummary,
    Spec,
    StagePlan,
    StageTransfer,
    TensorPlan,
)
from autopar.base.units import format_bytes, without_rows
from autopar.base.version import __version__
from autopar.passes.graph.first_readers import first_readers
from autopar.passes.graph.graph import Graph, batch_sizes
from autopar.passes.pieces.pieces import Pieces
from autopar.passes.planner.candidates import (
    PlannedStep,
)
from autopar.passes.planner.host_memory import in_host_memory
from autopar.passes.planner.layouts import largest_count, submesh
from autopar.passes.planner.plan_model import step_model
from autopar.passes.planner.planned_stage import PlannedStage
from autopar.passes.planner.rewritings import AS_WRITTEN
from autopar.passes.planner.runners_up import runners_up, seconds_per_gib
from autopar.passes.planner.step_lines import step_lines
from autopar.passes.primitives.flops import total_flops
from autopar.passes.sharding.collectives import collectives_of, short_source
from autopar.passes.sharding.layout import Layout, describe
from autopar.passes.sharding.scopes import aval_shape, itemsize
from autopar.passes.sharding.spmd_program import is_literal, part_bytes
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.plans.plan import Plan


def write_plan(
    chosen: PlannedStep,
    candidates: Sequence[PlannedStep],
    program_hash: str,
    options: Options,
    cluster: Cluster,
    model_flops: Mapping[str, float],
    followed: str = "",
) -> Plan:
    """Write down what was chosen, what it is expected to cost, and what else was considered.

    `model_flops` are those of the step as it was traced, by dtype; `followed` names the plan whose
    decisions were taken over, if there is one.
    """
    schedule, planned = chosen.schedule, chosen.planned
    graph, pieces = chosen.split.graph, chosen.pieces
    inputs = tuple(
        _tensor_plan(pieces, values, label.path, label.role, donated=label.donated)
        for label, values in zip(graph.inputs, pieces.inputs, strict=True)
    )
    outputs = tuple(
        _tensor_plan(pieces, (value,), label.path, "output" if label.alias is None else "state")
        for label, value in zip(graph.outputs, pieces.outputs, strict=True)
    )
    stages = _stages(chosen, cluster)
    pipeline = _pipeline(chosen, cluster)
    busiest = chosen.forecast.busy.index(max(chosen.forecast.busy))
    compute, communication = _busy(chosen, pipeline, busiest)
    cost = sum(p.solution.cost for p in planned)
    bound = sum(p.solution.lower_bound for p in planned)

    def state_bytes(mesh: int) -> int:
        here = (t for t in inputs if mesh in {schedule.mesh_of_stage[s] for s in t.stages})
        return sum(t.device_bytes for t in here if t.role == "state")

    made = Plan(
        autopar_version=__version__,
        jax_version=jax.__version__,
        program_hash=program_hash,
        options=options.to_dict(),
        cluster=cluster.to_dict(),
        method=options.method,
        num_microbatches=chosen.split.num_microbatches,
        reason_for_microbatches=followed or _reason(chosen, options),
        stages=stages,
        inputs=inputs,
        outputs=outputs,
        certificate=chosen.split.certificate,
        padding=chosen.split.rewriting.padding,
        expert_blocks=chosen.split.rewriting.expert_blocks,
        later_loops=chosen.split.later_loops,
        recomputation=chosen.split.recomputation,
        host=in_host_memory(chosen, cluster),
        row_sorts=graph.row_sorts,
        estimates=Estimates(
            step_seconds=chosen.step_seconds,
            compute_seconds=compute,
            communication_seconds=communication,
            peak_bytes_per_device=max(chosen.peak_bytes),
            state_bytes_per_device=max(map(state_bytes, range(schedule.num_meshes))),
            flops=float(total_flops(chosen.split.graph.jaxpr, chosen.split.rules)),
            model_flops={dtype: float(count) for dtype, count in model_flops.items()},
        ),
        solver=SolverSummary(
            cost=cost,
            lower_bound=bound,
            gap=(cost - bound) / cost if cost else 0.0,
            nodes=sum(len(p.built.nodes) for p in planned),
            edges=sum(len(p.built.edges) for p in planned),
            strategies=sum(n.num_strategies for p in planned for n in p.built.nodes),
        ),
        candidates=tuple(_candidate(c, c is chosen, options) for c in candidates),
        pipeline=pipeline,
        lines=step_lines(chosen, busiest, cluster, compute, communication),
    )
    return dataclasses.replace(made, written=digests(made))


def _busy(chosen: PlannedStep, pipeline: PipelinePlan, mesh: int) -> tuple[float, float]:
    """What a mesh computes and moves in a step, in seconds.

    Both are parts of the simulated step, whose rest that mesh waits.
    """
    busy, homes = chosen.forecast.busy, chosen.schedule.mesh_of_stage
    pieces = pipeline.model.pieces if pipeline.model else ()
    here = (piece for piece in pieces if homes[piece.stage] == mesh)
    compute = sum(chosen.times(piece.when) * piece.compute_seconds for piece in here)
    return min(compute, busy[mesh]), max(busy[mesh] - compute, 0.0)


def _stages(chosen: PlannedStep, cluster: Cluster) -> tuple[StagePlan, ...]:
    ends = (0, *chosen.stages.boundaries, len(chosen.stages.layers))
    homes, graph = chosen.schedule.mesh_of_stage, chosen.split.graph
    lines = map(short_source, first_readers(graph.jaxpr))
    sources = dict(zip((label.path for label in graph.inputs), lines, strict=True))
    # Stages that compute the same share the solution of one of them.
    first = {id(p.solution): p for p in chosen.planned}
    others_of = {key: runners_up(p, chosen.limit) for key, p in first.items()}
    found = [others_of[id(p.solution)] for p in chosen.planned]
    return tuple(
        StagePlan(
            logical_mesh=p.mesh,
            axis_names=p.program.axis_names,
            num_devices=math.prod(p.mesh),
            strategies=strategies_of(p, sources),
            collectives=_collectives(chosen, number, submesh(cluster, math.prod(p.mesh))),
            mesh=homes[number],
            layers=(ends[number], ends[number + 1]),
            peak_bytes_per_device=chosen.peak_bytes[homes[number]],
            remat="full" if chosen.remat[number] else "none",
            casts=p.split.casts,
            recomputation=p.split.recomputation if chosen.is_pipeline else None,
            runners_up=others,
            seconds_per_gib=seconds_per_gib(p, others),
        )
        for number, (p, others) in enumerate(zip(chosen.planned, found, strict=True))
    )


def _pipeline(chosen: PlannedStep, cluster: Cluster) -> PipelinePlan:
    schedule = chosen.schedule
    return PipelinePlan(
        schedule=schedule.name,
        num_meshes=schedule.num_meshes,
        num_chunks=schedule.num_stages // schedule.num_meshes,
        boundaries=chosen.stages.boundaries,
        splits_backward=schedule.splits_backward,
        bubble_fraction=chosen.forecast.bubble_fraction,
        transfers=tuple(
            StageTransfer(
                source=link.source,
                target=link.target,
                what=link.label,
                shape=tuple(link.shape),
                dtype=str(link.dtype),
                bytes=link.bytes,
                times=schedule.num_microbatches if link.per_microbatch else 1,
            )
            for link in chosen.stages.links
        ),
        model=step_model(chosen.split, chosen.pieces, chosen.parts, chosen.planned, cluster),
    )


def _candidate(candidate: PlannedStep, chosen: bool, options: Options) -> Candidate:
    notes = []
    if candidate.is_pipeline:
        notes.append(f"{candidate.schedule.num_stages} stages, {candidate.schedule.name}")
    if candidate.split.rewriting != AS_WRITTEN:
        notes.append(str(candidate.split.rewriting))
    if candidate.split.later_loops:
        count = len(candidate.split.step.loops)
        does = {"keep": "kept", "reuse": "reused", "recompute": "computed again"}[
            candidate.split.later_loops
        ]
        notes.append(f"{count} loops, rows {does}")
    if (again := candidate.split.recomputation) is not None:
        if again.operations or not again.weights:
            notes.append(f"{sum(x for _, x in again.operations)} operations run again")
        if again.weights:
            notes.append(f"{again.weights} weights gathered again")
    if any(candidate.remat):
        notes.append(f"remat on {sum(candidate.remat)}")
    if cast := sum(p.split.casts != "once" for p in candidate.planned):
        notes.append(f"casts in every microbatch on {cast}")
    if candidate.is_pipeline:
        some = sum(p.split.recomputation is not None for p in candidate.planned)
        notes += [f"some values computed again on {some}"] if some else []
    if not candidate.fits:
        notes.append("exceeds the memory limit")
    return Candidate(
        method=options.method,
        logical_mesh=candidate.planned[0].mesh,
        num_microbatches=candidate.split.num_microbatches,
        step_seconds=candidate.step_seconds,
        peak_bytes_per_device=max(candidate.peak_bytes),
        chosen=chosen,
        note=", ".join(notes),
    )


def _reason(chosen: PlannedStep, options: Options) -> str:
    if options.microbatches != "auto":
        return "as asked"
    limit = format_bytes(chosen.limit)
    if chosen.is_pipeline:
        meshes, sizes = chosen.schedule.num_meshes, batch_sizes(chosen.split.graph)
        if chosen.split.num_microbatches == largest_count(sizes, 4 * meshes):
            return f"four for each of the {meshes} meshes, as far as the batch divides"
        return f"the quickest of those tried with which a pipeline fits {limit} per device"
    if chosen.split.num_microbatches == 1:
        return f"the whole batch at once fits {limit} per device"
    return f"the fewest with which a step fits {limit} per device"


def _tensor_plan(
    pieces: Pieces, values: Sequence[int], path: str, role: str, *, donated: bool = False
) -> TensorPlan:
    """How a leaf is stored that is these values of the pieces, each on another stage."""
    version, stages = pieces.versions[values[0]], tuple(pieces.values[v].stage for v in values)
    program, aval = pieces.programs[stages[0]], version.atom.aval
    shape = aval_shape(version.atom)
    size = math.prod(shape) * itemsize(aval)
    return TensorPlan(
        path=path,
        role=role,
        shape=shape,
        dtype=str(aval.dtype),
        spec=tuple(tuple(program.axis_names[a] for a in axes) for axes in version.layout.dims),
        bytes=size,
        bytes_per_device=size if is_literal(version) else part_bytes(version, program.mesh),
        donated=donated,
        stages=stages,
        memory="host" if version.layout.in_host else "device",
    )


def leaf_types(graph: Graph) -> dict[str, str]:
    """The dtype and shape of each of the user's leaves by its path: `float32[8, 4]`."""
    named = zip(graph.inputs, graph.jaxpr.invars, strict=True)
    return {
        label.path: f"{var.aval.dtype}[{', '.join(map(str, aval_shape(var)))}]"
        for label, var in named
        if label.role != "constant"
    }


def output_specs(pieces: Pieces) -> list[Spec]:
    """How the results of pieces lie."""
    tensors = (_tensor_plan(pieces, (value,), "", "output") for value in pieces.outputs)
    return [tensor.spec for tensor in tensors]


def strategies_of(planned: PlannedStage, sources: Mapping[str, str]) -> tuple[NodeStrategy, ...]:
    """What was chosen for every node, as a plan stores it; `sources` are lines that read inputs."""
    names, built = planned.program.axis_names, planned.built
    chosen = planned.solution.assignment[: len(built.nodes)]
    return tuple(
        NodeStrategy(
            name,
            short_source(node.source) or sources.get(without_rows(node.label), ""),
            choice_text(node.layouts, s, names),
        )
        for name, node, s in zip(node_names(built), built.nodes, chosen, strict=True)
    )


def node_names(built: StrategyGraph) -> list[str]:
    """What a plan calls the nodes."""
    return [f"{index}: {node.label}" for index, node in enumerate(built.nodes)]


def choice_text(layouts: Sequence[Layout], s: int, names: Sequence[str]) -> str:
    """How a plan writes strategy s of a node: its number and its layout."""
    return f"{s} {describe(layouts[s], names)}"


def _collectives(chosen: PlannedStep, stage: int, cluster: Cluster) -> tuple[Collective, ...]:
    """What the pieces of a stage run in a step, with the seconds that it is expected to take."""
    program = chosen.pieces.programs[stage]
    runs = [
        (piece.block, chosen.times(piece.kind), piece.kind if chosen.is_pipeline else "")
        for piece in chosen.pieces.pieces
        if piece.stage == stage
    ]

    def seconds(item: Collective) -> float:
        axes = [program.axis_names.index(name) for name in item.axes]
        return collective_seconds(item.kind, item.bytes, cluster, program.mesh, axes)

    listed = collectives_of(program, runs)
    return tuple(dataclasses.replace(item, seconds=seconds(item)) for item in listed)
