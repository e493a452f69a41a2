"""The map of the compiler: the passes in the order in which a train step flows through them.

`compile_graph` takes a traced graph (`autopar.passes.trace`) and returns the plan and the program
that every device runs. Each pass is a function from values to values:

    rules      = populate(jaxpr)                    what each equation's dimensions have in common
    split      = microbatch.split(graph, analysis)  prologue, loop over microbatches, epilogue
    built      = build(graph, rules, mesh, ...)     nodes, strategies and costs on one logical mesh
    assignment = solve(to_problem(built))           the integer program
    program    = lower(graph, built, assignment)    instructions and collectives for every device

With several pipeline stages (`passes/stages/candidate.py`) the split program is sliced first, and
what follows `split` here is done for every stage on its own mesh:

    stages   = slice_stages(graph, rules, ...)      one graph per stage, and what they send
    pieces   = cut(stages, programs)                the functions that a schedule's tasks run
    program  = emit(schedule, pieces)               one list of instructions per mesh
    timeline = simulate(program, costs)             what a step is expected to take
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopar.base.cluster import Cluster, axis_names
from autopar.base.errors import (
    BatchArgumentError,
    InexactMicrobatchError,
    MemoryLimitError,
    OptionError,
)
from autopar.base.options import Options
from autopar.passes import microbatch
from autopar.passes.graph.graph import Graph, batch_sizes, fingerprint
from autopar.passes.planner.auto_stages import choose_stages
from autopar.passes.planner.candidates import Planned, Split, memory_limit_of, plan_mesh
from autopar.passes.planner.pipeline_candidates import (
    Pipelined,
    Runnable,
    StageLayout,
    plan_pipelines,
)
from autopar.passes.planner.pipeline_writer import (
    follow_pipeline,
    list_candidates,
    make_pipeline_plan,
)
from autopar.passes.planner.plan_writer import follow_plan, make_plan
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding.restrict import ONE_AXIS_METHODS, check_batch, check_pins
from autopar.passes.sharding.spmd_program import Program
from autopar.plans.plan import OutputCertificate, Plan

Report = Callable[[str], None]
# Meshes of three axes have ten times as many strategies: they are planned when logical_mesh asks.
AUTO_MAX_AXES = 2


@dataclass(frozen=True)
class Compiled:
    """A plan, the program that follows from it, and the (microbatched) graph that it evaluates.

    What runs is the program of one mesh, or the pieces of several stages and their order.
    """

    plan: Plan
    runs: Program | Runnable
    graph: Graph

    @property
    def program(self) -> Program:
        """The program of a plan of one stage."""
        assert isinstance(self.runs, Program), "a pipelined plan has several programs"
        return self.runs

    @property
    def pipeline(self) -> Runnable | None:
        """What a plan of several stages runs."""
        return self.runs if isinstance(self.runs, Runnable) else None


def compile_graph(
    graph: Graph,
    options: Options,
    cluster: Cluster,
    plan: Plan | None = None,
    report: Report = lambda message: None,
) -> Compiled:
    """Plan a graph for a cluster, or follow a plan that was made before.

    Args:
      graph: a traced step.
      options: what the user asked for.
      cluster: the devices to plan for.
      plan: one made for the same program and options; nothing is solved then.
      report: takes a line of progress.

    Raises:
      InexactMicrobatchError: the asked number of microbatches would change the step's numbers.
      MemoryLimitError: nothing fits; says the least memory that would do.
      PinError, OptionError, BatchArgumentError: a request that cannot be met.
      PlanMismatchError: `plan` is for another program, other options or another version.
    """
    program_hash = fingerprint(graph.jaxpr)
    report(f"finding the sharding rules of {len(graph.jaxpr.eqns)} equations")
    rules = populate(graph.jaxpr)
    check_pins(graph, options.pins)
    if plan is not None:
        plan.require(program_hash=program_hash, options=options.to_dict())
        split = _split(graph, rules, options, plan.num_microbatches, report)
        follow = follow_plan if plan.pipeline is None else follow_pipeline
        return Compiled(plan, follow(plan, split, options), split.graph)
    if options.stages not in ("auto", 1):
        return _compile_pipeline(graph, rules, options, cluster, program_hash, report)
    candidates: list[Planned] = []
    reason = ""
    for count in _microbatch_counts(graph, options):
        try:
            for mesh in _meshes(options, cluster):
                check_batch(graph, options.method, mesh, count)
            split = _split(graph, rules, options, count, report)
        except (InexactMicrobatchError, BatchArgumentError) as error:
            if options.microbatches != "auto" or count == 1:
                raise
            reason = f"{count} microbatches are not possible: {error.what}"
            break
        found = [
            plan_mesh(split, mesh, count, options, cluster, report)
            for mesh in _meshes(options, cluster)
        ]
        candidates += found
        if any(candidate.fits for candidate in found):
            break
    fitting = [c for c in candidates if c.fits]
    pipelines: list[Pipelined] = []
    if options.stages == "auto" and (cluster.num_nodes > 1 or not fitting):
        pipelines = _automatic_pipelines(graph, rules, options, cluster, report)
    best = min((c for c in pipelines if c.fits), key=lambda c: c.step_seconds, default=None)
    if not fitting and best is None:
        raise _out_of_memory(candidates, graph, options, cluster, reason)
    chosen = min(fitting, key=lambda c: (c.step_seconds, len(c.mesh)), default=None)
    considered: list[Planned | Pipelined] = [*candidates, *pipelines]
    if chosen is None or (best is not None and best.step_seconds < chosen.step_seconds):
        assert best is not None
        return _pipelined(best, considered, program_hash, options, cluster)
    listed = list_candidates(considered, chosen, options)
    made = make_plan(chosen, listed, program_hash, graph, options, cluster)
    return Compiled(made, chosen.program, chosen.split.graph)


def _compile_pipeline(
    graph: Graph,
    rules: Rules,
    options: Options,
    cluster: Cluster,
    program_hash: str,
    report: Report,
) -> Compiled:
    """The stages and the schedule that were asked for; more microbatches while nothing fits."""
    candidates: list[Pipelined] = []
    layout = StageLayout.asked(options, cluster)
    for count in _pipeline_counts(graph, options, len(layout.devices)):
        split = _split(graph, rules, options, count, report)
        candidates += plan_pipelines(split, count, layout, options, cluster, report)
        if any(candidate.fits for candidate in candidates):
            break
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        raise _pipeline_out_of_memory(candidates, options)
    chosen = min(fitting, key=lambda c: c.step_seconds)
    return _pipelined(chosen, candidates, program_hash, options, cluster)


def _pipelined(
    chosen: Pipelined,
    candidates: Sequence[Planned | Pipelined],
    program_hash: str,
    options: Options,
    cluster: Cluster,
) -> Compiled:
    listed = list_candidates(candidates, chosen, options)
    made = make_pipeline_plan(chosen, listed, program_hash, options, cluster)
    return Compiled(made, chosen.runnable, chosen.split.graph)


def _automatic_pipelines(
    graph: Graph,
    rules: Rules,
    options: Options,
    cluster: Cluster,
    report: Report,
) -> list[Pipelined]:
    """Pipelines whose stages the dynamic program chooses; none where one mesh is best or must be.

    With the microbatches that are asked, else with about four for each node (at least eight).
    """
    sizes = batch_sizes(graph)
    if options.microbatches == 1 or options.logical_mesh is not None or not sizes:
        return []
    count = int(options.microbatches) if options.microbatches != "auto" else 1
    while options.microbatches == "auto" and count < max(8, 4 * cluster.num_nodes):
        if any(size % (2 * count) for size in sizes):
            break
        count *= 2
    if count < 2:
        return []
    try:
        split = _split(graph, rules, options, count, report)
    except (InexactMicrobatchError, BatchArgumentError):
        return []
    layout = choose_stages(split, count, options, cluster, report)
    if layout is None:
        return []
    return plan_pipelines(split, count, layout, options, cluster, report)


def _pipeline_counts(graph: Graph, options: Options, meshes: int) -> Iterator[int]:
    """What the user wants; else four for each mesh as far as the batch divides, then more.

    Raises:
      OptionError: a pipeline cannot have that number.
    """
    sizes = batch_sizes(graph)
    if options.microbatches != "auto":
        if int(options.microbatches) < 2:
            raise OptionError(
                "A pipeline needs at least two microbatches.",
                where=f"microbatches={options.microbatches}, stages={options.stages!r}",
                why="with one, only one stage would work at a time.",
                hint="raise microbatches, or use stages=1.",
            )
        yield int(options.microbatches)
        return
    count = 1
    while count < 4 * meshes and sizes and all(size % (2 * count) == 0 for size in sizes):
        count *= 2
    if count < 2:
        raise OptionError(
            "The batch cannot be split for a pipeline.",
            where=f"stages={options.stages!r}",
            why=f"a pipeline needs at least two microbatches, and the batch has {sorted(sizes)} "
            "rows.",
            hint="use an even batch, or say microbatches.",
        )
    while all(size % count == 0 for size in sizes):
        yield count
        count *= 2


def _pipeline_out_of_memory(candidates: Sequence[Pipelined], options: Options) -> MemoryLimitError:
    best = min(candidates, key=lambda c: max(c.peak_bytes))
    mesh = max(range(len(best.peak_bytes)), key=lambda m: best.peak_bytes[m])
    names = [s for s, m in enumerate(best.schedule.mesh_of_stage) if m == mesh]
    alive = [item for s in names for item in best.planned[s].peak.alive]
    return MemoryLimitError(
        f"No plan keeps within {best.limit:,} bytes per device: stage "
        f"{' and '.join(map(str, names))} needs {best.peak_bytes[mesh]:,}.",
        where=f"stages={options.stages!r}, schedule {best.schedule.name}, "
        f"{best.schedule.num_microbatches} microbatches",
        hint="raise memory_limit, or use more stages, more microbatches, or a schedule with fewer "
        "in flight (1f1b).",
        least_bytes=max(best.peak_bytes),
        largest_tensors=sorted(alive, key=lambda item: -item[1])[:5],
    )


def _microbatch_counts(graph: Graph, options: Options) -> Iterator[int]:
    """The number that the user wants; else as few as fit: 1, 2, 4, ... while the batch divides."""
    if options.microbatches != "auto":
        yield int(options.microbatches)
        return
    sizes = batch_sizes(graph)
    count = 1
    while count == 1 or all(size % count == 0 for size in sizes):
        yield count
        if not sizes or count >= min(sizes):
            return
        count *= 2


def _split(graph: Graph, rules: Rules, options: Options, count: int, report: Report) -> Split:
    if count == 1:
        whole = tuple(OutputCertificate(label.path, "whole batch") for label in graph.outputs)
        return Split(graph, rules, whole)
    report(f"splitting the batch into {count} microbatches")
    analysis = microbatch.analyze(
        graph,
        rules,
        count,
        max_flops_share=options.max_flops_share,
        max_bytes_share=options.max_bytes_share,
    )
    split = microbatch.split(graph, analysis)
    return Split(split, populate(split.jaxpr), analysis.certificate)


def _meshes(options: Options, cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    if options.method in ONE_AXIS_METHODS:
        mesh = options.logical_mesh or (cluster.num_devices,)
        if len(mesh) != 1:
            raise OptionError(
                f"logical_mesh={mesh} is not possible with method={options.method!r}.",
                why="data parallelism and ZeRO use one mesh axis.",
                hint="use method='shard' for meshes of several axes.",
            )
        return (mesh,)
    if options.logical_mesh is not None:
        if math.prod(options.logical_mesh) > cluster.num_devices:
            raise OptionError(
                f"logical_mesh={options.logical_mesh} is larger than the cluster.",
                why=f"the cluster has {cluster.num_devices} devices.",
            )
        return (options.logical_mesh,)
    meshes = cluster.logical_meshes(AUTO_MAX_AXES)
    if any(axis == "z" for _, spec in options.pins for axes in spec for axis in axes):
        meshes = cluster.logical_meshes()
    pinned = {axis for _, spec in options.pins for axes in spec for axis in axes}
    return tuple(m for m in meshes if pinned <= set(axis_names(m))) or meshes


def _out_of_memory(
    candidates: Sequence[Planned], graph: Graph, options: Options, cluster: Cluster, reason: str
) -> MemoryLimitError:
    best = min(candidates, key=lambda c: c.peak.bytes)
    limit = memory_limit_of(options, cluster)
    hints = ["a smaller batch", "more devices"]
    if options.method in ONE_AXIS_METHODS:
        hints.insert(0, "method='auto'")
    if options.microbatches != "auto":
        hints.insert(0, "microbatches='auto'")
    return MemoryLimitError(
        f"No plan keeps within {limit:,} bytes per device" + (f" ({reason})." if reason else "."),
        where=f"method={options.method!r}, {cluster.num_devices} devices",
        hint=f"raise memory_limit, or use {', '.join(hints)}.",
        least_bytes=best.peak.bytes,
        largest_tensors=best.peak.alive[:5],
    )
