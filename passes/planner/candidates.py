"""A candidate: a step in stages, each planned on its mesh, scheduled and simulated.

A plan for one mesh is a pipeline of one stage, whose one piece is the whole step. The file is long
because what may follow once stages are planned (other schedules, shared memory, computing again)
makes new candidates of the same parts.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.base.units import format_seconds
from autopar.passes.pieces.cutting import cut, uncut
from autopar.passes.pieces.piece_costs import inner_bytes
from autopar.passes.pieces.pieces import Pieces, Runnable
from autopar.passes.pipeline.forecast import StepCosts, forecast
from autopar.passes.pipeline.parts import PipelineParts
from autopar.passes.pipeline.timeline import Forecast
from autopar.passes.pipeline.transfer_times import transfer_times
from autopar.passes.pipeline.validate import LOOP_KINDS
from autopar.passes.planner.alike_stages import (
    first_alike,
    taken_over,
    with_shared_programs,
)
from autopar.passes.planner.divided_backward import DIVIDING
from autopar.passes.planner.layouts import (
    StageLayout,
    chunks_of,
    logical_meshes,
    submesh,
)
from autopar.passes.planner.mesh_choice import plan_free, plan_stage
from autopar.passes.planner.meshes_in_turn import plan_meshes
from autopar.passes.planner.planned_stage import PlaceInPipeline, PlannedStage, in_pipeline
from autopar.passes.planner.search_so_far import NOTHING_SO_FAR, SearchSoFar
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_labels import label_batch
from autopar.passes.planner.stage_shardings import LARGE_PROBLEM, memory_limit_of
from autopar.passes.planner.useless_stages import MisfitError, SlowStageError
from autopar.passes.schedules.make import make_schedule
from autopar.passes.schedules.schedule import ONE_STAGE, Schedule
from autopar.passes.sharding.spmd_program import SpmdProgram, host_bytes
from autopar.passes.slicing.slice_stages import one_stage, slice_stages
from autopar.passes.slicing.stage_graphs import Boundaries, Stages

Report = Callable[[str], None]
Keep = Callable[["Sequence[PlannedStep]"], None]
# What schedule="auto" chooses from, by simulated time. The first of equal ones is taken.
AUTO_SCHEDULES = ("1f1b", "eager_1f1b", "zb_h1", "zb_h2")
OFTEN_PLANNED = 2  # stages that are alike, by another schedule that may have less of a bubble
SMALL_BUBBLE = 0.05
SMALL_PROBLEM = 150  # nodes of a stage; larger ones take seconds to solve within the memory
NEARLY_FULL = 0.95  # of the memory


@dataclass(frozen=True)
class PlannedStep:
    """A step in stages: what each mesh runs, in which order, and what that is expected to take.

    The split step is as it was sliced: scans over layers are cut in it. A device may hold `limit`
    bytes, and its host `host_limit` for it (0: any number); `remat` says of each stage whether its
    backward pass computes the forward pass again.
    """

    split: SplitStep
    stages: Stages
    planned: tuple[PlannedStage, ...]
    pieces: Pieces
    parts: PipelineParts
    schedule: Schedule
    forecast: Forecast
    limit: int
    remat: tuple[bool, ...]
    host_limit: int = 0

    @property
    def is_pipeline(self) -> bool:
        """Whether there are several stages."""
        return self.schedule.num_stages > 1

    @property
    def step_seconds(self) -> float:
        """Of the simulated step."""
        return self.forecast.step_seconds

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Bytes per device at each mesh's worst moment of the simulated step."""
        return self.forecast.peak_bytes if self.is_pipeline else (self.planned[0].peak.bytes,)

    @cached_property
    def host_bytes(self) -> int:
        """Bytes that the host of a device has of the state; of the mesh that has most."""
        sizes = Counter[int]()
        for program, mesh in zip(self.pieces.programs, self.schedule.mesh_of_stage, strict=True):
            sizes[mesh] += host_bytes(program)
        return max(sizes.values())

    @property
    def fits(self) -> bool:
        """Whether every device, and every host, can hold what it has at its worst moment."""
        there = not self.host_limit or self.host_bytes <= self.host_limit
        return there and max(self.peak_bytes) <= self.limit

    def times(self, kind: str) -> int:
        """How often a step runs a piece of some kind."""
        return self.schedule.num_microbatches if kind in LOOP_KINDS else 1

    @property
    def runnable(self) -> Runnable:
        """What the meshes run."""
        stages = self.stages
        return Runnable(self.pieces, self.parts, self.schedule, stages.leaves, stages.results)


