"""Plans that were made before: run as they are, or followed for other shapes of a batch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Set

from autopar.base.cluster import Cluster, axis_names
from autopar.base.errors import PlanMismatchError
from autopar.base.options import Options
from autopar.base.plan_records import StagePlan
from autopar.passes.graph.casts_again import casts_again
from autopar.passes.pieces.pieces import Runnable
from autopar.passes.planner.candidates import (
    PlannedStep,
    Report,
    assemble,
    parts_of,
    sliced,
    take_apart,
)
from autopar.passes.planner.layouts import submesh
from autopar.passes.planner.mesh_choice import plan_mesh, stage_options
from autopar.passes.planner.plan_writer import choice_text, node_names
from autopar.passes.planner.planned_stage import PlaceInPipeline, PlannedStage
from autopar.passes.planner.recomputed_steps import recomputed_step
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_labels import label_batch
from autopar.passes.planner.stage_shardings import memory_limit_of, prepare
from autopar.passes.primitives.populate import populate
from autopar.passes.schedules.make import make_schedule
from autopar.passes.schedules.schedule import ONE_STAGE, Schedule
from autopar.passes.sharding.constraint_axes import warn_of_lost
from autopar.passes.sharding.layout import Layout, describe
from autopar.passes.sharding.lower import lower
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.slicing.slice_stages import one_stage
from autopar.passes.slicing.stage_graphs import StageGraph, Stages
from autopar.plans.plan import Plan

NUMBERS_TRIED = 3  # of microbatches, before a batch of another size is planned anew


def follow_plan(plan: Plan, split: SplitStep, options: Options) -> Runnable:
    """What the meshes run in a plan that was made before.

    Raises:
      PlanMismatchError: its stages or strategies are not those of this program.
    """
    split, stages, schedule = _in_stages(plan, split, options)
    shapes = [written.logical_mesh for written in plan.stages]
    warn_of_lost(zip((x.graph.jaxpr for x in stages.graphs), shapes, strict=True))
    cluster, programs = Cluster.from_dict(plan.cluster), []
    for one, written, own in _each_stage(plan, split, stages, options):
        mesh = written.logical_mesh
        built, pricing, dims = prepare(one, mesh, own, submesh(cluster, math.prod(mesh)))
        assignment = assignment_of(written, built)
        programs.append(lower(one.step, built, assignment, pricing, axis_names(mesh), dims))
    pieces = take_apart(stages, programs, _remat(plan), schedule)
    parts = parts_of(pieces, split)
    return Runnable(pieces, parts, schedule, stages.leaves, stages.results)


def plan_like(
    plan: Plan, split: SplitStep, options: Options, cluster: Cluster, report: Report
) -> PlannedStep:
    """A plan of the same program for other shapes, with the decisions of one that was made before.

    Stages, schedule and logical meshes are the known plan's, and every node takes a strategy with
    the layout that it has there; the solver chooses where these shapes allow none.

    Raises:
      PlanMismatchError: the program falls into other stages.
      AutoparError: the schedule cannot have that number of microbatches.
    """
    split, stages, schedule = _in_stages(plan, split, options)
    planned: list[PlannedStage] = []
    for one, written, own in _each_stage(plan, split, stages, options):
        report("choosing shardings as in the known plan")
        mesh, allowed = written.logical_mesh, functools.partial(_as_written, plan, written)
        part = submesh(cluster, math.prod(mesh))
        own, place = _in_place(plan, stages, schedule, len(planned), own)
        planned.append(plan_mesh(one, mesh, own, part, allowed, place))
    limit = memory_limit_of(options, cluster)
    return assemble(split, stages, tuple(planned), schedule, cluster, limit, _remat(plan))


def plan_with(
    plan: Plan, split: SplitStep, options: Options, cluster: Cluster, with_choices: bool
) -> PlannedStep:
    """A plan with the stages, schedule and logical meshes of another, for other pins.

    With its choices, every node takes the strategy that is written there; else the best one.

    Raises:
      PlanMismatchError: its stages or strategies are not those of this program.
    """
    split, stages, schedule = _in_stages(plan, split, options)
    planned: list[PlannedStage] = []
    for one, written, own in _each_stage(plan, split, stages, options):
        mesh, only = written.logical_mesh, functools.partial(_only_as_written, written)
        part = submesh(cluster, math.prod(mesh))
        own, place = _in_place(plan, stages, schedule, len(planned), own)
        planned.append(plan_mesh(one, mesh, own, part, only if with_choices else None, place))
    limit = memory_limit_of(options, cluster)
    return assemble(split, stages, tuple(planned), schedule, cluster, limit, _remat(plan))


def counts_like(plan: Plan, rows: int | None, sizes: Set[int], options: Options) -> tuple[int, ...]:
    """Numbers of microbatches to try for a smaller batch, the best first.

    A microbatch has no more rows than one of the known plan, and where possible as many for each
    device; of such numbers first the one that was asked for, then the smallest.

    Args:
      plan: the known plan.
      rows: of the batch that it is for; None: it has none.
      sizes: the rows of the batch now.
      options: what was asked for.
    """
    if rows is None or not sizes:
        return (plan.num_microbatches,)
    known, now = max(rows // plan.num_microbatches, 1), math.gcd(*sizes)
    shared = math.gcd(known, plan.stages[0].num_devices)
    counts = [n for n in range(1, now + 1) if now % n == 0 and now // n <= known]
    counts.sort(key=lambda n: (now // n % shared != 0, n != options.microbatches, n))
    return tuple(counts[:NUMBERS_TRIED])


def _in_stages(
    plan: Plan, split: SplitStep, options: Options
) -> tuple[SplitStep, Stages, Schedule]:
    """The step in the stages of a plan, and the order of their tasks."""
    pipeline = plan.pipeline
    if not plan.is_pipeline:
        return split, one_stage(split.step, split.rules), ONE_STAGE
    count = split.num_microbatches
    split, stages = sliced(split, pipeline.boundaries, split_backward=pipeline.splits_backward)
    if len(stages.graphs) != len(plan.stages):
        raise PlanMismatchError(
            f"The plan has {len(plan.stages)} stages, its boundaries make {len(stages.graphs)}.",
            hint="plan again.",
        )
    name = options.schedule if callable(options.schedule) else pipeline.schedule
    meshes, chunks = pipeline.num_meshes, pipeline.num_chunks
    schedule = make_schedule(name, meshes, count, num_chunks=chunks)
    graphs = zip(stages.graphs, plan.stages, strict=True)
    cluster = Cluster.from_dict(plan.cluster)
    written = tuple(_as_rewritten(stage, x, cluster) for stage, x in graphs)
    return split, dataclasses.replace(stages, graphs=written), schedule


def _as_rewritten(stage: StageGraph, written: StagePlan, cluster: Cluster) -> StageGraph:
    """A stage that casts its parameters as a plan says, and computes again what it says.

    Raises:
      PlanMismatchError: it casts none in every microbatch.
    """
    if written.casts != "once":
        again = casts_again(stage.step)
        if again is None:
            raise PlanMismatchError(
                "The plan casts parameters in every microbatch, where this program casts none.",
                hint="plan again.",
            )
        stage = dataclasses.replace(stage, step=again.step)
    if written.recomputation is not None:
        kept = SplitStep(stage.step, populate(stage.graph.jaxpr))
        part = submesh(cluster, written.num_devices)
        done = recomputed_step(kept, part, written.recomputation)
        stage = dataclasses.replace(stage, step=done.step)
    return stage


def _each_stage(
    plan: Plan, split: SplitStep, stages: Stages, options: Options
) -> Iterator[tuple[SplitStep, StagePlan, Options]]:
    """Every stage as a step of its own, what is written of it, and the options that are for it."""
    graphs = zip(label_batch(stages), plan.stages, strict=True)
    for number, (stage, written) in enumerate(graphs):
        one = split
        if plan.is_pipeline:
            one = SplitStep(
                stage.step,
                populate(stage.graph.jaxpr),
                casts=written.casts,
                recomputation=written.recomputation,
            )
        yield one, written, stage_options(stage, options.of_stage(number))


def _in_place(
    plan: Plan, stages: Stages, schedule: Schedule, number: int, options: Options
) -> tuple[Options, PlaceInPipeline | None]:
    """What a stage has in flight, and its options with the plan's choice of what is kept."""
    if not plan.is_pipeline:
        return options, None
    place = PlaceInPipeline.under(schedule, number, stages.graphs[number])
    return dataclasses.replace(options, remat="full" if _remat(plan)[number] else "none"), place


