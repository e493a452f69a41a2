"""Holds a plan against a compiler: what was promised beside what the findings say."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
from jax.extend.core import Var

from autopar.base.cluster import Cluster
from autopar.base.compiled_records import ProgramFinding, ProgramMemory
from autopar.base.hardware import num_cores
from autopar.base.verification_records import (
    CollectiveCheck,
    PieceCheck,
    PlannedBuffer,
    StageCheck,
    TimeCheck,
)
from autopar.base.version import __version__
from autopar.passes.graph.graph import Graph
from autopar.passes.pieces.piece_costs import PieceCosts, inner_bytes
from autopar.passes.pieces.pieces import Runnable
from autopar.passes.pipeline.buffer_memory import live_bytes
from autopar.passes.pipeline.instructions import Buffer, Run
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding.compiler_rules import rules_of
from autopar.passes.sharding.peak_memory import peak
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.traffic import MemoryTraffic
from autopar.plans.plan import Plan
from autopar.report.summaries import memory_limit
from autopar.report.verification_report import Verification
from autopar.runtime.compiled_peaks import compiled_peaks
from autopar.runtime.ray.transport import pickling
from autopar.runtime.stage_programs import donated_numbers, variants_of
from autopar.runtime.verification.buffer_sources import BufferSources, with_lines
from autopar.runtime.verification.compile_all import CompiledPrograms, Key, compile_all
from autopar.runtime.verification.known_findings import KnownFindings
from autopar.runtime.verification.targets import Target
from autopar.runtime.verification.worker import PLAIN, StepToCompile

UNROLLING = "unrolling of loops"
LOOP_TASKS = ("F", "B", "W")
SECONDS = 1800.0
"""How long one program may take to compile, if nobody says otherwise."""


def verify_step(
    plan: Plan,
    runnable: Runnable,
    graph: Graph,
    shapes: Sequence[jax.ShapeDtypeStruct],
    target: Target,
    *,
    microbatched: Graph | None = None,
    folder: Path | None,
    processes: int | None = None,
    seconds: float = SECONDS,
    plain: bool = False,
    report: Callable[[str], None] = lambda message: None,
) -> Verification:
    """Compile every distinct piece of a plan, and compare.

    Args:
      plan: what was promised.
      runnable: what its meshes run.
      graph: the step as it was traced.
      shapes: of a call's leaves.
      target: what to compile for.
      microbatched: the graph that the meshes evaluate; without it, times are not compared.
      folder: where findings are kept from one process to the next; None: nowhere.
      processes: how many compile at a time; by default as many as there are cores.
      seconds: how long one program may take.
      plain: compile the step as it was traced as well, of a plan for one mesh.
      report: takes a line of progress.
    """
    meshes = {stage.mesh: stage.num_devices for stage in plan.stages}
    target.require(sum(meshes.values()))
    runnable, peaks, planned_for = _on_target(plan, runnable, graph, target)
    constants = tuple(
        jax.ShapeDtypeStruct(typed.shape, typed.dtype, weak_type=typed.weak_type)
        for typed in map(jax.typeof, graph.constants)
    )
    step = StepToCompile(
        runnable,
        graph.inputs[: len(shapes)],
        tuple(shapes),
        constants,
        sum(meshes.values()),
        target,
        graph.jaxpr if plain and not plan.is_pipeline else None,
    )
    names = [piece.name for piece in runnable.pieces.pieces]
    keys = variants_of(runnable.program, names)
    made = compile_all(
        pickling.dumps(step, "the step"),
        keys if step.plain is None else (*keys, PLAIN),
        target=target.name,
        compiler=target.compiler,
        environment={**target.environment(), **_wide_types()},
        known=KnownFindings(folder),
        processes=processes or num_cores(),
        seconds=seconds,
        report=report,
    )
    pieces = _pieces(plan, runnable, graph, keys, made, peaks)
    return Verification(
        target=target.name,
        compiler=target.compiler,
        autopar_version=__version__,
        jax_version=jax.__version__,
        program_hash=plan.program_hash,
        decisions_hash=plan.decisions_hash,
        plan=repr(plan),
        pieces=pieces,
        stages=_stages(plan, runnable, graph, made.findings, target, peaks),
        collectives=_collectives(plan, pieces),
        times=_times(plan, runnable, microbatched, pieces),
        interrupted=made.interrupted,
        planned_for=planned_for,
        plain=made.findings.get(PLAIN),
    )


def _wide_types() -> dict[str, str]:
    """What the environment of other processes must have, so that they have float64 as well."""
    return {"JAX_ENABLE_X64": "1"} if jax.config.read("jax_enable_x64") else {}


def _on_target(
    plan: Plan, runnable: Runnable, graph: Graph, target: Target
) -> tuple[Runnable, list[int], str]:
    """What meshes run, what a device of each stage is expected to need, and what the plan is for.

    A plan for another kind of devices is held to the rules of the target's compiler; "": it is for
    this kind.
    """
    peaks = [stage.peak_bytes_per_device for stage in plan.stages]
    own, rules = str(plan.cluster["device"]["name"]), rules_of(target.device_name)
    if rules_of(own) == rules:
        return runnable, peaks, ""
    programs = tuple(dataclasses.replace(x, rules=rules) for x in runnable.pieces.programs)
    pieces = dataclasses.replace(runnable.pieces, programs=programs)
    if plan.is_pipeline:
        rows = live_bytes(runnable.program, inner_bytes(pieces, peaks))
        most = [max(live.during for live in row) for row in rows]
        peaks = [most[stage.mesh] for stage in plan.stages]
    else:
        donated = [label.donated for label in graph.inputs]
        peaks = [peak(programs[0], {}, donated, target.memory_bytes).bytes]
    return dataclasses.replace(runnable, pieces=pieces), peaks, own


def _pieces(
    plan: Plan,
    runnable: Runnable,
    graph: Graph,
    keys: Sequence[Key],
    made: CompiledPrograms,
    peaks: Sequence[int],
) -> tuple[PieceCheck, ...]:
    planned = _planned_memory(runnable, peaks)
    by_name = {piece.name: piece for piece in runnable.pieces.pieces}
    often = 1 if not plan.is_pipeline else plan.num_microbatches
    sources = BufferSources([program.block for program in runnable.pieces.programs])
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    found = []
    for key in keys:
        piece = by_name[key[0]]
        counts[piece.name] += 1
        name = piece.name if counts[piece.name] == 1 else f"{piece.name} ({counts[piece.name]})"
        digest = made.digests.get(key)
        original = name if digest is None else first.setdefault(digest, name)
        found.append(
            PieceCheck(
                piece=name,
                stage=piece.stage,
                task=piece.kind,
                runs=often if piece.kind in LOOP_TASKS else 1,
                planned=planned[key],
                same_as="" if original == name else original,
                known=key in made.known,
                finding=with_lines(made.findings.get(key), sources, graph),
            )
        )
    return tuple(found)


def _planned_memory(runnable: Runnable, peaks: Sequence[int]) -> dict[Key, ProgramMemory]:
    """Of every piece with what it donates: what it returns takes that memory, as far as it goes."""
    program, inside = runnable.program, inner_bytes(runnable.pieces, peaks)

    def size(buffers: Sequence[Buffer]) -> int:
        return sum(program.value_of[x.value].bytes_per_device for x in buffers)

    found: dict[Key, ProgramMemory] = {}
    for run in (x for mesh in program.meshes for x in mesh if isinstance(x, Run)):
        aliased = min(size(run.donates), size(run.writes))
        planned = ProgramMemory(size(run.reads), size(run.writes), aliased, inside[run.piece])
        found.setdefault((run.piece, donated_numbers(run)), planned)
    return found


def _stages(
    plan: Plan,
    runnable: Runnable,
    graph: Graph,
    findings: Mapping[Key, ProgramFinding],
    target: Target,
    planned: Sequence[int],
) -> tuple[StageCheck, ...]:
    limit = target.memory_bytes or memory_limit(plan)
    memory = {key: finding.memory for key, finding in findings.items()}
    peaks = compiled_peaks(runnable.program, memory)
    return tuple(
        StageCheck(
            number,
            stage.mesh,
            planned[number],
            peaks[stage.mesh],
            limit,
            () if plan.is_pipeline else _planned_buffers(runnable, graph, target),
        )
        for number, stage in enumerate(plan.stages)
    )


def _planned_buffers(runnable: Runnable, graph: Graph, target: Target) -> tuple[PlannedBuffer, ...]:
    """The largest values at the worst moment of a step on one mesh, those alike as one."""
    (program,) = runnable.pieces.programs
    donated = [label.donated for label in graph.inputs]
    inputs = {v.atom: "an argument" for v in program.block.inputs}
    names = {v: x for v, x in inputs.items() if isinstance(v, Var)}
    found = peak(program, names, donated, target.memory_bytes)
    counts = Counter((size, label) for label, size in found.alive)
    made = (PlannedBuffer(*key, count) for key, count in counts.items())
    return tuple(sorted(made, key=lambda x: (-x.bytes * x.count, x.label)))


def _collectives(plan: Plan, pieces: Sequence[PieceCheck]) -> tuple[CollectiveCheck, ...]:
    """By stage, task, kind, axes and times, of what was compiled."""
    Place = tuple[int, str, str, tuple[str, ...], int]
    planned: Counter[Place] = Counter()
    compiled: Counter[Place] = Counter()
    sources: defaultdict[Place, dict[str, None]] = defaultdict(dict)
    tasks: Mapping[tuple[int, str], list[PieceCheck]] = _by_task(pieces)
    is_there = {
        place: all(x.finding is not None and not x.failure for x in own)
        for place, own in tasks.items()
    }
    for number, stage in enumerate(plan.stages):
        for c in stage.collectives:
            task = c.task if plan.is_pipeline else pieces[0].task
            if is_there.get((number, task)):
                place = (number, task, c.kind, c.axes, c.times)
                planned[place] += c.bytes
                sources[place][c.source] = None
    seen: set[str] = set()
    changed: Counter[Place] = Counter()
    passes: defaultdict[Place, dict[str, None]] = defaultdict(dict)
    for x in pieces:
        base = x.piece.partition(" (")[0]
        if not is_there[x.stage, x.task] or base in seen:
            continue  # another variant of a piece runs instead of the first, not beside it
        seen.add(base)
        assert isinstance(x.finding, ProgramFinding)
        for kept in x.finding.collectives:
            compiled[x.stage, x.task, kept.kind, kept.axes, kept.times * x.runs] += kept.bytes
        for change in x.finding.changes:
            place = (x.stage, x.task, change.kind, change.axes, change.times * x.runs)
            changed[place] += change.after - change.before
            passes[place][change.compiler_pass] = None

    more = Counter[tuple[object, ...]]()  # bytes of a step that were not planned, of all loops
    in_loops = {place[:-1] for place in {*planned, *compiled} if place[-1] > 1}
    for place in {*planned, *compiled}:
        more[place[:-1]] += (compiled[place] - planned[place]) * place[-1]

    def changed_by(place: Place) -> tuple[str, ...]:
        """The passes, if what they changed is all that is not as planned.

        Where a step has as many bytes of a kind as planned, loops have other trips: XLA unrolls
        short ones.
        """
        if planned[place] == compiled[place]:
            return ()
        if changed[place] and planned[place] + changed[place] == compiled[place]:
            return tuple(passes[place])
        is_same = not more[place[:-1]] and place[:-1] in in_loops
        return (UNROLLING,) if is_same else ()

    return tuple(
        CollectiveCheck(
            *place,
            planned[place],
            compiled[place],
            tuple(filter(None, sources[place])),
            changed_by(place),
        )
        for place in sorted({*planned, *compiled})
    )


def _times(
    plan: Plan, runnable: Runnable, graph: Graph | None, pieces: Sequence[PieceCheck]
) -> tuple[TimeCheck, ...]:
    """Of one mesh's step, by kind of its kernels."""
    found = pieces[0].finding
    if graph is None or plan.is_pipeline or found is None or not found.times:
        return ()
    (program,) = runnable.pieces.programs
    cluster = Cluster.from_dict(plan.cluster)
    rules = rules_of(cluster.device.name)
    traffic = MemoryTraffic(graph.jaxpr, rules.gathers_read_buffers)
    pricing = Pricing(cluster, program.mesh, traffic=traffic)
    planned = PieceCosts(pricing, populate(graph.jaxpr)).by_kind(program.block)
    planned["computation"] = planned["products"] + planned["rest"]
    return tuple(
        TimeCheck(x.kind, planned[x.kind], x.seconds, x.kernels, x.unknown) for x in found.times
    )


def _by_task(pieces: Sequence[PieceCheck]) -> dict[tuple[int, str], list[PieceCheck]]:
    found: defaultdict[tuple[int, str], list[PieceCheck]] = defaultdict(list)
    for x in pieces:
        found[x.stage, x.task].append(x)
    return found