def quickest(candidates: Sequence[PlannedStep]) -> PlannedStep | None:
    """The quickest one that fits; of equal ones one mesh, of the fewest axes, or the first."""

    def key(candidate: PlannedStep) -> tuple[float, bool, int]:
        axes = 0 if candidate.is_pipeline else len(candidate.planned[0].mesh)
        return candidate.step_seconds, candidate.is_pipeline, axes

    return min((c for c in candidates if c.fits), key=key, default=None)


def plan_layout(
    split: SplitStep,
    layout: StageLayout,
    options: Options,
    cluster: Cluster,
    report: Report,
    keep: Keep = lambda candidates: None,
    others: SearchSoFar = NOTHING_SO_FAR,
    *,
    must_fit: bool = False,
    longest: float = math.inf,
) -> list[PlannedStep]:
    """Plans with these stages: one for every logical mesh of one stage, else for every schedule.

    Args:
      split: the program with its batch split; for several stages, with a loop.
      layout: where the stages begin, and the devices of their meshes.
      options: method, schedule, memory limit and so on.
      cluster: all devices.
      report: takes a line of progress.
      keep: takes candidates as they are found.
      others: what is known from elsewhere, for one stage.
      must_fit: each of several stages, or nothing is planned further.
      longest: seconds of a step that each of several stages may take, or nothing is either.

    Raises:
      MisfitError: a stage that must fit does not.
      SlowStageError: a stage takes longer.
      OptionError: the program has fewer layers than stages, or the devices do not divide.
      ScheduleError: the schedule does not exist or needs more microbatches.
    """
    if not layout.is_pipeline:
        return _plan_one(split, options, cluster, report, keep, others)
    names = _schedules(options)
    asked = split, layout.schedule or names[0], layout, options, cluster, report
    must_fit = must_fit and chunks_of(options) == 1
    made = [_plan_stages(*asked, must_fit=must_fit, longest=longest)]
    if chunks_of(options) > 1 and not made[0].fits:
        report("sharing out the memory of each mesh among its stages")
        limits = _shared_out(made[0])
        made.append(_plan_stages(split, names[0], layout, options, cluster, report, limits))
    training = not made[0].stages.forward_only
    instead = [x for x in ("1f1b", "eager_1f1b") if x in names and x != made[0].schedule.name]
    if training and made[0].fits:
        made += [_scheduled(made[0], name, cluster) for name in instead]
    keep(made)
    splitting = [x for x in names[1:] if x in DIVIDING]
    if layout.may_divide and splitting and training and _may_pay(made[0]):
        known = made[0] if _is_large(made[0]) or _has_enough_memory(made[0]) else None
        asked = split, splitting[0], layout, options, cluster, report
        with contextlib.suppress(MisfitError):  # they need no less than the first schedule does
            often = OFTEN_PLANNED if made[0].fits else math.inf
            first = _plan_stages(*asked, as_in=known, must_fit=True, at_most=often)
            made += [first, *(_scheduled(first, name, cluster) for name in splitting[1:])]
    stages = range(len(made[0].planned))
    may = tuple(options.of_stage(number).remat in ("auto", "override") for number in stages)
    if any(may) and not any(candidate.fits for candidate in made):
        report("computing forward passes again where a stage does not fit")
        made += [_rematerialized(candidate, cluster, may) for candidate in made]
    keep(made)
    return made


