"""The map of the compiler: the passes in the order in which a train step flows through them.

`compile_graph` takes a traced graph (`autopar.passes.trace`) and returns the plan and what the
meshes run. Each pass is a function from values to values:

    graph      = with_casts_ahead(graph)           parameters are narrowed before they are gathered
    rules      = populate(jaxpr)                   what each equation's dimensions have in common
    graph      = padded_graph(graph, rules, dims)  tried beside it: loops that devices do not divide
    graph      = in_blocks(graph, blocks)          tried beside it: experts on devices of their own
    step       = microbatch.split(graph, analysis) prologue, loop over microbatches, epilogue

For each layout (how many stages, on how many devices) and number of microbatches that is tried:

    stages     = slice_stages(step, rules, ...)    a step in phases for each stage; one: as it is
    built      = build(step, rules, mesh, ...)    nodes, strategies and costs on one logical mesh
    assignment = solve(to_problem(built))          the integer program
    program    = lower(graph, built, assignment)   instructions and collectives for every device
    pieces     = cut(stages, programs)             the functions that a schedule's tasks run
    program    = emit(schedule, pieces)            one list of instructions per mesh
    timeline   = simulate(program, costs)          what a step is expected to take

Then one candidate is chosen and written down as a `Plan`. A plan for one mesh is a pipeline of one
stage whose one piece is the whole step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.base.cluster import Cluster
from autopar.base.errors import (
    AutoparError,
    BatchArgumentError,
    InexactMicrobatchError,
    PlanMismatchError,
)
from autopar.base.methods import WHOLE_PARAMETERS
from autopar.base.options import Options
from autopar.base.plan_edits import edited_parts
from autopar.base.plan_records import OutputCertificate, Recomputation
from autopar.passes import microbatch
from autopar.passes.graph.casts_ahead import with_casts_ahead
from autopar.passes.graph.graph import Graph, batch_sizes, fingerprint
from autopar.passes.graph.microbatched import in_phases
from autopar.passes.pieces.pieces import Runnable
from autopar.passes.planner.asked_loops import with_asked_loops
from autopar.passes.planner.auto_stages import stage_layouts
from autopar.passes.planner.candidates import Keep, PlannedStep, Report, plan_layout, quickest
from autopar.passes.planner.edited_plans import follow_edited, with_pins_of
from autopar.passes.planner.following import counts_like, follow_plan, plan_like
from autopar.passes.planner.layouts import (
    StageLayout,
    asked_layout,
    largest_count,
    logical_meshes,
    microbatch_counts,
)
from autopar.passes.planner.least_memory import too_few
from autopar.passes.planner.model_flops import model_flops
from autopar.passes.planner.plan_writer import leaf_types, write_plan
from autopar.passes.planner.recomputing import recomputed_plans, recomputed_step
from autopar.passes.planner.refusals import out_of_memory
from autopar.passes.planner.remedies import SECONDS, remedies
from autopar.passes.planner.rewritings import (
    AS_WRITTEN,
    Rewriting,
    check_splits,
    rewritten_steps,
)
from autopar.passes.planner.stage_shardings import SplitStep, memory_limit_of
from autopar.passes.planner.watch import PlanningTimeOutError, PlanningWatch
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.populate import populate
from autopar.passes.recompute.override import without_checkpoints
from autopar.passes.sharding.constraint_axes import warn_of_lost
from autopar.passes.sharding.pins import check_pins
from autopar.passes.sharding.restrict import check_batch
from autopar.plans.plan import Plan

STAGES_TRIED = 4  # how often the search for stages is given less memory, when they do not fit


@dataclass(frozen=True)
class Compiled:
    """A plan, what its meshes run, and the (microbatched) graph that they evaluate."""

    plan: Plan
    runnable: Runnable
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
      plan: one made for the same program and options; nothing is solved then, unless it was
        edited: what is written in it holds.
      report: takes a line of progress.

    Raises:
      InexactMicrobatchError: the asked number of microbatches would change the step's numbers.
      MemoryLimitError: nothing fits; says the least memory that would do.
      PinError, OptionError, BatchArgumentError: a request that cannot be met.
      PlanMismatchError: `plan` is for another program, other options or another version.
    """
    program_hash = fingerprint(graph.jaxpr)
    report(f"finding the sharding rules of {len(graph.jaxpr.eqns)} equations")
    search = _LayoutSearch.of(graph, options, cluster, report)
    options = options if plan is None else with_pins_of(plan, options)
    check_pins(graph, options.pins)
    if plan is not None:
        asked = options.to_dict()
        plan.require(program_hash=program_hash, options=asked, leaves=leaf_types(graph))
        is_pipeline = len(plan.stages) > 1
        keeps, again = plan.later_loops == "keep", plan.recomputation
        split = search.following(plan).split(plan.num_microbatches, is_pipeline, keeps, again)
        if edited_parts(plan):
            found, options = follow_edited(plan, split, options, report)
            cluster, reason = Cluster.from_dict(plan.cluster), plan.reason_for_microbatches
            if not found.fits:
                raise out_of_memory([found], options, cluster, "the plan was edited")
            flops = model_flops(search.graph.jaxpr, search.rules)
            plan = write_plan(found, [found], program_hash, options, cluster, flops, reason)
            return Compiled(plan, found.runnable, found.split.graph)
        return Compiled(plan, follow_plan(plan, split, options), split.graph)
    needed = model_flops(search.graph.jaxpr, search.rules)
    watch = PlanningWatch(report, options.planning_time_limit)
    interrupted = False
    try:
        candidates, reason = _all_candidates(replace(search, report=watch.report, keep=watch.keep))
    except (KeyboardInterrupt, PlanningTimeOutError):
        if not watch.kept:
            raise
        candidates, reason, interrupted = watch.kept, "", True
    chosen = quickest(candidates)
    if chosen is None:
        others = remedies(search, _LayoutSearch.within, candidates, watch.left(SECONDS))
        raise out_of_memory(candidates, options, cluster, reason, others)
    meshes = [planned.mesh for planned in chosen.planned]
    warn_of_lost(zip((x.graph.jaxpr for x in chosen.stages.graphs), meshes, strict=True))
    made = write_plan(chosen, candidates, program_hash, options, cluster, needed)
    return Compiled(replace(made, interrupted=interrupted), chosen.runnable, chosen.split.graph)


