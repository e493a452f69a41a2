"""What would change a plan's step: another schedule, more microbatches, other links, more devices.

Everything stands on the numbers that the plan holds (`autopar.base.step_model`), so no program and
no device is needed, and nothing is planned again: the stages and their strategies stay as they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, cast

from autopar.base.cluster import Cluster, Link
from autopar.base.costs import alpha_beta
from autopar.base.displayed import Displayed
from autopar.base.errors import OptionError, PlanMismatchError, ScheduleError
from autopar.base.plan_records import PipelinePlan, PlanRecord
from autopar.base.step_model import ModelPiece, StepModel
from autopar.passes.pipeline.forecast import StepCosts, forecast
from autopar.passes.pipeline.instructions import Piece, PieceKind, Value, ValueTransfer
from autopar.passes.pipeline.parts import PipelineParts
from autopar.passes.pipeline.timeline import Forecast, Timeline
from autopar.passes.pipeline.transfer_times import transfer_times
from autopar.passes.pipeline.validate import LOOP_KINDS
from autopar.passes.schedules.make import make_schedule
from autopar.passes.schedules.named import CHUNKED, SCHEDULES
from autopar.passes.schedules.schedule import ONE_STAGE, Schedule

NEAREST = 5  # numbers of devices that a refusal names


@dataclass(frozen=True)
class Simulation(Displayed):
    """A simulated step; its timeline says when every instruction would run."""

    parts: PipelineParts
    schedule: Schedule
    costs: StepCosts

    page: ClassVar = ("small_pages", "simulation_page")

    @cached_property
    def forecast(self) -> Forecast:
        """The whole step, which takes hardly longer for more microbatches."""
        return forecast(self.parts, self.schedule, self.costs)

    @cached_property
    def timeline(self) -> Timeline:
        """All instructions, which are written for it."""
        return self.costs.timeline(self.parts, self.schedule)

    @property
    def step_seconds(self) -> float:
        """From the first start to the last end."""
        return self.forecast.step_seconds

    @property
    def bubble_fraction(self) -> float:
        """The share of all devices' time in which they execute nothing."""
        return self.forecast.bubble_fraction

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """For every mesh, the most bytes per device that are alive at once."""
        return self.forecast.peak_bytes

    def to_chrome_trace(self) -> dict[str, Any]:
        """The timeline for chrome://tracing or Perfetto, ready for `json.dump`."""
        return self.timeline.to_chrome_trace()

    def __str__(self) -> str:
        return str(self.forecast)

    def __repr__(self) -> str:
        return f"<Simulation {str(self.forecast).splitlines()[0]}>"


@dataclass(frozen=True)
class _Scales:
    """By what the plan's numbers are multiplied.

    `compute` includes that a device has fewer rows, `rows` is that alone; `bandwidth` and `latency`
    are of seconds within a stage, `host` of copies to and from its hosts; meshes lie on `cluster`;
    `copies` of each stage's devices work in parallel, and `sync` gives the seconds in which they
    add up so many bytes of gradients.
    """

    rows: float
    compute: float
    bandwidth: float
    latency: float
    host: float
    cluster: Cluster
    copies: int
    sync: Callable[[int, int], float]


def what_if(
    plan: PlanRecord,
    *,
    schedule: Any = None,
    microbatches: int | None = None,
    cluster: Cluster | None = None,
    link_scale: float = 1.0,
    compute_scale: float = 1.0,
) -> Simulation:
    """The simulated step of a plan if something else were different (see `Plan.simulate`).

    Raises:
      OptionError: a number that is not possible, or what a plan of one stage does not have.
      ScheduleError: the schedule does not exist, or needs what the plan's stages do not have.
      PlanMismatchError: the plan does not hold what a simulation needs.
    """
    for name, scale in (("link_scale", link_scale), ("compute_scale", compute_scale)):
        if not (isinstance(scale, int | float) and 0 < scale < math.inf):
            raise OptionError(f"{name}={scale!r} is not possible.", why="it must be positive.")
    if not plan.is_pipeline and (schedule is not None or microbatches is not None):
        raise OptionError(
            "A plan of one stage has no schedule, and its microbatches are part of what was "
            "planned.",
            where=f"simulate(schedule={schedule!r}, microbatches={microbatches!r})",
            hint="plan again with stages=2 or more, or with these microbatches.",
        )
    pipeline = plan.pipeline
    model = pipeline.model
    if model is None:
        raise PlanMismatchError(
            "The plan does not hold what a simulation needs.", hint="plan again."
        )
    count = plan.num_microbatches if microbatches is None else microbatches
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise OptionError(f"microbatches={count!r} is not possible.", why="use 1 or more.")
    if plan.is_pipeline:
        _divided(model, count, f"microbatches={count}")
    rows = plan.num_microbatches / count
    meshes, copies = pipeline.num_meshes, 1
    if cluster is not None:
        meshes, copies = _placed(plan, cluster, count)
    scales = _scales(plan, rows, cluster, copies, link_scale, compute_scale)
    if math.isinf(scales.host) and any(piece.host_seconds for piece in model.pieces):
        raise OptionError(
            "The plan puts arrays into the hosts' memory, and the cluster's host_bandwidth is 0.",
            hint="set host_bandwidth, in bytes per second, or plan again without offload=.",
        )
    if meshes != pipeline.num_meshes:
        chunks = len(plan.stages) // meshes
        pipeline = dataclasses.replace(pipeline, num_meshes=meshes, num_chunks=chunks)
        if schedule is None and pipeline.schedule not in CHUNKED:
            schedule = "interleaved_1f1b" if chunks > 1 else pipeline.schedule
    order = _order(pipeline, schedule, count) if plan.is_pipeline else ONE_STAGE
    return _simulation(plan, pipeline, model, order, scales)


