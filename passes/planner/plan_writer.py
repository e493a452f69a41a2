"""Between a solved candidate and the `Plan` that people read, save and run again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.extend.core import Jaxpr

from autopar.base.cluster import Cluster, axis_names
from autopar.base.costs import collective_seconds
from autopar.base.errors import PlanMismatchError
from autopar.base.options import Options
from autopar.base.plan_records import (
    Candidate,
    Collective,
    Estimates,
    NodeStrategy,
    PipelinePlan,
    SolverSummary,
    StagePlan,
    StageTransfer,
    TensorPlan,
)
from autopar.base.units import format_bytes
from autopar.base.version import __version__
from autopar.passes.graph.graph import inner_jaxprs
from autopar.passes.graph.primitives import CONTROL_FLOW
from autopar.passes.pieces.pieces import Pieces, Runnable
from autopar.passes.planner.candidates import (
    PlannedStep,
    label_batch,
    order,
    sliced,
    stage_options,
    take_apart,
)
from autopar.passes.planner.layouts import submesh
from autopar.passes.planner.plan_model import step_model
from autopar.passes.planner.stage_shardings import PlannedStage, SplitStep, prepare
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.flops import flops
from autopar.passes.primitives.populate import populate
from autopar.passes.schedules.make import make_schedule
from autopar.passes.schedules.schedule import ONE_STAGE
from autopar.passes.sharding.collectives import collectives, short_source
from autopar.passes.sharding.constraint_axes import warn_of_lost
from autopar.passes.sharding.layout import Layout, describe
from autopar.passes.sharding.lower import lower
from autopar.passes.sharding.peak_memory import local_bytes
from autopar.passes.sharding.scopes import aval_shape, itemsize
from autopar.passes.sharding.spmd_program import SpmdProgram, is_literal
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.slicing.slice_stages import one_stage
from autopar.plans.plan import Plan


def write_plan(
    chosen: PlannedStep,
    candidates: Sequence[PlannedStep],
    program_hash: str,
    options: Options,
    cluster: Cluster,
) -> Plan:
    """Write down what was chosen, what it is expected to cost, and what else was considered."""
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
    communication = max(sum(c.seconds * c.times for c in stage.collectives) for stage in stages)
    cost = sum(p.solution.cost for p in planned)
    bound = sum(p.solution.lower_bound for p in planned)

    def state_bytes(mesh: int) -> int:
        here = (t for t in inputs if mesh in {schedule.mesh_of_stage[s] for s in t.stages})
        return sum(t.bytes_per_device for t in here if t.role == "state")

    return Plan(
        autopar_version=__version__,
        jax_version=jax.__version__,
        program_hash=program_hash,
        options=options.to_dict(),
        cluster=cluster.to_dict(),
        method=options.method,
        num_microbatches=chosen.split.num_microbatches,
        reason_for_microbatches=_reason(chosen, options),
        stages=stages,
        inputs=inputs,
        outputs=outputs,
        certificate=chosen.split.certificate,
        estimates=Estimates(
            step_seconds=chosen.step_seconds,
            compute_seconds=max(chosen.step_seconds - communication, 0.0),
            communication_seconds=communication,
            peak_bytes_per_device=max(chosen.peak_bytes),
            state_bytes_per_device=max(map(state_bytes, range(schedule.num_meshes))),
            flops=float(total_flops(chosen.split.graph.jaxpr, chosen.split.rules)),
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
        pipeline=_pipeline(chosen, cluster),
    )


def _stages(chosen: PlannedStep, cluster: Cluster) -> tuple[StagePlan, ...]:
    ends = (0, *chosen.stages.boundaries, len(chosen.stages.layers))
    homes = chosen.schedule.mesh_of_stage
    return tuple(
        StagePlan(
            logical_mesh=p.mesh,
            axis_names=p.program.axis_names,
            num_devices=math.prod(p.mesh),
            strategies=strategies_of(p),
            collectives=_collectives(p.program, submesh(cluster, math.prod(p.mesh))),
            mesh=homes[number],
            layers=(ends[number], ends[number + 1]),
            peak_bytes_per_device=chosen.peak_bytes[homes[number]],
            remat="full" if chosen.remat[number] else "none",
        )
        for number, p in enumerate(chosen.planned)
    )


def _pipeline(chosen: PlannedStep, cluster: Cluster) -> PipelinePlan:
    schedule = chosen.schedule
    return PipelinePlan(
        schedule=schedule.name,
        num_meshes=schedule.num_meshes,
        num_chunks=schedule.num_stages // schedule.num_meshes,
        boundaries=chosen.stages.boundaries,
        splits_backward=schedule.splits_backward,
        bubble_fraction=chosen.timeline.bubble_fraction,
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
        model=step_model(chosen.split, chosen.pieces, chosen.program, chosen.planned, cluster),
    )


def _candidate(candidate: PlannedStep, chosen: bool, options: Options) -> Candidate:
    notes = []
    if candidate.is_pipeline:
        notes.append(f"{candidate.schedule.num_stages} stages, {candidate.schedule.name}")
    if any(candidate.remat):
        notes.append(f"remat on {sum(candidate.remat)}")
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
    if chosen.is_pipeline:
        meshes = chosen.schedule.num_meshes
        return f"four for each of the {meshes} meshes, as far as the batch divides"
    limit = format_bytes(chosen.limit)
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
        bytes_per_device=size if is_literal(version) else local_bytes(version, program.mesh),
        donated=donated,
        stages=stages,
    )


def follow_plan(plan: Plan, split: SplitStep, options: Options) -> Runnable:
    """What the meshes run in a plan that was made before.

    Raises:
      PlanMismatchError: its stages or strategies are not those of this program.
    """
    cluster, pipeline = Cluster.from_dict(plan.cluster), plan.pipeline
    if not plan.is_pipeline:
        stages, schedule = one_stage(split.step, split.rules), ONE_STAGE
    else:
        split, stages = sliced(split, pipeline.boundaries, split_backward=pipeline.splits_backward)
        name = options.schedule if callable(options.schedule) else pipeline.schedule
        meshes, chunks = pipeline.num_meshes, pipeline.num_chunks
        schedule = make_schedule(name, meshes, plan.num_microbatches, num_chunks=chunks)
    if len(stages.graphs) != len(plan.stages):
        raise PlanMismatchError(
            f"The plan has {len(plan.stages)} stages, its boundaries make {len(stages.graphs)}.",
            hint="plan again.",
        )
    shapes = [written.logical_mesh for written in plan.stages]
    warn_of_lost(zip((x.graph.jaxpr for x in stages.graphs), shapes, strict=True))
    programs = []
    for stage, written in zip(label_batch(stages), plan.stages, strict=True):
        one = SplitStep(stage.step, populate(stage.graph.jaxpr)) if plan.is_pipeline else split
        mesh = written.logical_mesh
        own = stage_options(stage, options)
        built, pricing, dims = prepare(one, mesh, own, submesh(cluster, math.prod(mesh)))
        assignment = assignment_of(written, built)
        programs.append(lower(stage.step, built, assignment, pricing, axis_names(mesh), dims))
    remat = [stage.remat == "full" for stage in plan.stages]
    pieces = take_apart(stages, programs, remat)
    return Runnable(pieces, order(schedule, pieces, split), stages.leaves, stages.results)


def strategies_of(planned: PlannedStage) -> tuple[NodeStrategy, ...]:
    """What was chosen for every node, as a plan stores it."""
    names, built = planned.program.axis_names, planned.built
    chosen = planned.solution.assignment[: len(built.nodes)]
    return tuple(
        NodeStrategy(name, short_source(node.source), _choice_text(node.layouts, s, names))
        for name, node, s in zip(_node_names(built), built.nodes, chosen, strict=True)
    )


def assignment_of(stage: StagePlan, built: StrategyGraph) -> list[int]:
    """The inverse of `strategies_of`.

    Raises:
      PlanMismatchError: the stage's strategies are not those of this program.
    """
    if [strategy.node for strategy in stage.strategies] != _node_names(built):
        raise PlanMismatchError(
            "The plan's strategies do not fit this program.",
            why="it was made by another version of autopar or of a library.",
            hint="plan again.",
        )
    assignment = []
    for strategy, node in zip(stage.strategies, built.nodes, strict=True):
        texts = [_choice_text(node.layouts, s, stage.axis_names) for s in range(len(node.layouts))]
        if strategy.choice not in texts:
            raise PlanMismatchError(
                f"The plan chooses {strategy.choice!r} for {strategy.node!r}, which is no choice.",
                hint="plan again.",
            )
        assignment.append(texts.index(strategy.choice))
    return assignment


def _node_names(built: StrategyGraph) -> list[str]:
    return [f"{index}: {node.label}" for index, node in enumerate(built.nodes)]


def _choice_text(layouts: Sequence[Layout], s: int, names: Sequence[str]) -> str:
    return f"{s} {describe(layouts[s], names)}"


def _collectives(program: SpmdProgram, cluster: Cluster) -> tuple[Collective, ...]:
    """The collectives of a step on one mesh, with the seconds that they are expected to take."""

    def seconds(item: Collective) -> float:
        axes = [program.axis_names.index(name) for name in item.axes]
        return collective_seconds(item.kind, item.bytes, cluster, program.mesh, axes)

    return tuple(dataclasses.replace(item, seconds=seconds(item)) for item in collectives(program))


def total_flops(jaxpr: Jaxpr, rules: Rules, times: int = 1) -> int:
    """Operations of a whole step over all devices; loops count their trips, branches both sides."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CONTROL_FLOW:
            inner = inner_jaxprs(eqn)
            trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            total += sum(total_flops(body, rules, times * trips) for body in inner)
        else:
            total += times * flops(eqn, rules[eqn])
    return total