def _plan_one(
    split: SplitStep,
    options: Options,
    cluster: Cluster,
    report: Report,
    keep: Keep,
    others: SearchSoFar,
) -> list[PlannedStep]:
    stages, limit = one_stage(split.step, split.rules), memory_limit_of(options, cluster)
    meshes = logical_meshes(options, cluster, split.graph, of_stage=False)
    meshes = tuple(mesh for mesh in meshes if mesh in others.only) or meshes
    meshes = tuple(mesh for mesh in meshes if mesh not in others.too_small) or meshes

    def assembled(planned: PlannedStage) -> PlannedStep:
        return assemble(split, stages, (planned,), ONE_STAGE, cluster, limit, (False,))

    def fits(planned: PlannedStage) -> None:
        keep([assembled(planned)])

    planned = plan_meshes(split, meshes, options, cluster, report, fits, others)
    return [*map(assembled, planned)]


def on_one_mesh(planned: PlannedStage, cluster: Cluster, limit: int) -> PlannedStep:
    """The step that one planned mesh runs."""
    split = planned.split
    stages = one_stage(split.step, split.rules)
    return assemble(split, stages, (planned,), ONE_STAGE, cluster, limit, (False,))


def _schedules(options: Options) -> tuple[str | Callable[..., Any], ...]:
    if options.schedule not in ("auto", None):
        return (options.schedule,)
    return ("interleaved_1f1b",) if chunks_of(options) > 1 else AUTO_SCHEDULES


def _plan_stages(
    split: SplitStep,
    name: str | Callable[..., Any],
    layout: StageLayout,
    options: Options,
    cluster: Cluster,
    report: Report,
    limits: Mapping[int, int] = MappingProxyType({}),
    as_in: PlannedStep | None = None,
    must_fit: bool = False,
    at_most: float = math.inf,
    longest: float = math.inf,
) -> PlannedStep:
    """The stages of a layout by a schedule.

    Args:
      split: the program with its batch split.
      name: the schedule, or what makes it.
      layout: where the stages begin, and the devices of their meshes.
      options: method, memory limit and so on.
      cluster: all devices.
      report: takes a line of progress.
      limits: bytes of stages that may hold less than a device has.
      as_in: the same stages by another schedule, as they are quickest: so they are planned on its
        logical meshes.
      must_fit: each of the stages.
      at_most: how many stages may be planned though others are alike, which need less memory.
      longest: seconds of a step that each may take.

    Raises:
      SlowStageError: a stage takes longer.
      MisfitError: a stage that must fit does not, or one planned `as_in` another schedule; or more
        stages do not fit as others do that are alike.
    """
    meshes, chunks, count = len(layout.devices), chunks_of(options), split.num_microbatches
    splits = isinstance(name, str) and name.startswith("zb")
    if callable(name):
        splits = make_schedule(name, meshes, count, num_chunks=chunks).splits_backward
    report(f"slicing into {meshes * chunks} stages")
    split, stages = sliced(split, layout.boundaries, split_backward=splits)
    if stages.forward_only and name in AUTO_SCHEDULES:
        name = "inference"
    schedule = make_schedule(name, meshes, count, num_chunks=chunks)
    parts = [submesh(cluster, size) for size in layout.devices]
    sizes = [layout.devices[number % meshes] for number in range(len(stages.graphs))]
    alike = first_alike(label_batch(stages), sizes, options)
    stages = with_shared_programs(stages, alike)
    labelled, planned = label_batch(stages), list[PlannedStage]()

    def asked(number: int) -> tuple[PlaceInPipeline, Options, Cluster]:
        own = options.of_stage(number)
        if number in limits:
            own = replace(own, memory_limit=limits[number])
        place = PlaceInPipeline.under(schedule, number, labelled[number], must_fit)
        return place, own, parts[number % len(parts)]

    def plan_as_expected(number: int) -> PlannedStage:
        report(f"planning stage {number + 1} of {len(stages.graphs)}")
        expected = layout.expected[number] if layout.expected else {}
        # A large stage casts as the one before it, which has more in flight, had to.
        like = planned[-1] if planned and len(planned[-1].built.nodes) > LARGE_PROBLEM else None
        casts = layout.casts[number] if layout.casts else like is not None and like.casts_again
        found = plan_stage(*asked(number), expected, casts)
        if must_fit and not found.fits:
            raise MisfitError(found.peak.bytes)
        if found.step_seconds > longest:
            report(f"stage {number + 1} alone takes {format_seconds(found.step_seconds)}: too slow")
            raise SlowStageError
        return found

    # The last stage has no equal, and the vocabulary: it tells soonest that stages need too much.
    end = len(labelled) - 1
    is_first = must_fit and as_in is None and 0 < end == alike[end].number
    last = plan_as_expected(end) if is_first else None
    for number, stage in enumerate(labelled):
        like = alike[number]
        place, own, part = asked(number)
        if like.number < number and schedule.at_once[like.number] == schedule.at_once[number]:
            known = taken_over(planned[like.number], stage, like.names)
            fitting = _elsewhere(known, place, own, cluster)
            if fitting is not None:
                planned.append(fitting)
                continue
            at_most -= 1
            if at_most < 0:
                raise MisfitError(known.peak.bytes)
        if as_in is not None:
            report(f"planning stage {number + 1} of {len(stages.graphs)}")
            planned.append(plan_free(place, own, part, as_in.planned[number].mesh))
            if not planned[-1].fits:
                report(f"stage {number + 1} does not fit with its backward pass divided")
                raise MisfitError(planned[-1].peak.bytes)
            continue
        planned.append(last if last is not None and number == end else plan_as_expected(number))
    remat = tuple(stage.remat for stage in planned)
    limit = memory_limit_of(options, cluster)
    graphs = (p.split.stage(stage) for p, stage in zip(planned, stages.graphs, strict=True))
    stages = replace(stages, graphs=tuple(graphs))
    return assemble(split, stages, tuple(planned), schedule, cluster, limit, remat)


