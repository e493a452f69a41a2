"""Between a pipelined candidate and the `Plan` that people read, save and run again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax

from autopar import __version__
from autopar.base.cluster import Cluster, axis_names
from autopar.base.errors import PlanMismatchError
from autopar.base.options import Options
from autopar.passes.pieces.cutting import cut
from autopar.passes.pieces.pieces import Pieces
from autopar.passes.pipeline.emit import emit
from autopar.passes.planner.candidates import Planned, Split, prepare
from autopar.passes.planner.pipeline_candidates import (
    Pipelined,
    Runnable,
    donated_values,
    flexible_equations,
    label_batch,
    stage_options,
    submesh,
)
from autopar.passes.planner.plan_model import step_model
from autopar.passes.planner.plan_writer import (
    assignment_of,
    priced_collectives,
    strategies_of,
    tensor_plan,
    total_flops,
)
from autopar.passes.primitives.populate import populate
from autopar.passes.schedules.make import make_schedule
from autopar.passes.sharding.lower import lower
from autopar.passes.slicing.slice_stages import slice_stages
from autopar.plans.plan import (
    Candidate,
    Estimates,
    PipelinePlan,
    Plan,
    SolverSummary,
    StagePlan,
    StageTransfer,
    TensorPlan,
)


def make_pipeline_plan(
    chosen: Pipelined,
    candidates: Sequence[Candidate],
    program_hash: str,
    options: Options,
    cluster: Cluster,
) -> Plan:
    """Write down what was chosen, what it is expected to cost, and what else was considered."""
    stages, schedule = chosen.stages, chosen.schedule
    ends = (0, *stages.boundaries, len(stages.layers))
    listed = [priced_collectives(p.program, submesh(cluster, math.prod(p.mesh)))
              for p in chosen.planned]  # fmt: skip
    inputs = _inputs(chosen.split, chosen.pieces)
    communication = [sum(c.seconds * c.times for c in items) for items in listed]
    solutions = [p.solution for p in chosen.planned]
    cost, bound = sum(s.cost for s in solutions), sum(s.lower_bound for s in solutions)
    return Plan(
        autopar_version=__version__,
        jax_version=jax.__version__,
        program_hash=program_hash,
        options=options.to_dict(),
        cluster=cluster.to_dict(),
        method=options.method,
        num_microbatches=schedule.num_microbatches,
        reason_for_microbatches=(
            "as asked"
            if options.microbatches != "auto"
            else f"four for each of the {schedule.num_meshes} meshes, as far as the batch divides"
        ),
        stages=tuple(
            StagePlan(
                logical_mesh=p.mesh,
                axis_names=p.program.axis_names,
                num_devices=math.prod(p.mesh),
                strategies=strategies_of(p),
                collectives=listed[number],
                mesh=schedule.mesh_of_stage[number],
                layers=(ends[number], ends[number + 1]),
                peak_bytes_per_device=chosen.peak_bytes[schedule.mesh_of_stage[number]],
                remat="full" if chosen.remat[number] else "none",
            )
            for number, p in enumerate(chosen.planned)
        ),
        inputs=inputs,
        outputs=_outputs(chosen.split, chosen.pieces),
        certificate=chosen.split.certificate,
        estimates=Estimates(
            step_seconds=chosen.step_seconds,
            compute_seconds=max(chosen.step_seconds - max(communication), 0.0),
            communication_seconds=max(communication),
            peak_bytes_per_device=max(chosen.peak_bytes),
            state_bytes_per_device=max(
                sum(
                    t.bytes_per_device
                    for t in inputs
                    if t.role == "state" and mesh in {schedule.mesh_of_stage[s] for s in t.stages}
                )
                for mesh in range(schedule.num_meshes)
            ),
            flops=float(total_flops(chosen.split.graph.jaxpr, chosen.split.rules)),
        ),
        solver=SolverSummary(
            cost=cost,
            lower_bound=bound,
            gap=(cost - bound) / cost if cost else 0.0,
            nodes=sum(len(p.built.nodes) for p in chosen.planned),
            edges=sum(len(p.built.edges) for p in chosen.planned),
            strategies=sum(n.num_strategies for p in chosen.planned for n in p.built.nodes),
        ),
        candidates=tuple(candidates),
        pipeline=PipelinePlan(
            schedule=schedule.name,
            num_meshes=schedule.num_meshes,
            num_chunks=schedule.num_stages // schedule.num_meshes,
            boundaries=stages.boundaries,
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
                for link in stages.links
            ),
            model=step_model(chosen.split, chosen.pieces, chosen.program, chosen.planned, cluster),
        ),
    )


def list_candidates(
    candidates: Sequence[Planned | Pipelined], chosen: Planned | Pipelined, options: Options
) -> tuple[Candidate, ...]:
    """What was considered, as a plan lists it."""
    found = []
    for c in candidates:
        if isinstance(c, Pipelined):
            mesh, count, peak = c.planned[0].mesh, c.schedule.num_microbatches, max(c.peak_bytes)
            notes = [f"{c.schedule.num_stages} stages, {c.schedule.name}"]
            if any(c.remat):
                notes.append(f"remat on {sum(c.remat)}")
        else:
            mesh, count, peak = c.mesh, c.num_microbatches, c.peak.bytes
            notes = []
        if not c.fits:
            notes.append("exceeds the memory limit")
        found.append(
            Candidate(
                method=options.method,
                logical_mesh=mesh,
                num_microbatches=count,
                step_seconds=c.step_seconds,
                peak_bytes_per_device=peak,
                chosen=c is chosen,
                note=", ".join(notes),
            )
        )
    return tuple(found)


def _inputs(split: Split, pieces: Pieces) -> tuple[TensorPlan, ...]:
    found = []
    for number, label in enumerate(split.graph.inputs):
        group = pieces.inputs[number]
        homes = tuple(pieces.values[value].stage for value in group)
        version = pieces.versions[group[0]]
        found.append(
            tensor_plan(
                version, label.path, label.role, label.donated, pieces.programs[homes[0]], homes
            )
        )
    return tuple(found)


def _outputs(split: Split, pieces: Pieces) -> tuple[TensorPlan, ...]:
    found = []
    for label, value in zip(split.graph.outputs, pieces.outputs, strict=True):
        stage = pieces.values[value].stage
        role = "output" if label.twin is None else "state"
        version = pieces.versions[value]
        found.append(
            tensor_plan(version, label.path, role, False, pieces.programs[stage], (stage,))
        )
    return tuple(found)


def follow_pipeline(plan: Plan, split: Split, options: Options) -> Runnable:
    """What the meshes run in a plan that was made before.

    Raises:
      PlanMismatchError: its stages or strategies are not those of this program.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    cluster = Cluster.from_dict(plan.cluster)
    stages = slice_stages(
        split.graph, split.rules, pipeline.boundaries, split_backward=pipeline.splits_backward
    )
    split = dataclasses.replace(split, graph=stages.whole, rules=stages.rules)
    if len(stages.graphs) != len(plan.stages):
        raise PlanMismatchError(
            f"The plan has {len(plan.stages)} stages, its boundaries make {len(stages.graphs)}.",
            hint="plan again.",
        )
    programs, flexible = [], []
    for stage, written in zip(label_batch(stages), plan.stages, strict=True):
        one = Split(stage.graph, populate(stage.graph.jaxpr), ())
        mesh = written.logical_mesh
        built, pricing, dims = prepare(
            one, mesh, stage_options(stage.graph, options), submesh(cluster, math.prod(mesh))
        )
        assignment = assignment_of(written, built)
        programs.append(lower(stage.graph, built, assignment, pricing, axis_names(mesh), dims))
        flexible.append(flexible_equations(built.scope))
    remat = [stage.remat == "full" for stage in plan.stages]
    pieces = cut(stages, programs, flexible, remat)
    schedule = make_schedule(
        options.schedule if callable(options.schedule) else pipeline.schedule,
        pipeline.num_meshes,
        plan.num_microbatches,
        num_chunks=pipeline.num_chunks,
    )
    program = emit(
        schedule,
        pieces.values,
        [piece.plain() for piece in pieces.pieces],
        pieces.transfers,
        inputs=[number for group in pieces.inputs for number in group],
        outputs=pieces.outputs,
        donated=donated_values(split, pieces),
    )
    return Runnable(pieces, program, stages.leaves, stages.results)
