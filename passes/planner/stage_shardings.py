"""One stage, which may be the whole step, solved and lowered on one logical mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.base.cluster import Cluster, axis_names
from autopar.base.costs import PICOSECONDS
from autopar.base.methods import LOOP_METHODS
from autopar.base.options import Options
from autopar.base.plan_records import OutputCertificate
from autopar.passes.graph.graph import Graph
from autopar.passes.graph.microbatched import Microbatched
from autopar.passes.pieces.piece_costs import PieceCosts
from autopar.passes.pieces.pieces import StagePiece
from autopar.passes.planner.layouts import submesh
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.sharding.batch_dims import BatchDims, batch_dims
from autopar.passes.sharding.build import build
from autopar.passes.sharding.integer_program import to_problem
from autopar.passes.sharding.loop_kinds import loop_kinds
from autopar.passes.sharding.lower import lower
from autopar.passes.sharding.peak_memory import MemoryPeak, peak
from autopar.passes.sharding.pins import resolve_pins
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.restrict import restriction
from autopar.passes.sharding.spmd_program import SpmdProgram
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.sharding.traffic import MemoryTraffic
from autopar.passes.solver import Infeasible, Solution, solve

SOLVER_WORK = 5.0  # deterministic work, about a second each; most stages take a fraction of one
ENOUGH_GAP = 1e-3  # of the best cost, where a problem is large
LARGE_PROBLEM = 2000  # nodes; smaller ones are solved to the end
MEMORY_TRIES = 4  # how often the limit is tightened when a lowered program exceeds it


@dataclass(frozen=True)
class SplitStep:
    """A step with its batch split in time, its rules, and how each output is put together.

    `padding` has the sizes of loops that are padded in it, with their sizes there; of a step with
    several loops over the microbatches, `later_loops` says what the later ones do with what earlier
    ones computed of a row: "keep" or "recompute".
    """

    step: Microbatched
    rules: Rules
    certificate: tuple[OutputCertificate, ...] = ()
    num_microbatches: int = 1
    padding: tuple[tuple[int, int], ...] = ()
    later_loops: str = ""

    @property
    def graph(self) -> Graph:
        """All of the program."""
        return self.step.graph

    @cached_property
    def traffic(self) -> MemoryTraffic:
        """What its equations move in memory."""
        return MemoryTraffic(self.graph.jaxpr)


@dataclass(frozen=True)
class PlannedStage:
    """The solved and lowered program of a stage on one logical mesh."""

    mesh: tuple[int, ...]
    split: SplitStep
    built: StrategyGraph
    solution: Solution
    program: SpmdProgram
    peak: MemoryPeak
    fits: bool

    @property
    def step_seconds(self) -> float:
        """What the integer program expects of a step."""
        return self.solution.cost / PICOSECONDS

    def seconds(self, piece: StagePiece, costs: PieceCosts) -> float:
        """What a run of one of its pieces takes; of all of it, what it was chosen by.

        And sums of scalars, which no node decides: those that stay partial meet in one collective.
        """
        if piece.instructions is self.program.block.instructions:
            return self.step_seconds + costs.scalar_sums(piece.block)
        return costs.seconds(piece.block)

    def costs(self, cluster: Cluster) -> PieceCosts:
        """What blocks of the stage cost on its part of the cluster."""
        part = submesh(cluster, math.prod(self.mesh))
        pricing = Pricing(part, self.mesh, traffic=self.split.traffic)
        return PieceCosts(pricing, self.split.rules)


def prepare(
    split: SplitStep, mesh: tuple[int, ...], options: Options, cluster: Cluster
) -> tuple[StrategyGraph, Pricing, BatchDims]:
    """The integer program of a split graph on one mesh, its prices, and where the batch is."""
    graph, rules = split.graph, split.rules
    dims = batch_dims(graph, rules)
    pins = resolve_pins(graph, options.pins, mesh, axis_names(mesh))
    kinds = loop_kinds(graph, rules) if options.method in LOOP_METHODS else None
    allowed = restriction(graph, options.method, dims, mesh, pins, options.reduce_dtype, kinds)
    pricing = Pricing(cluster, mesh, allowed.reduce_scatter, split.traffic)
    return build(split.step, rules, mesh, pricing, allowed), pricing, dims


Allowed = Sequence[Sequence[int]]
"""For each node, the strategies that it may take."""


def plan_mesh(
    split: SplitStep,
    mesh: tuple[int, ...],
    options: Options,
    cluster: Cluster,
    allowed_in: Callable[[StrategyGraph], Allowed] | None = None,
) -> PlannedStage:
    """The cheapest program that fits; if none does, the one that needs least memory.

    `allowed_in` restricts what the nodes may choose; None: nothing does.
    """
    built, pricing, dims = prepare(split, mesh, options, cluster)
    allowed = None if allowed_in is None else allowed_in(built)
    limit = memory_limit_of(options, cluster)
    donated = [label.donated for label in split.graph.inputs]
    paths = [label.path for label in split.graph.inputs]
    names = dict(zip(split.graph.jaxpr.invars, paths, strict=True))

    def attempt(memory: int | None) -> PlannedStage:
        solution = _solve(built, memory, options, allowed)
        assignment = solution.assignment[: len(built.nodes)]
        program = lower(split.step, built, assignment, pricing, axis_names(mesh), dims)
        worst = peak(program, names, donated)
        return PlannedStage(mesh, split, built, solution, program, worst, worst.bytes <= limit)

    found, target, tries = attempt(None), limit, 0
    while not found.fits and target > 0 and tries < MEMORY_TRIES:
        try:
            found = attempt(target)
        except Infeasible:
            break
        target -= max(found.peak.bytes - limit, limit // 100)
        tries += 1
    if found.fits:
        return found
    least = _least_usage(built, options, allowed)
    return found if least is None else attempt(least)


def _solve(
    built: StrategyGraph, memory: int | None, options: Options, allowed: Allowed | None
) -> Solution:
    problem = to_problem(built, memory)
    found = solve(
        problem if allowed is None else problem.restricted(allowed),
        time_limit=options.solver_time_limit,
        work_limit=None if options.solver_time_limit else SOLVER_WORK,
        enough_gap=ENOUGH_GAP if problem.num_nodes > LARGE_PROBLEM else 0.0,
        seed=options.seed,
    )
    if allowed is None:
        return found
    assignment = (choices[s] for choices, s in zip(allowed, found.assignment, strict=False))
    return replace(found, assignment=(*assignment, *found.assignment[len(allowed) :]))


def _least_usage(built: StrategyGraph, options: Options, allowed: Allowed | None) -> int | None:
    """The smallest memory limit that the solver can satisfy."""
    try:
        _solve(built, 1, options, allowed)
    except Infeasible as error:
        return error.smallest_usage
    return None


def memory_limit_of(options: Options, cluster: Cluster) -> int:
    """Bytes that one device may hold: what the user allows, else what the device has."""
    return options.memory_limit or cluster.device.memory_bytes