def _all_candidates(search: _LayoutSearch) -> tuple[list[PlannedStep], str]:
    """Everything that is tried, and why not more microbatches."""
    options, cluster = search.options, search.cluster
    layout = asked_layout(options, cluster)
    try:
        candidates, reason = search.candidates(layout)
    except BatchArgumentError:
        # The devices of one mesh are too many for a microbatch; a stage has fewer.
        candidates = search.automatic_pipelines() if options.stages == "auto" else []
        if not candidates:
            raise
        return candidates, ""
    for other in search.rewritten():
        best = quickest(candidates)
        candidates += other.candidates(layout, optional=True)[0]
        search = search if quickest(candidates) is best else other
    fits = any(candidate.fits for candidate in candidates)
    if not fits and options.remat in ("auto", "override") and not layout.is_pipeline:
        made = recomputed_plans(search.graph, search.split, layout, options, cluster, search.report)
        search.keep(made)
        candidates += made
        fits = any(candidate.fits for candidate in candidates)
    if options.stages == "auto" and (cluster.num_nodes > 1 or not fits):
        candidates += search.automatic_pipelines()
    return candidates, reason


def compile_like(
    graph: Graph,
    options: Options,
    cluster: Cluster,
    plan: Plan,
    rows: int,
    report: Report = lambda message: None,
) -> Compiled | None:
    """Follow a plan of the same program for a larger batch; None where its decisions do not fit.

    The state is stored as in that plan, so that both programs can take turns with it. Where the
    batch does not divide among the devices as there, what cannot be cut is computed whole.

    Args:
      graph: the step, traced for a smaller batch.
      options: those of the plan.
      cluster: its devices.
      plan: the known plan.
      rows: the size of its batch.
      report: takes a line of progress.
    """
    options = with_pins_of(plan, options)
    search = _LayoutSearch.of(graph, options, cluster, report)
    try:
        search = search.following(plan)
    except PlanMismatchError:
        return None
    sizes = batch_sizes(graph)
    for count in counts_like(plan, rows, sizes, options):
        try:
            keeps, again = plan.later_loops == "keep", plan.recomputation
            split = search.split(count, len(plan.stages) > 1, keeps, again)
            found = plan_like(plan, split, options, cluster, report)
        except AutoparError:
            continue
        if found.fits:
            followed = f"follows the plan for {rows} examples"
            digest, needed = fingerprint(graph.jaxpr), model_flops(search.graph.jaxpr, search.rules)
            made = write_plan(found, [found], digest, options, cluster, needed, followed)
            return Compiled(made, found.runnable, found.split.graph)
    return None


