"""One stage, which may be the whole step, solved and lowered on one logical mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from autopar.base.cluster import Cluster, axis_names
from autopar.base.costs import PICOSECONDS
from autopar.base.methods import LOOP_METHODS
from autopar.base.options import Options
from autopar.passes.pieces.piece_costs import PieceCosts
from autopar.passes.planner.planned_stage import (
    PlaceInPipeline,
    PlannedStage,
    in_pipeline,
    input_names,
)
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.sharding.batch_dims import BatchDims
from autopar.passes.sharding.build import build
from autopar.passes.sharding.compiler_rules import rules_of
from autopar.passes.sharding.folded_hosts import FoldedHosts
from autopar.passes.sharding.host_leaves import host_leaves, hosts_fit
from autopar.passes.sharding.integer_program import counted_rows, to_problem
from autopar.passes.sharding.loop_kinds import loop_kinds
from autopar.passes.sharding.lower import lower
from autopar.passes.sharding.memory_price import MemoryPrices, solve_at_price
from autopar.passes.sharding.memory_rows import MemoryRow, StageMemory, memory_rows, rows_peak
from autopar.passes.sharding.peak_memory import MemoryPeak, peak
from autopar.passes.sharding.pins import resolve_pins
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.restrict import restriction
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.solver import Infeasible, Problem, Solution, TooDear, solve

SOLVER_WORK = 5.0  # deterministic work, about a second each; most stages take a fraction of one
MEMORY_WORK = 1.5  # the same within a limit of memory, for which several problems are solved
ENOUGH_GAP = 1e-3  # of the best cost, where a problem is large
ENOUGH_MEMORY_GAP = 5e-3  # the same where memory may bind; to prove more takes long
LARGE_PROBLEM = 300  # nodes; smaller ones are solved to the end
DEAR = (10.0, 1000.0)  # times a quickest plan's seconds over its bytes: prices of a byte
HOPELESS = 1.5  # times the limit: where plans chosen for their bytes need more, nothing fits
HOPELESS_AS_EXPECTED = 1.05  # the same, where layers say so too
HURRIED_GAP = 2e-3  # what is enough where many problems are solved to choose among them,
HURRIED_WORK = 0.3  # or so much deterministic work
PRICE_STEP, PRICE_POWERS = 4.0, 4  # prices of a byte, around what makes memory cost a step's time
ENOUGH_OF_LARGE = 1.02  # times what a large stage takes with any memory: nothing else is looked at
FAR_TOO_MUCH = 1.1  # times the limit, as rows count bytes
FILLINGS = 4  # how often memory is filled up at one price, each time by what the last one needs
MANY_NODES = 2000  # of an unrolled program
PRICED_WITHIN = 2  # times the limit
MEMORY_TRIES = 4  # how often the limit is tightened when a lowered program exceeds it


def prepare(
    split: SplitStep, mesh: tuple[int, ...], options: Options, cluster: Cluster
) -> tuple[StrategyGraph, Pricing, BatchDims]:
    """The integer program of a split graph on one mesh, its prices, and where the batch is."""
    graph, rules = split.graph, split.rules
    dims = split.dims
    pins = resolve_pins(graph, options.pins, mesh, axis_names(mesh))
    kinds = loop_kinds(graph, rules) if options.method in LOOP_METHODS else None
    hosted = host_leaves(graph, options.offload, dims) if cluster.host_bandwidth else {}
    asked = graph, options.method, dims, mesh, pins, options.reduce_dtype, kinds, hosted
    repeated = split.repeated_dims if options.method == "data" else {}
    allowed = restriction(*asked, repeated, rules_of(cluster.device.name).adds_slices)
    pricing = Pricing(cluster, mesh, allowed.reduce_scatter, split.traffic(cluster.device.name))
    buffers = split.buffers(cluster.device.name, math.prod(mesh))
    return build(split.step, rules, mesh, pricing, allowed, buffers), pricing, dims


Allowed = Sequence[Sequence[int]]
"""For each node, the strategies that it may take."""


@dataclass(frozen=True)
class MeshSearch:
    """One stage on one logical mesh: what is solved again and again with other memory limits."""

    split: SplitStep
    options: Options
    built: StrategyGraph
    pricing: Pricing
    dims: BatchDims
    allowed: Allowed | None
    limit: int
    place: PlaceInPipeline | None
    known: dict[tuple[tuple[int, ...], bool], PlannedStage] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @classmethod
    def of(
        cls,
        split: SplitStep,
        mesh: tuple[int, ...],
        options: Options,
        cluster: Cluster,
        allowed_in: Callable[[StrategyGraph], Allowed] | None,
        place: PlaceInPipeline | None,
    ) -> MeshSearch:
        """The search, with the integer program built."""
        built, pricing, dims = prepare(split, mesh, options, cluster)
        allowed = None if allowed_in is None else allowed_in(built)
        limit = memory_limit_of(options, cluster)
        return cls(split, options, built, pricing, dims, allowed, limit, place)

    def memory(self, remat: bool) -> StageMemory | None:
        """What the schedule says of the stage."""
        return None if self.place is None else self.place.memory(remat)

    def free(self) -> PlannedStage:
        """The cheapest program with any memory.

        Of a large stage that needs far more than there is, the peak is what the rows count.
        """
        found, remat = self.solved(to_problem(self.built, None)), self.remats[0]
        if self.place is not None and self.hurries:
            rows = memory_rows(self.built, self.memory(remat))
            counted = rows_peak(self.built, rows, found.assignment)
            if counted > FAR_TOO_MUCH * self.limit:
                return replace(self.program(found, remat), peak=MemoryPeak(counted, ()))
        return self.lowered(found, remat)

    def attempt(
        self,
        memory: int | None,
        remat: bool,
        *,
        finds_peak: bool = False,
        at_most: float = math.inf,
    ) -> PlannedStage:
        """The cheapest program whose values keep within so many bytes.

        Raises:
          Infeasible: there is none. With `finds_peak` it says the least bytes that would do.
          TooDear: there is none of `at_most` so many seconds.
        """
        rows = None if memory is None else memory_rows(self.built, self.memory(remat))
        problem = to_problem(self.built, memory, rows)
        return self.lowered(self.solved(problem, finds_peak=finds_peak, at_most=at_most), remat)

    def solved(
        self, problem: Problem, *, finds_peak: bool = False, at_most: float = math.inf
    ) -> Solution:
        """The problem's solution among what is allowed; a `TooDear` if none is that quick."""
        limited = problem.usage_limit is not None
        enough = ENOUGH_MEMORY_GAP if limited else ENOUGH_GAP
        work = MEMORY_WORK if limited else SOLVER_WORK
        allowed, time_limit = self.allowed, self.options.solver_time_limit
        folded = FoldedHosts(problem) if allowed else FoldedHosts.of(problem, self.built)
        found = solve(
            folded.problem if allowed is None else problem.restricted(allowed),
            time_limit=time_limit,
            work_limit=None if time_limit else work,
            enough_gap=enough if problem.num_nodes > LARGE_PROBLEM or folded.holders else 0.0,
            seed=self.options.seed,
            finds_peak=finds_peak,
            at_most=None if at_most == math.inf else math.ceil(at_most * PICOSECONDS),
        )
        if allowed is None:
            return folded.unfolded(found)
        assignment = (choices[s] for choices, s in zip(allowed, found.assignment, strict=False))
        return replace(found, assignment=(*assignment, *found.assignment[len(allowed) :]))

    def hurried(self, problem: Problem, work: float = HURRIED_WORK) -> Solution:
        """A good solution among all strategies, soon: after so much work at the latest."""
        folded = FoldedHosts.of(problem, self.built)
        found = solve(folded.problem, work_limit=work, enough_gap=HURRIED_GAP)
        return folded.unfolded(found)

    def lowered(self, solution: Solution, remat: bool) -> PlannedStage:
        """The program of a solution, with its peak; found once."""
        key = solution.assignment, remat
        if key not in self.known:
            self.known[key] = self.checked(self.program(solution, remat))
        return replace(self.known[key], solution=solution)

    def program(self, solution: Solution, remat: bool) -> PlannedStage:
        """The program of a solution; without its peak."""
        assignment, mesh = solution.assignment[: len(self.built.nodes)], self.built.mesh
        program = lower(
            self.split.step, self.built, assignment, self.pricing, axis_names(mesh), self.dims
        )
        nothing = MemoryPeak(0, ())
        return PlannedStage(mesh, self.split, self.built, solution, program, nothing, False, remat)

    def checked(self, planned: PlannedStage) -> PlannedStage:
        """A plan with its peak, and with what computing the forward pass again takes."""
        if self.place is not None:
            costs = PieceCosts(self.pricing, self.split.rules)
            return in_pipeline(planned, self.place, self.limit, costs)
        graph = self.split.graph
        donated = [label.donated for label in graph.inputs]
        memory = self.pricing.cluster.device.program_bytes
        worst = peak(planned.program, input_names(graph), donated, memory)
        fits = worst.bytes <= self.limit and hosts_fit(planned.program, self.pricing.cluster)
        return replace(planned, peak=worst, fits=fits)

    @property
    def is_large(self) -> bool:
        """Whether to look for what is hardly better takes long."""
        return len(self.built.nodes) > LARGE_PROBLEM

    @property
    def hurries(self) -> bool:
        """Whether what is hardly better is not looked for: in a large stage, or beside others."""
        return self.is_large or (self.place is not None and self.place.must_fit)

    @property
    def remats(self) -> Sequence[bool]:
        """Whether the backward pass computes the forward pass again: what may be, in turn."""
        if self.place is None or "B" not in self.place.graph.tasks:
            return (False,)
        if self.options.remat in ("none", "full"):
            return (self.options.remat == "full",)
        return (False,) if self.place.at_once else (False, True)

    def rematerialized(self, planned: PlannedStage) -> PlannedStage:
        """The same program whose backward pass computes the forward pass again."""
        return self.checked(replace(planned, remat=True))

    def tightened(
        self, planned: PlannedStage, tries: int | None = None, at_most: float = math.inf
    ) -> PlannedStage:
        """The cheapest plan that fits, or the one that came nearest in so many tries.

        The integer program's account of memory is a model of the lowered program's: it is corrected
        by what it was wrong by for the last plan.

        Raises:
          TooDear: nothing that fits takes `at_most` so long, before the account is corrected to
            less than the limit. After that it would be a matter of what the last plan was like.
        """
        every = memory_rows(self.built, self.memory(planned.remat))
        rows = counted_rows(self.built, every, self.limit)
        target = self.limit + max(self._excess(planned, rows), 0)
        for _ in range(tries or MEMORY_TRIES * (1 if self.hurries else 2)):
            if planned.fits or target <= 0:
                break
            try:
                planned = self.attempt(target, planned.remat, at_most=at_most)
            except TooDear:
                if target >= self.limit:
                    raise
                break
            except Infeasible:
                break
            target = min(target - self.limit // 100, self.limit + self._excess(planned, rows))
        return planned

    def _excess(self, planned: PlannedStage, rows: Sequence[MemoryRow]) -> int:
        """The bytes that the rows count too many for a plan."""
        return rows_peak(self.built, rows, planned.solution.assignment) - planned.peak.bytes

    def priced(self, price: float, remat: bool) -> PlannedStage:
        """The plan that is best if every byte of a device costs so many seconds."""
        rows = memory_rows(self.built, self.memory(remat))
        return self.lowered(solve_at_price(self.built, rows, price, self.solved), remat)

    def is_better_priced(self, free: PlannedStage) -> bool:
        """Whether prices of a byte find better plans of a whole step than a limit, and sooner.

        So they do of many nodes, unless the cheapest plan needs far more than there is: apart from
        what it gathers for both passes, where weights may be gathered again.
        """
        again = self.split.recomputation
        needed = free.bytes_at_least if again and again.weights else free.peak.bytes
        is_near = needed <= PRICED_WITHIN * self.limit
        return is_near and len(self.built.nodes) > MANY_NODES

    def at_least_price(self, free: PlannedStage, at_most: float = math.inf) -> PlannedStage:
        """The plan at the least price of a byte, of a few, at which it fits; else the dearest.

        Which price that is, the rows' account tells, corrected by what it was wrong by for the last
        plan: only what it says will fit is lowered, with the memory that it leaves filled up by
        parts of the plan at the price before. The cost is proven against that of `free`, which no
        plan within a limit is below.

        Raises:
          TooDear: what the rows say will fit takes more than `at_most` seconds, and longer still at
            a higher price. That is not lowered.
        """
        rows, bound = memory_rows(self.built, self.memory(free.remat)), free.solution.lower_bound
        once, priced = free.step_seconds / max(free.peak.bytes, 1), MemoryPrices(self.built, rows)
        prices = [once * PRICE_STEP**power for power in range(-PRICE_POWERS, PRICE_POWERS)]
        solve_at = self.solved if self.place is None else self.hurried  # a whole step takes more

        def proven(found: Solution) -> Solution:
            gap = 1 - bound / found.cost if found.cost else 0.0
            return replace(found, lower_bound=bound, gap=gap)

        @cache
        def at(place: int) -> tuple[Solution, int]:
            """What is best at a price, and the bytes that the rows count for it."""
            found = priced.solved(prices[place], solve_at) if place >= 0 else free.solution
            return proven(found), rows_peak(self.built, rows, found.assignment)

        low, high, excess = 0, len(prices) - 1, self._excess(free, rows)
        best, dearest = list[PlannedStage](), free
        while low <= high:
            first, last = low, high + 1  # the first price at which it is expected to fit
            if best and at(high)[1] - excess > self.limit:  # as it filled up what fits
                break
            while first < last:
                middle = (first + last) // 2
                fits = at(middle)[1] - excess <= self.limit
                first, last = (first, middle) if fits else (middle + 1, last)
            if first > high and best:
                break
            first = min(first, high)
            own = at(first)[0]
            for number in range(FILLINGS + 1):
                filled = own
                if number < FILLINGS:
                    filled = priced.filled(own, at(first - 1)[0], self.limit + excess)
                is_dear = not best and filled.cost > at_most * PICOSECONDS
                if is_dear and at(first)[1] - excess <= self.limit:
                    raise TooDear(filled.cost, math.ceil(at_most * PICOSECONDS))
                tried = self.lowered(proven(filled), free.remat)
                excess = self._excess(tried, rows)
                if tried.fits or filled.assignment == own.assignment:
                    break
            if tried.fits:
                best, high = [*best, tried], first - 1
                if self.is_large and tried.solution.gap <= ENOUGH_MEMORY_GAP:
                    break
            else:
                dearest, low = tried, first + 1
        return min(best, key=lambda x: x.step_seconds, default=dearest)

    def small(self, free: PlannedStage) -> list[PlannedStage]:
        """Plans chosen for their bytes more than for their time, which `free` was chosen for."""
        return [self.dear(free, number) for number in range(len(DEAR))]

    def dear(self, free: PlannedStage, number: int) -> PlannedStage:
        """One of them."""
        price = DEAR[number] * free.step_seconds / max(free.peak.bytes, 1)
        return self.priced(price, free.remat)

    def smaller_than(self, planned: PlannedStage) -> PlannedStage:
        """The plan that needs least, if that is less than one does that does not fit."""
        best = min([planned, *self.least(planned.remat)], key=lambda x: x.peak.bytes)
        first = planned.unlimited or planned
        return planned if best is planned else replace(best.proven_by(first), unlimited=first)

    def least(self, remat: bool) -> list[PlannedStage]:
        """The plan with the smallest memory limit that the solver can satisfy, if it finds one."""
        try:
            return [self.attempt(1, remat, finds_peak=True)]
        except Infeasible as error:
            return (
                [] if error.smallest_usage is None else [self.attempt(error.smallest_usage, remat)]
            )


def memory_limit_of(options: Options, cluster: Cluster) -> int:
    """Bytes that one device may hold: what the user allows, else what the device has."""
    return options.memory_limit or cluster.device.program_bytes