def _placed(plan: PlanRecord, cluster: Cluster, count: int) -> tuple[int, int]:
    """On how many meshes the stages of a plan are on a cluster, and in how many copies.

    Those of the plan, each repeated a whole number of times; else fewer, with several stages on
    each, as many as possible.

    Raises:
      OptionError: no number does.
    """
    meshes, sizes = plan.pipeline.num_meshes, {x.mesh: x.num_devices for x in plan.stages}
    model, devices = plan.pipeline.model, cluster.num_devices
    rows = math.gcd(*model.batch_rows) if model else 0  # 0 divides by all
    possible: dict[int, tuple[int, int]] = {}  # by all devices, the whole plan before parts of it
    most = rows // count if rows else devices // min(sizes.values()) + 1
    are_alike = len({*sizes.values()}) == 1
    for fewer in range(meshes, 0, -1):
        divide = are_alike and len(plan.stages) % fewer == 0 and count % fewer == 0
        if fewer < meshes and not divide:
            continue
        each = sum([*sizes.values()][:fewer])
        for copies in range(1, most + 1):
            if rows % (count * copies) == 0:
                possible.setdefault(each * copies, (fewer, copies))
    if devices in possible:
        return possible[devices]
    own = " or ".join(map(str, sorted({*sizes.values()})))
    several = "each" if meshes == 1 else "each, or fewer ones with as many stages on every mesh,"
    raise OptionError(
        f"The plan cannot be simulated on {devices} devices.",
        where=str(cluster),
        why=f"it has {meshes} mesh{'es' * (meshes > 1)} of {own} devices; {several} can only be "
        "repeated a whole number of times, which must divide the rows of a microbatch.",
        hint=f"use {_nearest(possible, devices)} devices, or plan for the cluster "
        "(autopar.scaling).",
    )


def _nearest(possible: Iterable[int], devices: int) -> str:
    """The numbers of devices that are nearest to one, for people."""
    near = sorted(possible, key=lambda n: abs(math.log(n / devices)))[:NEAREST]
    *others, last = map(str, sorted(near))
    return f"{', '.join(others)} or {last}" if others else last


def _divided(model: StepModel, parts: int, what: str) -> None:
    uneven = [size for size in model.batch_rows if size % parts]
    if uneven:
        raise OptionError(
            f"A batch of {uneven[0]} rows does not divide by {parts}.",
            where=what,
            hint="use a divisor of the number of rows.",
        )


def _order(pipeline: PipelinePlan, wanted: Any, count: int) -> Schedule:
    """The asked schedule, or that of the plan, for so many microbatches."""
    if wanted is None and pipeline.schedule not in SCHEDULES:
        raise ScheduleError(
            f"The plan's schedule {pipeline.schedule!r} is a function, which a plan cannot hold.",
            hint="pass it again as schedule=.",
        )
    name = pipeline.schedule if wanted is None else wanted
    schedule = make_schedule(name, pipeline.num_meshes, count, num_chunks=pipeline.num_chunks)
    if schedule.splits_backward and not pipeline.splits_backward:
        raise ScheduleError(
            f"Schedule {schedule.name!r} has weight gradients as tasks of their own, and the "
            "plan's backward pass is not split.",
            why=f"it was planned for {pipeline.schedule!r}, whose stages compute both together.",
            hint=f"plan again with schedule={schedule.name!r}; the other schedules can be "
            "simulated from that plan.",
        )
    return schedule


