"""What is tried for one graph: layouts, numbers of microbatches, padding, automatic pipelines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.base.cluster import Cluster
from autopar.base.errors import (
    BatchArgumentError,
    InexactMicrobatchError,
    PlanMismatchError,
)
from autopar.base.methods import WHOLE_PARAMETERS
from autopar.base.options import Options
from autopar.base.plan_records import OutputCertificate, Recomputation
from autopar.passes import microbatch
from autopar.passes.graph.casts_after import with_casts_after
from autopar.passes.graph.casts_ahead import with_casts_ahead
from autopar.passes.graph.graph import Graph, batch_sizes
from autopar.passes.graph.microbatched import in_phases
from autopar.passes.planner.asked_loops import with_asked_loops
from autopar.passes.planner.auto_stages import StageSearch
from autopar.passes.planner.candidates import Keep, PlannedStep, Report, plan_layout, quickest
from autopar.passes.planner.layouts import (
    StageLayout,
    largest_count,
    logical_meshes,
    microbatch_counts,
)
from autopar.passes.planner.least_memory import too_few
from autopar.passes.planner.mesh_choice import SearchSoFar
from autopar.passes.planner.recomputing import recomputed_step
from autopar.passes.planner.rewritings import (
    AS_WRITTEN,
    Rewriting,
    check_splits,
    rewritten_steps,
)
from autopar.passes.planner.stage_shardings import SplitStep, memory_limit_of
from autopar.passes.planner.unit_costs import UnitCosts, units_of
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.populate import populate
from autopar.passes.recompute.override import without_checkpoints
from autopar.passes.sharding.compiler_rules import rules_of
from autopar.passes.sharding.restrict import check_batch
from autopar.plans.plan import Plan

LONG_PROGRAM = 4000  # equations; what is found out of its layers first saves planning it whole
ONE_MESH_MARGIN = 1.02  # times what fits elsewhere: more than the layers of one mesh must take
ONE_BATCH_MARGIN = 1.25  # the same without microbatches
STAGES_TRIED = 4  # how often the search for stages is given less memory, when they do not fit
ENOUGH = 1.05  # times the least time that is expected with any number of microbatches
WORTH_PRICING = 1.05  # times what more microbatches may take: with less, they are not looked at,
WORTH_PLANNING = 1.02  # or not planned
WORTH_TRYING = 1.2  # times what the search promises: with less, stages are not planned


@dataclass(frozen=True)
class LayoutSearch:
    """What is tried for one graph; `best_seconds` is what a step takes that fits elsewhere."""

    graph: Graph
    rules: Rules
    options: Options
    cluster: Cluster
    report: Report
    rewriting: Rewriting = AS_WRITTEN
    keep: Keep = lambda candidates: None
    best_seconds: float = math.inf

    @classmethod
    def of(cls, graph: Graph, options: Options, cluster: Cluster, report: Report) -> LayoutSearch:
        """The search for a traced step; where parameters may be stored cut, they are cast so."""
        if options.remat == "override":
            graph = without_checkpoints(graph)
        if not options.methods.issubset(WHOLE_PARAMETERS):
            graph = with_casts_ahead(graph)
        if rules_of(cluster.device.name).gathers_read_buffers:
            graph = with_casts_after(graph)
        rules = populate(graph.jaxpr)
        graph = with_asked_loops(graph, rules, options, cluster)
        return cls(graph, rules, options, cluster, report)

    @property
    def is_long(self) -> bool:
        """Whether the program has so many layers that these are planned first."""
        return len(self.graph.jaxpr.eqns) >= LONG_PROGRAM

    def within(self, options: Options, cluster: Cluster) -> LayoutSearch:
        """The same search with other options and another cluster, silent."""
        return replace(self, options=options, cluster=cluster, report=lambda message: None)

    def rewritten(self) -> Iterator[LayoutSearch]:
        """Searches for other programs of the same step."""
        for found in rewritten_steps(self.graph, self.rules, self.options, self.cluster):
            self.report(str(found))
            rules = populate(found.graph.jaxpr)
            yield replace(self, graph=found.graph, rules=rules, rewriting=found.rewriting)

    def following(self, plan: Plan) -> LayoutSearch:
        """The search for the program that a plan was made for.

        Raises:
          PlanMismatchError: it would be rewritten otherwise now.
        """
        wanted = Rewriting(plan.padding, plan.expert_blocks)
        searches = itertools.chain([self], self.rewritten())
        found = next((search for search in searches if search.rewriting == wanted), None)
        if found is None:
            raise PlanMismatchError(
                f"The plan is for the program with {wanted}, and this one is not written so.",
                why="it was made by another version of autopar.",
                hint="plan again.",
            )
        return found

    def split(
        self,
        count: int,
        is_pipeline: bool = False,
        keeps: bool = False,
        again: Recomputation | None = None,
    ) -> SplitStep:
        """The step in this number of microbatches; for a pipeline, with one loop, also for one.

        Later loops read what is kept, or compute it again; the backward pass does as `again` says.
        """
        graph, options = self.graph, self.options
        if not is_pipeline and (again is not None or options.remat == "full"):
            return recomputed_step(self.split(count, True), self.cluster, again)
        if count == 1:
            whole = tuple(OutputCertificate(label.path, "whole batch") for label in graph.outputs)
            if not is_pipeline:
                return SplitStep(in_phases(graph), self.rules, whole, rewriting=self.rewriting)
            step = microbatch.in_one_microbatch(graph, self.rules)
            rules = populate(step.graph.jaxpr)
            return SplitStep(step, rules, whole, rewriting=self.rewriting)
        check_splits(self.rewriting, count)
        self.report(f"splitting the batch into {count} microbatches")
        analyze = microbatch.analyze_one_loop if is_pipeline else microbatch.analyze
        analysis = analyze(
            graph,
            self.rules,
            count,
            max_flops_share=options.max_flops_share,
            max_bytes_share=options.max_bytes_share,
            keeps=keeps,
        )
        step = microbatch.split(graph, analysis)
        rules, later = populate(step.graph.jaxpr), ""
        if len(step.loops) > 1:
            later = "keep" if keeps else "recompute"
        return SplitStep(step, rules, analysis.certificate, count, self.rewriting, later)

    def candidates(
        self,
        layout: StageLayout,
        *,
        optional: bool = False,
        bounded: bool = True,
        at_least: int = 1,
    ) -> tuple[list[PlannedStep], str]:
        """Plans with a layout, with more microbatches while nothing fits; and why not with more.

        If they are `optional`, there may be none. `at_least` so many microbatches are tried. If
        `bounded`, numbers that cannot fit one mesh are passed over, but for the last.
        """
        made: list[PlannedStep] = []
        options, cluster = self.options, self.cluster

        def planned(split: SplitStep, others: SearchSoFar) -> list[PlannedStep]:
            return plan_layout(split, layout, options, cluster, self.report, self.keep, others)

        so_far, last = SearchSoFar(self.best_seconds), None
        counts = [
            count for count in microbatch_counts(self.graph, options, layout) if count >= at_least
        ]
        passed = self._too_few(counts) if bounded and not layout.is_pipeline else []
        for count in counts[len(passed) :]:
            try:
                if not layout.is_pipeline:
                    for mesh in logical_meshes(options, cluster, self.graph, of_stage=False):
                        check_batch(self.graph, options.method, mesh, count)
                split = self.split(count, layout.is_pipeline)
            except (InexactMicrobatchError, BatchArgumentError) as error:
                whole = layout.is_pipeline and options.microbatches == "auto" and not optional
                if not made and whole and isinstance(error, InexactMicrobatchError):
                    return planned(self.split(1, is_pipeline=True), so_far), error.what
                if passed:  # says what they would need
                    return self.candidates(layout, optional=optional, bounded=False)
                if not made and not optional:
                    raise
                if last is not None and not layout.is_pipeline:  # all that may fit with so many
                    made += planned(last, so_far)
                return made, f"{count} microbatches are not possible: {error.what}"
            if split.later_loops and len(passed) > 1:
                # The bound is that of one loop over the microbatches.
                return self.candidates(layout, optional=optional, bounded=False)
            more = count != counts[-1] and not split.later_loops
            made += planned(split, so_far._replace(more_microbatches=more))
            if split.later_loops:
                made += planned(self.split(count, keeps=True), so_far)
            last = split if more else None
            if any(candidate.fits for candidate in made) or self.are_slower(made):
                break
        return made, ""

    def fewest_on_one_mesh(self, layout: StageLayout) -> int | None:
        """The microbatches with which one mesh may fit and be quicker than what fits elsewhere.

        None: with no number of them. Of a long program that is told by its layers, planned alone
        with prices of memory; from one number that does not fit to the first that may. Where layers
        meet better than each has it alone, a whole plan takes less, hence the margin; the whole
        batch at once has no gradients to add up, hence a larger one. More microbatches only take
        longer.
        """
        counts = list(microbatch_counts(self.graph, self.options, layout))
        if not self.is_long or math.isinf(self.best_seconds):
            return counts[0]
        limit = memory_limit_of(self.options, self.cluster)
        counts = counts[min(len(self._too_few(counts)), len(counts) - 1) :]
        while counts:
            count = counts[0]
            try:
                units = units_of(self.split(count, is_pipeline=True), self.report)
            except (InexactMicrobatchError, BatchArgumentError):
                return count
            if units is None:
                return count
            self.report("costs of layers on one mesh")
            costs = UnitCosts(units, self.options, self.cluster, count)
            margin = ONE_MESH_MARGIN if count > 1 else ONE_BATCH_MARGIN
            if costs.least_seconds(self.cluster.num_devices) > margin * self.best_seconds:
                return None
            totals = costs.totals(self.cluster.num_devices)
            fitting = [total for total in totals if total.bytes_for_one <= limit]
            if fitting:
                least = min(count * total.seconds + total.once_seconds for total in fitting)
                return count if least <= margin * self.best_seconds else None
            counts = [
                more
                for more in counts[1:]
                if any(total.with_rows(count / more).bytes_for_one <= limit for total in totals)
            ]
        return None

    def are_slower(self, candidates: Sequence[PlannedStep]) -> bool:
        """Whether these, on one mesh, take longer than what fits elsewhere with any memory.

        More microbatches or values that are computed again would only take longer still.
        """
        least = [c.planned[0].least_seconds for c in candidates if not c.is_pipeline]
        return bool(least) and min(least) > self.best_seconds

    def _too_few(self, counts: Sequence[int]) -> list[int]:
        """The first of these numbers of microbatches with which no plan for one mesh can fit."""
        meshes = logical_meshes(self.options, self.cluster, self.graph, of_stage=False)
        devices, limit = max(map(math.prod, meshes)), memory_limit_of(self.options, self.cluster)
        device = self.cluster.device.name
        return too_few(self.graph, self.rules, device, counts, devices, limit, self.report)

    def automatic_pipelines(self) -> list[PlannedStep]:
        """Pipelines whose stages the dynamic program chooses; none where one mesh is best.

        With the microbatches that are asked, else with about four for each node (at least eight),
        and with more where nothing fits, or where less of a bubble pays. A long program begins with
        a number in the middle, which tells most about the others.
        """
        options, sizes = self.options, batch_sizes(self.graph)
        asked, enough = options.microbatches, max(8, 4 * self.cluster.num_nodes)
        limit = memory_limit_of(options, self.cluster)
        if options.logical_mesh is not None or not sizes:
            return []
        counts: Sequence[int] = [*_doubled(sizes, enough)] if asked == "auto" else [int(asked)]
        if self.is_long:
            counts = [counts[len(counts) // 2], *counts]
        made, promised = list[PlannedStep](), math.inf
        while counts and counts[0] >= 2:
            try:
                split = self.split(counts[0], is_pipeline=True)
            except (InexactMicrobatchError, BatchArgumentError):
                counts = [count for count in counts if count < counts[0]]
                continue
            stages = StageSearch.of(split, options, self.cluster, self.report)
            if stages is None:
                break
            first = stages.within(limit)
            if first is not None and first[1] * WORTH_PLANNING < promised:
                planned = self._within(stages, split)
                made += planned
                if any(candidate.fits for candidate in planned):
                    promised = first[1]
            left = [count for count in counts if count != split.num_microbatches]
            expected = math.inf if first is None else first[1]
            counts = _worth_trying(stages, left, limit, expected, promised)
        return made

    def _within(self, stages: StageSearch, split: SplitStep) -> list[PlannedStep]:
        """Pipelines of the stages that are found, with less and less memory.

        The search adds up what layers need, which is not all: until a pipeline fits, or one that
        fits takes about as long as the search takes the next one to do at the least.
        """
        made: list[PlannedStep] = []
        limit = target = memory_limit_of(self.options, self.cluster)
        for _ in range(STAGES_TRIED):
            found = stages.within(target)
            if found is None or found[1] * WORTH_TRYING > seconds_of_best(made):
                break
            layout, options, cluster = found[0], self.options, self.cluster
            planned = plan_layout(split, layout, options, cluster, self.report, self.keep)
            made += planned
            if all(candidate.fits for candidate in planned):
                break
            most = max(max(candidate.peak_bytes) for candidate in planned)
            target -= max(most - limit, limit // 50)
        return made


def _worth_trying(
    stages: StageSearch, counts: Sequence[int], limit: int, expected: float, promised: float
) -> Sequence[int]:
    """What is left to try, first the fewest microbatches that may fit and are as good as any.

    None where that is hardly less than what is `promised` of the best that is known. From the
    number that stages are known for, with which they are `expected` to take so long, it is looked
    both ways while numbers get better or are about as good: with fewer, stages wait longer for each
    other and need more memory, with more, they start more often what takes as long for few rows.
    """
    own, best = stages.num_microbatches, expected
    seconds: dict[int, float] = {}
    for count in sorted((count for count in counts if count < own), reverse=True):
        choice = stages.with_microbatches(count).within(limit)
        if choice is None:
            break
        seconds[count] = choice[1]
        best = min(best, choice[1])
        if choice[1] > ENOUGH * best:
            break
    for count in sorted(count for count in counts if count > own):
        choice = stages.with_microbatches(count).within(limit)
        if choice is None:
            continue
        seconds[count] = choice[1]
        if choice[1] > ENOUGH * best:
            break
        best = min(best, choice[1])
    best = min(seconds.values(), default=math.inf)
    if best * WORTH_PRICING > promised:
        return []
    good = [count for count, each in sorted(seconds.items()) if each <= ENOUGH * best]
    return [*good, *(count for count in counts if count not in good)] if good else []


def _doubled(sizes: set[int], enough: int) -> Iterator[int]:
    """Numbers of microbatches from one that is enough, as far as the batch divides."""
    count = largest_count(sizes, enough)
    yield count
    while largest_count(sizes, 2 * count) > count:
        count *= 2
        yield count


def seconds_of_best(candidates: Sequence[PlannedStep]) -> float:
    """What a step takes with the quickest that fits; infinite without any."""
    best = quickest(candidates)
    return math.inf if best is None else best.step_seconds
