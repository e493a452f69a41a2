"""The map of the compiler: the passes in the order in which a train step flows through them.

`compile_graph` takes a traced graph (`autopar.passes.trace`) and returns the plan and the program
that every device runs. Each pass is a function from values to values:

    rules      = populate(jaxpr)                    what each equation's dimensions have in common
    split      = microbatch.split(graph, analysis)  prologue, loop over microbatches, epilogue
    built      = build(graph, rules, mesh, ...)     nodes, strategies and costs on one logical mesh
    assignment = solve(to_problem(built))           the integer program
    program    = lower(graph, built, assignment)    instructions and collectives for every device

Pipeline stages will stand between the microbatches and the mesh: a plan already holds a tuple of
stages, and what follows `split` here is the work on one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar import __version__
from autopar.cluster import Cluster, axis_names
from autopar.errors import (
    BatchArgumentError,
    InexactMicrobatchError,
    MemoryLimitError,
    OptionError,
    PlanMismatchError,
)
from autopar.options import Options
from autopar.passes import microbatch
from autopar.passes.costs import PICOSECONDS
from autopar.passes.factors.flops import flops
from autopar.passes.factors.populate import populate
from autopar.passes.factors.primitives import CONTROL_FLOW
from autopar.passes.graph import Graph, fingerprint, inner_jaxprs
from autopar.passes.sharding.batch_dims import batch_dims
from autopar.passes.sharding.build import Built, build
from autopar.passes.sharding.collectives import collectives, short_source
from autopar.passes.sharding.layout import Layout, describe
from autopar.passes.sharding.lower import lower
from autopar.passes.sharding.memory import Peak, peak, version_bytes
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.problem import to_problem
from autopar.passes.sharding.program import Program, Version
from autopar.passes.sharding.restrict import (
    ONE_AXIS_METHODS,
    check_batch,
    resolve_pins,
    restriction,
)
from autopar.passes.sharding.scopes import aval_shape, itemsize
from autopar.passes.solver import Infeasible, Solution, solve
from autopar.plans import (
    Candidate,
    Estimates,
    NodeStrategy,
    OutputCertificate,
    Plan,
    SolverSummary,
    StagePlan,
    TensorPlan,
)

Report = Callable[[str], None]
# Meshes of three axes have ten times as many strategies: they are planned when logical_mesh asks.
AUTO_MAX_AXES = 2
MEMORY_TRIES = 4  # how often the limit is tightened when a lowered program exceeds it


@dataclass(frozen=True)
class Compiled:
    """A plan, the program that follows from it, and the (microbatched) graph that it evaluates."""

    plan: Plan
    program: Program
    graph: Graph


@dataclass(frozen=True)
class _Planned:
    """A candidate: the solved and lowered program on one mesh with one number of microbatches."""

    mesh: tuple[int, ...]
    num_microbatches: int
    split: _Split
    built: Built
    solution: Solution
    program: Program
    peak: Peak
    fits: bool

    @property
    def step_seconds(self) -> float:
        return self.solution.cost / PICOSECONDS


@dataclass(frozen=True)
class _Split:
    """A graph with its batch split in time, its rules, and how each output is put together."""

    graph: Graph
    rules: Any
    certificate: tuple[OutputCertificate, ...]


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
    if plan is not None:
        plan.require(program_hash=program_hash, options=options.to_dict())
        chosen = _follow(plan, graph, rules, options, cluster)
        return Compiled(plan, chosen.program, chosen.split.graph)
    candidates: list[_Planned] = []
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
            _plan_mesh(split, mesh, count, options, cluster, report)
            for mesh in _meshes(options, cluster)
        ]
        candidates += found
        if any(candidate.fits for candidate in found):
            break
    fitting = [c for c in candidates if c.fits]
    if not fitting:
        raise _out_of_memory(candidates, graph, options, cluster, reason)
    chosen = min(fitting, key=lambda c: (c.step_seconds, len(c.mesh)))
    made = _make_plan(chosen, candidates, program_hash, graph, options, cluster)
    return Compiled(made, chosen.program, chosen.split.graph)


# Microbatches


def _microbatch_counts(graph: Graph, options: Options) -> Iterator[int]:
    """The number that the user wants; else as few as fit: 1, 2, 4, ... while the batch divides."""
    if options.microbatches != "auto":
        yield int(options.microbatches)
        return
    sizes = {
        aval_shape(var)[label.batch_axis]
        for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True)
        if label.batch_axis is not None
    }
    count = 1
    while count == 1 or all(size % count == 0 for size in sizes):
        yield count
        if not sizes or count >= min(sizes):
            return
        count *= 2


def _split(graph: Graph, rules: Any, options: Options, count: int, report: Report) -> _Split:
    if count == 1:
        whole = tuple(OutputCertificate(label.path, "whole batch") for label in graph.outputs)
        return _Split(graph, rules, whole)
    report(f"splitting the batch into {count} microbatches")
    analysis = microbatch.analyze(
        graph,
        rules,
        count,
        max_flops_share=options.max_flops_share,
        max_bytes_share=options.max_bytes_share,
    )
    split = microbatch.split(graph, analysis)
    return _Split(split, populate(split.jaxpr), analysis.certificate)


# One mesh


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


def _prepare(
    split: _Split, mesh: tuple[int, ...], options: Options, cluster: Cluster
) -> tuple[Built, Pricing, Any]:
    graph, rules = split.graph, split.rules
    dims = batch_dims(graph, rules)
    pins = resolve_pins(graph, options.pins, mesh, axis_names(mesh))
    allowed = restriction(graph, options.method, dims, pins)
    pricing = Pricing(cluster, mesh, allowed.reduce_scatter)
    return build(graph, rules, mesh, pricing, allowed), pricing, dims


def _plan_mesh(
    split: _Split,
    mesh: tuple[int, ...],
    count: int,
    options: Options,
    cluster: Cluster,
    report: Report,
) -> _Planned:
    """The cheapest program that fits; if none does, the one that needs least memory."""
    report(f"choosing shardings on a mesh of {' x '.join(map(str, mesh))}")
    built, pricing, dims = _prepare(split, mesh, options, cluster)
    limit = _memory_limit(options, cluster)
    donated = [label.donated for label in split.graph.inputs]
    names = {
        var: label.path
        for var, label in zip(split.graph.jaxpr.invars, split.graph.inputs, strict=True)
    }

    def attempt(memory: int | None) -> _Planned:
        solution = solve(
            to_problem(built, memory), time_limit=options.solver_time_limit, seed=options.seed
        )
        assignment = solution.assignment[: len(built.nodes)]
        program = lower(split.graph, built, assignment, pricing, axis_names(mesh), dims)
        worst = peak(program, names, donated)
        return _Planned(mesh, count, split, built, solution, program, worst, worst.bytes <= limit)

    found = attempt(None)
    target = limit
    for _ in range(MEMORY_TRIES):
        if found.fits:
            return found
        try:
            found = attempt(target)
        except Infeasible:
            break
        target -= max(found.peak.bytes - limit, limit // 100)
        if target <= 0:
            break
    if found.fits:
        return found
    least = _least_usage(built, options)
    return found if least is None else attempt(least)


def _least_usage(built: Built, options: Options) -> int | None:
    """The smallest memory limit that the solver can satisfy."""
    try:
        solve(to_problem(built, 1), time_limit=options.solver_time_limit, seed=options.seed)
    except Infeasible as error:
        return error.smallest_usage
    return None


def _memory_limit(options: Options, cluster: Cluster) -> int:
    return options.memory_limit or cluster.device.memory_bytes


def _out_of_memory(
    candidates: Sequence[_Planned], graph: Graph, options: Options, cluster: Cluster, reason: str
) -> MemoryLimitError:
    best = min(candidates, key=lambda c: c.peak.bytes)
    limit = _memory_limit(options, cluster)
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


# Plans


def _follow(plan: Plan, graph: Graph, rules: Any, options: Options, cluster: Cluster) -> _Planned:
    """The program of a plan that was made before."""
    stage = plan.stages[0]
    split = _split(graph, rules, options, plan.num_microbatches, lambda message: None)
    made_for = Cluster.from_dict(plan.cluster)
    built, pricing, dims = _prepare(split, stage.logical_mesh, options, made_for)
    names = _node_names(built)
    if [s.node for s in stage.strategies] != names:
        raise PlanMismatchError(
            "The plan's strategies do not fit this program.",
            why="it was made by another version of autopar or of a library.",
            hint="plan again.",
        )
    assignment = []
    for strategy, node in zip(stage.strategies, built.nodes, strict=True):
        texts = [
            _choice_text(node.layouts, s, stage.axis_names) for s in range(node.num_strategies)
        ]
        if strategy.choice not in texts:
            raise PlanMismatchError(
                f"The plan's choice {strategy.choice!r} for {strategy.node!r} does not exist.",
                hint="plan again.",
            )
        assignment.append(texts.index(strategy.choice))
    program = lower(split.graph, built, assignment, pricing, stage.axis_names, dims)
    empty = Solution(tuple(assignment), 0, 0, 0.0)
    return _Planned(
        stage.logical_mesh, plan.num_microbatches, split, built, empty, program, Peak(0, ()), True
    )


def _node_names(built: Built) -> list[str]:
    return [f"{index}: {node.label}" for index, node in enumerate(built.nodes)]


def _choice_text(layouts: Sequence[Layout], s: int, names: Sequence[str]) -> str:
    return f"{s} {describe(layouts[s], names)}"


def _make_plan(
    chosen: _Planned,
    candidates: Sequence[_Planned],
    program_hash: str,
    graph: Graph,
    options: Options,
    cluster: Cluster,
) -> Plan:
    program, built = chosen.program, chosen.built
    names = program.axis_names
    listed = _priced(program, chosen, cluster)
    communication = sum(c.seconds * c.times for c in listed)
    inputs = tuple(
        _tensor(version, label.path, label.role, label.donated, program)
        for version, label in zip(program.block.inputs, graph.inputs, strict=True)
    )
    outputs = tuple(
        _tensor(version, label.path, "output" if label.twin is None else "state", False, program)
        for version, label in zip(program.block.outputs, graph.outputs, strict=True)
    )
    return Plan(
        autopar_version=__version__,
        jax_version=jax.__version__,
        program_hash=program_hash,
        options=options.to_dict(),
        cluster=cluster.to_dict(),
        method=options.method,
        num_microbatches=chosen.num_microbatches,
        reason_for_microbatches=_reason(chosen, candidates, options, cluster),
        stages=(
            StagePlan(
                logical_mesh=program.mesh,
                axis_names=names,
                num_devices=math.prod(program.mesh),
                strategies=tuple(
                    NodeStrategy(
                        name,
                        short_source(node.source),
                        _choice_text(node.layouts, chosen.solution.assignment[index], names),
                    )
                    for index, (name, node) in enumerate(
                        zip(_node_names(built), built.nodes, strict=True)
                    )
                ),
                collectives=listed,
            ),
        ),
        inputs=inputs,
        outputs=outputs,
        certificate=chosen.split.certificate,
        estimates=Estimates(
            step_seconds=chosen.step_seconds,
            compute_seconds=max(chosen.step_seconds - communication, 0.0),
            communication_seconds=communication,
            peak_bytes_per_device=chosen.peak.bytes,
            state_bytes_per_device=sum(t.bytes_per_device for t in inputs if t.role == "state"),
            flops=float(total_flops(chosen.split.graph.jaxpr, chosen.split.rules)),
        ),
        solver=SolverSummary(
            cost=chosen.solution.cost,
            lower_bound=chosen.solution.lower_bound,
            gap=chosen.solution.gap,
            nodes=len(built.nodes),
            edges=len(built.edges),
            strategies=sum(node.num_strategies for node in built.nodes),
        ),
        candidates=tuple(
            Candidate(
                method=options.method,
                logical_mesh=c.mesh,
                num_microbatches=c.num_microbatches,
                step_seconds=c.step_seconds,
                peak_bytes_per_device=c.peak.bytes,
                chosen=c is chosen,
                note="" if c.fits else "exceeds the memory limit",
            )
            for c in candidates
        ),
    )


def _priced(program: Program, chosen: _Planned, cluster: Cluster) -> tuple[Any, ...]:
    from dataclasses import replace

    from autopar.passes.costs import collective_seconds

    return tuple(
        replace(
            c,
            seconds=collective_seconds(
                c.kind,
                c.bytes,
                cluster,
                program.mesh,
                [program.axis_names.index(a) for a in c.axes],
            ),
        )
        for c in collectives(program)
    )


def _tensor(version: Version, path: str, role: str, donated: bool, program: Program) -> TensorPlan:
    shape = aval_shape(version.atom)
    return TensorPlan(
        path=path,
        role=role,
        shape=shape,
        dtype=str(version.atom.aval.dtype),
        spec=tuple(tuple(program.axis_names[a] for a in axes) for axes in version.layout.dims),
        bytes=math.prod(shape) * itemsize(version.atom.aval),
        bytes_per_device=_held(version, program),
        donated=donated,
    )


def _held(version: Version, program: Program) -> int:
    if hasattr(version.atom, "val"):
        return math.prod(aval_shape(version.atom)) * itemsize(version.atom.aval)
    return version_bytes(version, program.mesh)


def _reason(
    chosen: _Planned, candidates: Sequence[_Planned], options: Options, cluster: Cluster
) -> str:
    if options.microbatches != "auto":
        return "as asked"
    limit = _memory_limit(options, cluster)
    if chosen.num_microbatches == 1:
        return f"the whole batch at once fits {limit:,} bytes per device"
    return f"the fewest with which a step fits {limit:,} bytes per device"


def total_flops(jaxpr: Any, rules: Any, times: int = 1) -> int:
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