def _scales(
    plan: PlanRecord,
    rows: float,
    cluster: Cluster | None,
    copies: int,
    link_scale: float,
    compute_scale: float,
) -> _Scales:
    old = Cluster.from_dict(plan.cluster)
    new = old if cluster is None else cluster
    size = max(stage.num_devices for stage in plan.stages)
    faster = compute_scale * _device_speed(old, new)
    old_link, new_link = _inside(old, size), _inside(new, size)
    started = old.collective_seconds + old_link.latency

    def sync(nbytes: int, devices: int) -> float:
        if copies == 1 or not nbytes:
            return 0.0
        alpha, beta = alpha_beta("all-reduce", new, (copies, devices), (0,))
        return alpha + beta * nbytes / link_scale

    return _Scales(
        rows=rows / copies,
        compute=rows / copies / faster,
        bandwidth=old_link.bandwidth / new_link.bandwidth / link_scale,
        latency=(new.collective_seconds + new_link.latency) / started if started else 1.0,
        host=old.host_bandwidth / new.host_bandwidth if new.host_bandwidth else math.inf,
        cluster=new.with_links(link_scale),
        copies=copies,
        sync=sync,
    )


def _device_speed(old: Cluster, new: Cluster) -> float:
    """How much faster a device is, by whichever of operations and memory gained less."""
    before, after = old.device, new.device
    kinds = ("bfloat16", "float32")
    ratios = (after.peak_flops_for(kind) / before.peak_flops_for(kind) for kind in kinds)
    return min(*ratios, after.memory_bandwidth / before.memory_bandwidth)


def _inside(cluster: Cluster, size: int) -> Link:
    """What joins the devices of a mesh of that size."""
    return cluster.intra_node if size <= cluster.devices_per_node else cluster.inter_node


def _simulation(
    plan: PlanRecord, pipeline: PipelinePlan, model: StepModel, schedule: Schedule, scales: _Scales
) -> Simulation:
    def scaled(size: int, of_rows: bool) -> int:
        return math.ceil(size * scales.rows) if of_rows else size

    values = tuple(
        Value(i, v.stage, scaled(v.bytes_per_device, v.per_microbatch), v.per_microbatch, v.label)
        for i, v in enumerate(model.values)
    )
    pieces = tuple(
        Piece(p.name, p.stage, cast("PieceKind", p.when), p.reads, p.writes, p.donates)
        for p in model.pieces
    )
    parts = PipelineParts(
        values,
        pieces,
        tuple(ValueTransfer(source, target) for source, target in model.transfers),
        inputs=model.inputs,
        outputs=model.outputs,
        donated=model.donated,
    )
    sums = _sums(model)
    seconds = {
        piece.name: _piece_seconds(piece, scales)
        + scales.sync(sums.get(piece.name, 0), plan.stages[piece.stage].num_devices)
        for piece in model.pieces
    }

    sizes = [0] * pipeline.num_meshes
    for number, stage in enumerate(plan.stages):
        sizes[number % pipeline.num_meshes] = stage.num_devices * scales.copies
    inside = {
        p.name: scaled(p.temporary_bytes, p.when in LOOP_KINDS or not plan.is_pipeline)
        for p in model.pieces
    }
    times = partial(transfer_times, sizes=sizes, cluster=scales.cluster)
    return Simulation(parts, schedule, StepCosts(seconds, times, tuple(sizes), inside))


def _piece_seconds(piece: ModelPiece, scales: _Scales) -> float:
    """Microbatches change the loop's pieces alone: the others see all rows, however many."""
    looping = piece.when in LOOP_KINDS
    rows = scales.rows if looping else 1 / scales.copies
    compute = scales.compute * rows / scales.rows
    if piece.when == "epilogue":  # the optimizer: every copy of a stage does all of it
        compute *= scales.copies
    return (
        piece.compute_seconds * compute
        + piece.latency_seconds * scales.latency
        + piece.activation_seconds * scales.bandwidth * rows
        + piece.other_seconds * scales.bandwidth
        + (piece.host_seconds * scales.host if piece.host_seconds else 0.0)
    )


def _sums(model: StepModel) -> dict[str, int]:
    """For epilogue pieces, the bytes of sums over microbatches that are first read there.

    Copies of a stage's devices, each with rows of its own, have to add these up once a step. Of a
    step that is one piece it is as much as the state that it updates.
    """
    if len(model.pieces) == 1:
        (piece,) = model.pieces
        return {piece.name: sum(model.values[n].bytes_per_device for n in piece.donates)}
    made = {n for p in model.pieces if p.when in LOOP_KINDS for n in p.writes}
    left = {n for n in made if not model.values[n].per_microbatch}
    found: dict[str, int] = {}
    for piece in model.pieces:
        if piece.when == "epilogue":
            here = left & set(piece.reads)
            left -= here
            found[piece.name] = sum(model.values[n].bytes_per_device for n in here)
    return found
