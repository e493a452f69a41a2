"""A pipelined candidate: stages sliced, planned on their meshes, scheduled and simulated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autopar.base.cluster import Cluster, axis_names
from autopar.base.errors import OptionError
from autopar.base.options import Options
from autopar.passes.graph.graph import Graph
from autopar.passes.pieces.cutting import cut
from autopar.passes.pieces.piece_costs import PieceCosts
from autopar.passes.pieces.pieces import Pieces, StagePiece
from autopar.passes.pipeline.emit import emit
from autopar.passes.pipeline.instructions import PipelineProgram, Run, Send
from autopar.passes.pipeline.simulate import simulate
from autopar.passes.pipeline.timeline import Timeline
from autopar.passes.planner.candidates import Planned, Split, memory_limit_of, plan_mesh
from autopar.passes.primitives.populate import populate
from autopar.passes.schedules.make import make_schedule
from autopar.passes.schedules.schedule import Schedule
from autopar.passes.sharding.batch_dims import BatchDims, batch_dims
from autopar.passes.sharding.peak_memory import Peak, peak, version_bytes
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.restrict import pins_of
from autopar.passes.sharding.scopes import Scope
from autopar.passes.sharding.spmd_program import Block, Program
from autopar.passes.slicing.slice_stages import slice_stages
from autopar.passes.slicing.stage_graphs import LeafRows, StageGraph, Stages

Report = Callable[[str], None]
# What schedule="auto" chooses from, by simulated time. The first of equal ones is taken.
AUTO_SCHEDULES = ("1f1b", "zb_h1", "zb_h2")
MESHES_AXES = 2


@dataclass(frozen=True)
class Runnable:
    """What the meshes of a pipelined plan run: pieces, and in which order.

    Args:
      pieces: what is run.
      program: in which order.
      leaves: for every leaf of the step's arguments (constants too), the leaves of the pieces'
        program that hold its rows. Several, if a scan over layers was cut.
      results: the same for the leaves of what the step returns.
    """

    pieces: Pieces
    program: PipelineProgram
    leaves: tuple[tuple[LeafRows, ...], ...]
    results: tuple[tuple[LeafRows, ...], ...]


@dataclass(frozen=True)
class StageLayout:
    """Where stages begin and what they run on.

    Args:
      boundaries: the layers at which the second and later stages begin, or how many stages there
        are (of about the same FLOPs).
      devices: of every mesh.
      remat: for every stage, whether its backward pass computes the forward pass again; empty if
        that is not decided here.
    """

    boundaries: int | tuple[int, ...]
    devices: tuple[int, ...]
    remat: tuple[bool, ...] = ()

    @classmethod
    def asked(cls, options: Options, cluster: Cluster) -> StageLayout:
        """What the options say; all meshes are of one size.

        Raises:
          OptionError: the devices do not divide by the stages, or chunks not the stages.
        """
        meshes = num_meshes(options, cluster)
        wanted = options.stages
        if isinstance(wanted, int):
            wanted = wanted * chunks_of(options)
        assert isinstance(wanted, (int, tuple))
        return cls(wanted, (cluster.num_devices // meshes,) * meshes)


@dataclass(frozen=True)
class Pipelined:
    """A program in stages: what each mesh runs, in which order, and what that is expected to take.

    Args:
      split: the microbatched program, as it was sliced (scans over layers are cut in it).
      stages: how it was sliced.
      planned: the intra-operator plan of each stage.
      pieces: the stages' programs taken apart.
      program: one list of instructions per mesh.
      timeline: of the simulated step.
      limit: bytes that a device may hold.
      remat: for each stage, whether its backward pass computes the forward pass again.
    """

    split: Split
    stages: Stages
    planned: tuple[Planned, ...]
    pieces: Pieces
    program: PipelineProgram
    timeline: Timeline
    limit: int
    remat: tuple[bool, ...]

    @property
    def schedule(self) -> Schedule:
        """The order of the tasks."""
        return self.program.schedule

    @property
    def step_seconds(self) -> float:
        """Of the simulated step."""
        return self.timeline.step_seconds

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Bytes per device at each mesh's worst moment of the simulated step."""
        return self.timeline.peak_bytes

    @property
    def fits(self) -> bool:
        return max(self.peak_bytes) <= self.limit

    @property
    def runnable(self) -> Runnable:
        """What the meshes run."""
        return Runnable(self.pieces, self.program, self.stages.leaves, self.stages.results)