def _scheduled(step: PlannedStep, name: str, cluster: Cluster) -> PlannedStep:
    """The same stages by another schedule that divides the backward pass alike."""
    schedule = make_schedule(name, step.schedule.num_meshes, step.schedule.num_microbatches)
    if schedule.at_once != step.schedule.at_once:
        known = step.split, step.stages, step.planned
        return assemble(*known, schedule, cluster, step.limit, step.remat)
    expected = _expected(step.pieces, step.parts, schedule, step.planned, cluster)
    return replace(step, schedule=schedule, forecast=expected)


def _is_large(step: PlannedStep) -> bool:
    return max(len(x.built.nodes) for x in step.planned) > LARGE_PROBLEM


def _has_enough_memory(step: PlannedStep) -> bool:
    """Whether stages that are not small all fit as they are with any memory."""
    is_small = max(len(x.built.nodes) for x in step.planned) <= SMALL_PROBLEM
    return not is_small and step.fits and all(x.unlimited is None for x in step.planned)


def _may_pay(step: PlannedStep) -> bool:
    """Whether a schedule with less of a bubble can pay, of a step planned with 1F1B.

    Large stages are not planned once more for what is at most `SMALL_BUBBLE` of the step, nor where
    memory is short: what waits for the weights' gradients would take more.
    """
    if not step.fits or not _is_large(step):
        return True
    if max(step.peak_bytes) > NEARLY_FULL * step.limit:
        return False
    if any(x.unlimited is not None or x.split.is_rewritten for x in step.planned):
        return False
    waiting = step.schedule.num_stages - 1
    return waiting > SMALL_BUBBLE * (step.split.num_microbatches + waiting)


def _shared_out(step: PlannedStep) -> dict[int, int]:
    """For stages of a mesh that holds too much: bytes of it, in proportion to what each needs."""
    homes, peaks = step.schedule.mesh_of_stage, [stage.peak.bytes for stage in step.planned]
    together = Counter[int]()
    for mesh, size in zip(homes, peaks, strict=True):
        together[mesh] += size
    return {
        stage: step.limit * peaks[stage] // together[mesh]
        for stage, mesh in enumerate(homes)
        if step.peak_bytes[mesh] > step.limit
    }


def sliced(
    split: SplitStep, boundaries: Boundaries, *, split_backward: bool
) -> tuple[SplitStep, Stages]:
    """A step in stages, with the step as it was cut for them."""
    if split_backward:
        asked = split.step, split.rules, boundaries
        stages = slice_stages(*asked, split_backward=True, known=split.layers)
    else:
        stages = split.cut_at(boundaries)
    return replace(split, step=stages.whole, rules=stages.rules), stages


