"""Between a solved candidate and the `Plan` that people read, save and run again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex_core

from autopar import __version__
from autopar.base.cluster import Cluster
from autopar.base.costs import collective_seconds
from autopar.base.errors import PlanMismatchError
from autopar.base.options import Options
from autopar.base.units import format_bytes
from autopar.passes.graph.graph import Graph, Output, inner_jaxprs
from autopar.passes.planner.candidates import Planned, Split, memory_limit_of, prepare
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.flops import flops
from autopar.passes.primitives.table import CONTROL_FLOW
from autopar.passes.sharding.build import Built
from autopar.passes.sharding.collectives import collectives, short_source
from autopar.passes.sharding.layout import Layout, describe
from autopar.passes.sharding.lower import lower
from autopar.passes.sharding.peak_memory import version_bytes
from autopar.passes.sharding.scopes import aval_shape, itemsize
from autopar.passes.sharding.spmd_program import Program, Version
from autopar.plans.plan import (
    Candidate,
    Collective,
    Estimates,
    NodeStrategy,
    Plan,
    SolverSummary,
    StagePlan,
    TensorPlan,
)


def make_plan(
    chosen: Planned,
    candidates: Sequence[Candidate],
    program_hash: str,
    graph: Graph,
    options: Options,
    cluster: Cluster,
) -> Plan:
    """Write down what was chosen, what it is expected to cost, and what else was considered."""
    program, built = chosen.program, chosen.built
    listed = priced_collectives(program, cluster)
    communication = sum(c.seconds * c.times for c in listed)
    inputs = tuple(
        tensor_plan(version, label.path, label.role, label.donated, program)
        for version, label in zip(program.block.inputs, graph.inputs, strict=True)
    )
    outputs = tuple(
        tensor_plan(version, label.path, _role(label), False, program)
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
        reason_for_microbatches=_reason(chosen, options, cluster),
        stages=(
            StagePlan(
                logical_mesh=program.mesh,
                axis_names=program.axis_names,
                num_devices=math.prod(program.mesh),
                strategies=strategies_of(chosen),
                collectives=listed,
                peak_bytes_per_device=chosen.peak.bytes,
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
        candidates=tuple(candidates),
    )


def follow_plan(plan: Plan, split: Split, options: Options) -> Program:
    """The program of a plan that was made before, on the graph split as the plan says.

    Raises:
      PlanMismatchError: its strategies are not those of this program.
    """
    stage = plan.stages[0]
    cluster = Cluster.from_dict(plan.cluster)
    built, pricing, dims = prepare(split, stage.logical_mesh, options, cluster)
    assignment = assignment_of(stage, built)
    return lower(split.graph, built, assignment, pricing, stage.axis_names, dims)


def _role(label: Output) -> str:
    return "output" if label.twin is None else "state"


def strategies_of(planned: Planned) -> tuple[NodeStrategy, ...]:
    """What was chosen for every node, as a plan stores it."""
    names, built = planned.program.axis_names, planned.built
    return tuple(
        NodeStrategy(
            name,
            short_source(node.source),
            _choice_text(node.layouts, planned.solution.assignment[index], names),
        )
        for index, (name, node) in enumerate(zip(_node_names(built), built.nodes, strict=True))
    )


def assignment_of(stage: StagePlan, built: Built) -> list[int]:
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


def _node_names(built: Built) -> list[str]:
    return [f"{index}: {node.label}" for index, node in enumerate(built.nodes)]


def _choice_text(layouts: Sequence[Layout], s: int, names: Sequence[str]) -> str:
    return f"{s} {describe(layouts[s], names)}"


def priced_collectives(program: Program, cluster: Cluster) -> tuple[Collective, ...]:
    """The collectives of a step on one mesh, with the seconds that they are expected to take."""

    def seconds(item: Collective) -> float:
        axes = [program.axis_names.index(name) for name in item.axes]
        return collective_seconds(item.kind, item.bytes, cluster, program.mesh, axes)

    return tuple(dataclasses.replace(item, seconds=seconds(item)) for item in collectives(program))


def tensor_plan(
    version: Version,
    path: str,
    role: str,
    donated: bool,
    program: Program,
    stages: tuple[int, ...] = (0,),
) -> TensorPlan:
    """How a leaf is stored."""
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
        stages=stages,
    )


def _held(version: Version, program: Program) -> int:
    if isinstance(version.atom, jex_core.Literal):
        return math.prod(aval_shape(version.atom)) * itemsize(version.atom.aval)
    return version_bytes(version, program.mesh)


def _reason(chosen: Planned, options: Options, cluster: Cluster) -> str:
    if options.microbatches != "auto":
        return "as asked"
    limit = memory_limit_of(options, cluster)
    if chosen.num_microbatches == 1:
        return f"the whole batch at once fits {format_bytes(limit)} per device"
    return f"the fewest with which a step fits {format_bytes(limit)} per device"


def total_flops(jaxpr: Any, rules: Rules, times: int = 1) -> int:
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