def num_meshes(options: Options, cluster: Cluster) -> int:
    """How many meshes the request makes of the cluster.

    Raises:
      OptionError: the devices do not divide by the stages, or chunks do not divide the stages.
    """
    stages, chunks = options.stages, chunks_of(options)
    if isinstance(stages, int):
        meshes = stages
    else:
        assert isinstance(stages, tuple)
        total = len(stages) + 1
        if total % chunks:
            raise OptionError(
                f"stages={list(stages)} cannot have num_chunks={chunks}.",
                why=f"that makes {total} stages, which do not divide by {chunks} per mesh.",
            )
        meshes = total // chunks
    if meshes > cluster.num_devices:
        raise OptionError(
            f"{meshes} pipeline stages are more than the cluster has devices.",
            where=f"stages={stages!r}",
            why=f"{cluster.name} has {cluster.num_devices} "
            f"device{'' if cluster.num_devices == 1 else 's'}, and every stage needs one.",
            hint=f"use at most stages={cluster.num_devices}, or num_chunks for several stages on "
            "one mesh. Virtual CPU devices: jax.config.update('jax_num_cpu_devices', 8) before JAX "
            "is used.",
        )
    if cluster.num_devices % meshes:
        divisors = [n for n in range(1, cluster.num_devices + 1) if cluster.num_devices % n == 0]
        raise OptionError(
            f"{cluster.num_devices} devices cannot be split into {meshes} equal meshes.",
            where=f"stages={stages!r}",
            hint=f"use a number of stages of {', '.join(map(str, divisors))}.",
        )
    return meshes


def chunks_of(options: Options) -> int:
    """Stages per mesh."""
    return options.num_chunks if isinstance(options.num_chunks, int) else 1