def _elsewhere(
    planned: PlannedStage, place: PlaceInPipeline, options: Options, cluster: Cluster
) -> PlannedStage | None:
    """A stage's plan where others are in flight: the one without a limit if that fits, else it."""
    limit, tried = memory_limit_of(options, cluster), [planned.unlimited, planned]
    found = [x for x in tried if x is not None]
    places = (place._replace(graph=x.split.stage(place.graph)) for x in found)
    checked = (
        in_pipeline(x, own, limit, x.costs(cluster)) for x, own in zip(found, places, strict=True)
    )
    return next((x for x in checked if x.fits), None)


def assemble(
    split: SplitStep,
    stages: Stages,
    planned: tuple[PlannedStage, ...],
    schedule: Schedule,
    cluster: Cluster,
    limit: int,
    remat: tuple[bool, ...],
) -> PlannedStep:
    """Cut the planned stages into pieces, order these, and simulate a step."""
    pieces = take_apart(stages, [p.program for p in planned], remat, schedule)
    parts = parts_of(pieces, split)
    expected = _expected(pieces, parts, schedule, planned, cluster)
    host = cluster.host_share
    return PlannedStep(
        split, stages, planned, pieces, parts, schedule, expected, limit, remat, host
    )


def take_apart(
    stages: Stages, programs: Sequence[SpmdProgram], remat: Sequence[bool], schedule: Schedule
) -> Pieces:
    """The pieces of the stages' programs; of one stage alone, one piece."""
    if len(programs) == 1:
        return uncut(stages.graphs[0], programs[0])
    return cut(stages, programs, remat, schedule.at_once)


def parts_of(pieces: Pieces, split: SplitStep) -> PipelineParts:
    """What instructions in the order of any schedule are made of."""
    outputs = set(pieces.outputs)
    donated = [
        number
        for label, group in zip(split.graph.inputs, pieces.inputs, strict=False)
        if label.donated
        for number in group
        if number not in outputs  # an input that is an output as it is stays
    ]
    return PipelineParts(
        tuple(pieces.values),
        tuple(piece.plain() for piece in pieces.pieces),
        tuple(pieces.transfers),
        inputs=tuple(number for group in pieces.inputs for number in group),
        outputs=tuple(pieces.outputs),
        donated=tuple(donated),
    )


def _rematerialized(candidate: PlannedStep, cluster: Cluster, may: Sequence[bool]) -> PlannedStep:
    """The same plan; stages on meshes that do not fit compute their forward pass again.

    Of these, the stages that `may`.
    """
    while True:
        too_much = {m for m, size in enumerate(candidate.peak_bytes) if size > candidate.limit}
        c, homes = candidate, candidate.schedule.mesh_of_stage
        full = [
            ok and mesh in too_much and not at_once
            for ok, mesh, at_once in zip(may, homes, c.schedule.at_once, strict=True)
        ]
        remat = tuple(map(operator.or_, c.remat, full))
        if remat == c.remat:
            return c
        candidate = assemble(c.split, c.stages, c.planned, c.schedule, cluster, c.limit, remat)


def _expected(
    pieces: Pieces,
    parts: PipelineParts,
    schedule: Schedule,
    planned: Sequence[PlannedStage],
    cluster: Cluster,
) -> Forecast:
    """What the cost model expects of a step."""
    costs = [p.costs(cluster) for p in planned]
    seconds = {p.name: planned[p.stage].seconds(p, costs[p.stage]) for p in pieces.pieces}

    sizes = [0] * schedule.num_meshes
    for stage, mesh in enumerate(schedule.mesh_of_stage):
        sizes[mesh] = math.prod(pieces.programs[stage].mesh)
    inside = inner_bytes(pieces, [p.peak.bytes for p in planned])
    times = partial(transfer_times, sizes=sizes, cluster=cluster)
    return forecast(parts, schedule, StepCosts(seconds, times, tuple(sizes), inside))
