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

from autopar.cluster import Cluster, axis_names
from autopar.errors import (
    BatchArgumentError,
    InexactMicrobatchError,
    MemoryLimitError,
    OptionError,
)
from autopar.options import Options
from autopar.passes import microbatch
from autopar.passes.artifact import follow_plan, make_plan
from autopar.passes.candidates import Planned, Split, memory_limit_of, plan_mesh
from autopar.passes.factors.populate import populate
from autopar.passes.graph import Graph, fingerprint
from autopar.passes.sharding.program import Program
from autopar.passes.sharding.restrict import ONE_AXIS_METHODS, check_batch
from autopar.passes.sharding.scopes import aval_shape
from autopar.plans import OutputCertificate, Plan

Report = Callable[[str], None]
# Meshes of three axes have ten times as many strategies: they are planned when logical_mesh asks.
AUTO_MAX_AXES = 2


@dataclass(frozen=True)
class Compiled:
    """A plan, the program that follows from it, and the (microbatched) graph that it evaluates."""

    plan: Plan
    program: Program
    graph: Graph


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
        split = _split(graph, rules, options, plan.num_microbatches, report)
        return Compiled(plan, follow_plan(plan, split, options), split.graph)
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
    if not fitting:
        raise _out_of_memory(candidates, graph, options, cluster, reason)
    chosen = min(fitting, key=lambda c: (c.step_seconds, len(c.mesh)))
    made = make_plan(chosen, candidates, program_hash, graph, options, cluster)
    return Compiled(made, chosen.program, chosen.split.graph)


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


def _split(graph: Graph, rules: Any, options: Options, count: int, report: Report) -> Split:
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