@dataclass(frozen=True)
class _LayoutSearch:
    """What is tried for one graph."""

    graph: Graph
    rules: Rules
    options: Options
    cluster: Cluster
    report: Report
    rewriting: Rewriting = AS_WRITTEN
    keep: Keep = lambda candidates: None

    @classmethod
    def of(cls, graph: Graph, options: Options, cluster: Cluster, report: Report) -> _LayoutSearch:
        """The search for a traced step; where parameters may be stored cut, they are cast so."""
        if options.remat == "override":
            graph = without_checkpoints(graph)
        if not options.methods.issubset(WHOLE_PARAMETERS):
            graph = with_casts_ahead(graph)
        rules = populate(graph.jaxpr)
        graph = with_asked_loops(graph, rules, options, cluster)
        return cls(graph, rules, options, cluster, report)

    def within(self, options: Options, cluster: Cluster) -> _LayoutSearch:
        """The same search with other options and another cluster, silent."""
        return replace(self, options=options, cluster=cluster, report=lambda message: None)

    def rewritten(self) -> Iterator[_LayoutSearch]:
        """Searches for other programs of the same step."""
        for found in rewritten_steps(self.graph, self.rules, self.options, self.cluster):
            self.report(str(found))
            rules = populate(found.graph.jaxpr)
            yield replace(self, graph=found.graph, rules=rules, rewriting=found.rewriting)

    def following(self, plan: Plan) -> _LayoutSearch:
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
        self, layout: StageLayout, *, optional: bool = False, bounded: bool = True
    ) -> tuple[list[PlannedStep], str]:
        """Plans with a layout, with more microbatches while nothing fits; and why not with more.

        If they are `optional`, there may be none. If `bounded`, numbers of microbatches that cannot
        fit one mesh are passed over, but for the last.
        """
        made: list[PlannedStep] = []
        options, cluster = self.options, self.cluster
        counts = list(microbatch_counts(self.graph, options, layout))
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
                    split = self.split(1, is_pipeline=True)
                    made = plan_layout(split, layout, options, cluster, self.report, self.keep)
                    return made, error.what
                if passed:  # says what they would need
                    return self.candidates(layout, optional=optional, bounded=False)
                if not made and not optional:
                    raise
                return made, f"{count} microbatches are not possible: {error.what}"
            if split.later_loops and len(passed) > 1:
                # The bound is that of one loop over the microbatches.
                return self.candidates(layout, optional=optional, bounded=False)
            made += plan_layout(split, layout, options, cluster, self.report, self.keep)
            if split.later_loops:
                kept = self.split(count, keeps=True)
                made += plan_layout(kept, layout, options, cluster, self.report, self.keep)
            if any(candidate.fits for candidate in made):
                break
        return made, ""

    def _too_few(self, counts: Sequence[int]) -> list[int]:
        """The first of these numbers of microbatches with which no plan for one mesh can fit."""
        meshes = logical_meshes(self.options, self.cluster, self.graph, of_stage=False)
        devices, limit = max(map(math.prod, meshes)), memory_limit_of(self.options, self.cluster)
        return too_few(self.graph, self.rules, counts, devices, limit, self.report)

    def automatic_pipelines(self) -> list[PlannedStep]:
        """Pipelines whose stages the dynamic program chooses; none where one mesh is best.

        With the microbatches that are asked, else with about four for each node (at least eight).
        """
        options, sizes = self.options, batch_sizes(self.graph)
        asked, enough = options.microbatches, max(8, 4 * self.cluster.num_nodes)
        count = largest_count(sizes, enough) if asked == "auto" else int(asked)
        if count < 2 or options.logical_mesh is not None or not sizes:
            return []
        try:
            split = self.split(count, is_pipeline=True)
        except (InexactMicrobatchError, BatchArgumentError):
            return []
        layout_within = stage_layouts(split, options, self.cluster, self.report)
        made: list[PlannedStep] = []
        limit = target = memory_limit_of(options, self.cluster)
        for _ in range(STAGES_TRIED):  # the search adds up what layers need, which is not all
            layout = layout_within(target)
            if layout is None:
                break
            found = plan_layout(split, layout, options, self.cluster, self.report, self.keep)
            made += found
            if any(candidate.fits for candidate in found):
                break
            least = min(max(candidate.peak_bytes) for candidate in found)
            target -= max(least - limit, limit // 100)
        return made
