"""A stage as it is planned on one logical mesh, and what its place in a pipeline asks of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from jax.extend.core import Var

from autopar.base.cluster import Cluster
from autopar.base.costs import PICOSECONDS
from autopar.passes.graph.graph import Graph
from autopar.passes.graph.microbatched import InFlight
from autopar.passes.pieces.piece_costs import PieceCosts
from autopar.passes.pieces.pieces import StagePiece
from autopar.passes.pieces.stage_account import StageAccount
from autopar.passes.planner.layouts import submesh
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.schedules.flight import in_flight
from autopar.passes.schedules.schedule import Schedule
from autopar.passes.sharding.gathered_twice import gathered_for_both
from autopar.passes.sharding.host_leaves import hosts_fit
from autopar.passes.sharding.memory_rows import StageMemory
from autopar.passes.sharding.peak_memory import MemoryPeak
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.spmd_program import SpmdProgram
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.slicing.stage_graphs import StageGraph
from autopar.passes.solver import Solution


@dataclass(frozen=True)
class PlannedStage:
    """The solved and lowered program of a stage on one logical mesh.

    `remat` says whether its backward pass computes the forward pass again, which takes
    `again_seconds` a step. `unlimited` is the plan without a limit of memory, if that is another.
    """

    mesh: tuple[int, ...]
    split: SplitStep
    built: StrategyGraph
    solution: Solution
    program: SpmdProgram
    peak: MemoryPeak
    fits: bool
    remat: bool = False
    again_seconds: float = 0.0
    unlimited: PlannedStage | None = None

    @property
    def step_seconds(self) -> float:
        """What the integer program expects of a step."""
        return self.solution.cost / PICOSECONDS + self.again_seconds

    @property
    def least_seconds(self) -> float:
        """No plan on this mesh takes less, however much memory it has."""
        return (self.unlimited or self).solution.lower_bound / PICOSECONDS

    @property
    def casts_again(self) -> bool:
        """Whether parameters are cast in every microbatch."""
        return self.split.casts == "microbatch"

    @property
    def bytes_at_least(self) -> int:
        """Of a device, if weights that are gathered for both passes are gathered for each."""
        return self.peak.bytes - gathered_for_both(self.program)

    def proven_by(self, free: PlannedStage) -> PlannedStage:
        """This plan, which is within a limit, with what is proven of all with any memory."""
        solution, bound = self.solution, free.solution.lower_bound
        if bound <= solution.lower_bound:
            return self
        gap = 1 - bound / solution.cost if solution.cost else 0.0
        return replace(self, solution=replace(solution, lower_bound=bound, gap=gap))

    def seconds(self, piece: StagePiece, costs: PieceCosts) -> float:
        """What a run of one of its pieces takes; of all of it, what it was chosen by.

        And sums of scalars, which no node decides: those that stay partial meet in one collective.
        Where collectives are hidden, that is as far as there is something to hide them.
        """
        if piece.instructions is not self.program.block.instructions:
            return costs.seconds(piece.block)
        chosen_by = self.step_seconds + costs.scalar_sums(piece.block)
        if not costs.pricing.cluster.overlap:
            return chosen_by
        return max(chosen_by, costs.seconds(piece.block))

    def costs(self, cluster: Cluster) -> PieceCosts:
        """What blocks of the stage cost on its part of the cluster."""
        part = submesh(cluster, math.prod(self.mesh))
        pricing = Pricing(part, self.mesh, traffic=self.split.traffic(part.device.name))
        return PieceCosts(pricing, self.split.rules)


class PlaceInPipeline(NamedTuple):
    """A stage's graph, and how many microbatches it has in flight under the schedule.

    `at_once`: a microbatch runs forward and backward without a break. `must_fit`: what
    does not fit soon is nothing, for another plan does, or is known to need about as much.
    """

    graph: StageGraph
    in_flight: InFlight
    at_once: bool = False
    must_fit: bool = False

    @classmethod
    def under(
        cls, schedule: Schedule, number: int, graph: StageGraph, must_fit: bool = False
    ) -> PlaceInPipeline:
        """The place of the stage of this number."""
        return cls(graph, in_flight(schedule, number), schedule.at_once[number], must_fit)

    def memory(self, remat: bool) -> StageMemory:
        """What the schedule says of what the stage holds."""
        return StageMemory(self.in_flight, remat, self.at_once)


def in_pipeline(
    planned: PlannedStage, place: PlaceInPipeline, limit: int, costs: PieceCosts
) -> PlannedStage:
    """A stage's plan with its peak, and with what computing the forward pass again takes."""
    memory, program = place.memory(planned.remat), planned.program
    account, seconds = StageAccount.of(place.graph, program, memory), 0.0
    if planned.remat and place.graph.loop is not None:
        kept = StageAccount.of(place.graph, program, replace(memory, remat=False))
        more = account.loop_seconds(costs) - kept.loop_seconds(costs)
        seconds = more * place.graph.loop.num_microbatches
    worst = account.peak(input_names(place.graph.graph))
    fits = worst.bytes <= limit and hosts_fit(program, costs.pricing.cluster)
    return replace(planned, peak=worst, fits=fits, again_seconds=seconds)


def input_names(graph: Graph) -> dict[Var, str]:
    """The paths of the inputs, by their variables."""
    paths = [label.path for label in graph.inputs]
    return dict(zip(graph.jaxpr.invars, paths, strict=True))