def submesh(cluster: Cluster, num_devices: int) -> Cluster:
    """A part of the cluster: devices of one node where they fit there, else whole nodes."""
    if num_devices <= cluster.devices_per_node:
        return dataclasses.replace(cluster, num_nodes=1, devices_per_node=num_devices)
    if num_devices % cluster.devices_per_node:
        return dataclasses.replace(cluster, num_nodes=num_devices, devices_per_node=1)
    return dataclasses.replace(cluster, num_nodes=num_devices // cluster.devices_per_node)


def plan_pipelines(
    split: Split,
    count: int,
    layout: StageLayout,
    options: Options,
    cluster: Cluster,
    report: Report,
) -> list[Pipelined]:
    """Plans with these stages, one for every schedule that is considered.

    Args:
      split: the program with its batch split in `count` microbatches, at least two.
      count: the number of microbatches.
      layout: where the stages begin, and the devices of their meshes.
      options: method, schedule, memory limit and so on.
      cluster: all devices.
      report: takes a line of progress.

    Raises:
      OptionError: the program has fewer layers than stages, or the devices do not divide.
      ScheduleError: the schedule does not exist or needs more microbatches.
    """
    names = _schedules(options)
    found = [_plan(split, count, names[0], layout, options, cluster, report)]
    if len(names) > 1 and not found[0].stages.forward_only:
        splitting = [name for name in names if name.startswith("zb")]
        if splitting:
            first = _plan(split, count, splitting[0], layout, options, cluster, report)
            found.append(first)
            found += [_with_schedule(first, name, cluster) for name in splitting[1:]]
    if options.remat == "auto" and not any(candidate.fits for candidate in found):
        report("computing forward passes again where a stage does not fit")
        found += [rematerialized(candidate, options, cluster) for candidate in found]
    return found


def _schedules(options: Options) -> tuple[Any, ...]:
    if options.schedule not in ("auto", None):
        return (options.schedule,)
    return ("interleaved_1f1b",) if chunks_of(options) > 1 else AUTO_SCHEDULES


def _plan(
    split: Split,
    count: int,
    name: Any,
    layout: StageLayout,
    options: Options,
    cluster: Cluster,
    report: Report,
) -> Pipelined:
    meshes, chunks = len(layout.devices), chunks_of(options)
    splits = isinstance(name, str) and name.startswith("zb")
    if callable(name):
        splits = make_schedule(name, meshes, count, num_chunks=chunks).splits_backward
    report(f"slicing into {meshes * chunks} stages")
    stages = slice_stages(split.graph, split.rules, layout.boundaries, split_backward=splits)
    split = dataclasses.replace(split, graph=stages.whole, rules=stages.rules)
    if stages.forward_only and name in AUTO_SCHEDULES:
        name = "inference"
    schedule = make_schedule(name, meshes, count, num_chunks=chunks)
    parts = [submesh(cluster, size) for size in layout.devices]
    planned = _plan_stages(stages, count, options, parts, report)
    remat = layout.remat or (options.remat == "full",) * len(planned)
    return assemble(split, stages, planned, schedule, options, cluster, remat)


def _plan_stages(
    stages: Stages,
    count: int,
    options: Options,
    parts: Sequence[Cluster],
    report: Report,
) -> tuple[Planned, ...]:
    found = []
    for number, stage in enumerate(label_batch(stages)):
        report(f"planning stage {number + 1} of {len(stages.graphs)}")
        found.append(plan_stage(stage, count, options, parts[number % len(parts)]))
    return tuple(found)


def plan_stage(stage: StageGraph, count: int, options: Options, part: Cluster) -> Planned:
    """The best plan of one stage on the logical shapes of its mesh; one that fits, if any does."""
    one = Split(stage.graph, populate(stage.graph.jaxpr), ())
    own = stage_options(stage.graph, options)
    candidates = [
        plan_mesh(one, mesh, count, own, part, lambda message: None)
        for mesh in stage_meshes(own, part)
    ]
    fitting = [c for c in candidates if c.fits] or candidates
    return min(fitting, key=lambda c: (c.step_seconds, len(c.mesh)))


def stage_options(graph: Graph, options: Options) -> Options:
    """The options with the pins that are for a stage's own inputs."""
    return dataclasses.replace(options, pins=pins_of(graph, options.pins))


def stage_meshes(options: Options, part: Cluster) -> tuple[tuple[int, ...], ...]:
    """Logical shapes of a stage's mesh to consider.

    Raises:
      OptionError: the asked one does not have a stage's devices.
    """
    if options.logical_mesh is not None:
        if math.prod(options.logical_mesh) != part.num_devices:
            raise OptionError(
                f"logical_mesh={options.logical_mesh} does not fit a stage.",
                why=f"every stage has {part.num_devices} devices.",
            )
        return (options.logical_mesh,)
    if options.method in ("data", "zero1", "zero2", "zero3"):
        return ((part.num_devices,),)
    meshes = part.logical_meshes(MESHES_AXES)
    pinned = {axis for _, spec in options.pins for axes in spec for axis in axes}
    return tuple(m for m in meshes if pinned <= set(axis_names(m))) or meshes


def label_batch(stages: Stages) -> tuple[StageGraph, ...]:
    """The stages' graphs, with the batch dimension of what they receive."""
    known = batch_dims(stages.whole, stages.rules)
    return tuple(_labelled(stage, known) for stage in stages.graphs)


def _labelled(stage: StageGraph, known: BatchDims) -> StageGraph:
    if stage.loop is None:
        return stage
    loop = stage.graph.jaxpr.eqns[stage.loop]
    body = loop.params["jaxpr"].jaxpr
    slices = {
        outer: inner
        for outer, inner in zip(loop.invars, body.invars, strict=True)
        if not hasattr(outer, "val")
    }
    labels = []
    for var, label, leaf in zip(
        stage.graph.jaxpr.invars, stage.graph.inputs, stage.inputs, strict=True
    ):
        dims = known.get(slices[var], frozenset()) if leaf is None and var in slices else ()
        axis = min(dims) + 1 if dims else label.batch_axis
        labels.append(dataclasses.replace(label, batch_axis=axis))
    graph: Graph = dataclasses.replace(stage.graph, inputs=tuple(labels))
    return dataclasses.replace(stage, graph=graph)


def assemble(
    split: Split,
    stages: Stages,
    planned: Sequence[Planned],
    schedule: Schedule,
    options: Options,
    cluster: Cluster,
    remat: Sequence[bool],
) -> Pipelined:
    """Cut the planned stages into pieces, order them, and simulate a step."""
    flexible = [flexible_equations(p.built.scope) for p in planned]
    pieces = cut(stages, [p.program for p in planned], flexible, remat)
    program = emit(
        schedule,
        pieces.values,
        [piece.plain() for piece in pieces.pieces],
        pieces.transfers,
        inputs=[number for group in pieces.inputs for number in group],
        outputs=pieces.outputs,
        donated=donated_values(split, pieces),
    )
    limit = memory_limit_of(options, cluster)
    timeline = simulated(pieces, program, planned, cluster)
    return Pipelined(split, stages, tuple(planned), pieces, program, timeline, limit, tuple(remat))


def rematerialized(candidate: Pipelined, options: Options, cluster: Cluster) -> Pipelined:
    """The same plan; stages on meshes that do not fit compute their forward pass again."""
    while True:
        too_much = {m for m, size in enumerate(candidate.peak_bytes) if size > candidate.limit}
        remat = tuple(
            done or candidate.schedule.mesh_of_stage[stage] in too_much
            for stage, done in enumerate(candidate.remat)
        )
        if remat == candidate.remat:
            return candidate
        candidate = assemble(
            candidate.split,
            candidate.stages,
            candidate.planned,
            candidate.schedule,
            options,
            cluster,
            remat,
        )


def _with_schedule(candidate: Pipelined, name: str, cluster: Cluster) -> Pipelined:
    """The same stages in another order."""
    schedule = candidate.schedule
    other = make_schedule(name, schedule.num_meshes, schedule.num_microbatches)
    pieces, program = candidate.pieces, candidate.program
    program = emit(
        other,
        pieces.values,
        [piece.plain() for piece in pieces.pieces],
        pieces.transfers,
        inputs=program.inputs,
        outputs=program.outputs,
        donated=program.donated,
    )
    timeline = simulated(pieces, program, candidate.planned, cluster)
    return dataclasses.replace(candidate, program=program, timeline=timeline)


def donated_values(split: Split, pieces: Pieces) -> list[int]:
    """The inputs that the caller gives up; one that is an output as it is stays."""
    outputs = set(pieces.outputs)
    return [
        number
        for label, group in zip(split.graph.inputs, pieces.inputs, strict=False)
        if label.donated
        for number in group
        if number not in outputs
    ]


def simulated(
    pieces: Pieces, program: PipelineProgram, planned: Sequence[Planned], cluster: Cluster
) -> Timeline:
    """The timeline that the cost model expects."""
    costs = [
        PieceCosts(Pricing(submesh(cluster, math.prod(p.mesh)), p.mesh), p.split.rules)
        for p in planned
    ]
    seconds: dict[str, float] = {}
    temporary: dict[str, int] = {}
    for piece in pieces.pieces:
        seconds[piece.name] = costs[piece.stage].seconds(piece.block)
        temporary[piece.name] = temporary_bytes(piece, pieces.programs[piece.stage])
    value_of = program.value_of

    def run_seconds(run: Run) -> float:
        return seconds[run.piece]

    def transfer_seconds(send: Send) -> float:
        link = cluster.inter_node if cluster.num_nodes > 1 else cluster.intra_node
        size = sum(value_of[b.value].bytes_per_device for b in send.buffers)
        return link.latency + size / link.bandwidth

    sizes = [0] * program.schedule.num_meshes
    for stage, mesh in enumerate(program.schedule.mesh_of_stage):
        sizes[mesh] = math.prod(pieces.programs[stage].mesh)
    return simulate(
        program,
        run_seconds,
        transfer_seconds,
        devices_per_mesh=sizes,
        temporary_bytes=temporary,
    )


def temporary_bytes(piece: StagePiece, program: Program) -> int:
    """Bytes per device that a piece needs beside what it reads and writes."""
    block = Block(
        tuple(port.version for port in piece.inputs),
        piece.instructions,
        tuple(p.version for p in piece.outputs if not hasattr(p.version.atom, "val")),
    )
    names: Mapping[Any, str] = {}
    worst: Peak = peak(
        Program(program.mesh, program.axis_names, block), dict(names), [False] * len(block.inputs)
    )
    held = sum(version_bytes(v, program.mesh) for v in {*block.inputs, *block.outputs})
    return max(worst.bytes - held, 0)


def flexible_equations(scope: Scope | None) -> frozenset[int]:
    """The ids of equations that are computed wherever they are read."""
    assert scope is not None
    found = {id(entry.eqn) for entry in scope.entries if entry.kind == "flexible"}
    for entry in scope.entries:
        for inner in entry.scopes:
            found |= flexible_equations(inner)
    return frozenset(found)