def _remat(plan: Plan) -> tuple[bool, ...]:
    return tuple(stage.remat == "full" for stage in plan.stages)


def _only_as_written(written: StagePlan, built: StrategyGraph) -> list[list[int]]:
    return [[strategy] for strategy in assignment_of(written, built)]


def _as_written(plan: Plan, written: StagePlan, built: StrategyGraph) -> list[list[int]]:
    """For each node the strategies with the layout of a plan for other shapes; else all of them.

    Where the program has other nodes, only how the state is stored is kept.
    """
    names, allowed = written.axis_names, [list(range(n.num_strategies)) for n in built.nodes]
    chosen: dict[int, str] = {}
    if [strategy.node for strategy in written.strategies] == node_names(built):
        texts = (strategy.choice for strategy in written.strategies)
        chosen = {index: text.partition(" ")[2] for index, text in enumerate(texts)}
    else:
        is_known = frozenset(names).issuperset
        stored = {leaf.path: leaf for leaf in plan.inputs if leaf.role == "state"}
        for node in built.inputs:
            leaf = stored.get(built.nodes[node].label)
            if leaf is not None and all(map(is_known, leaf.spec)):
                dims = tuple(tuple(map(names.index, axes)) for axes in leaf.spec)
                layout = Layout(dims, in_host=leaf.memory == "host")
                chosen[node] = describe(layout, names)
    for index, text in chosen.items():
        layouts = built.nodes[index].layouts
        same = [s for s in allowed[index] if describe(layouts[s], names) == text]
        allowed[index] = same or allowed[index]
    return allowed


def assignment_of(stage: StagePlan, built: StrategyGraph) -> list[int]:
    """The inverse of `strategies_of`.

    Raises:
      PlanMismatchError: the stage's strategies are not those of this program.
    """
    if [strategy.node for strategy in stage.strategies] != node_names(built):
        raise PlanMismatchError(
            "The plan's strategies do not fit this program.",
            why="it was made by another version of autopar or of a library.",
            hint="plan again.",
        )
    assignment = []
    for strategy, node in zip(stage.strategies, built.nodes, strict=True):
        texts = [choice_text(node.layouts, s, stage.axis_names) for s in range(len(node.layouts))]
        if strategy.choice not in texts:
            raise PlanMismatchError(
                f"The plan chooses {strategy.choice!r} for {strategy.node!r}, which is no choice.",
                hint="plan again.",
            )
        assignment.append(texts.index(strategy.choice))
    return assignment
