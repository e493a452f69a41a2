"""The map of the compiler: the passes in the order in which a train step flows through them.

`compile_graph` takes a traced graph (`autopar.passes.trace`) and returns the plan and what the
meshes run. Each pass is a function from values to values:

    graph      = by_example(graph)                 rows sorted by expert are sorted for each example
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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.base.cluster import Cluster
from autopar.base.errors import (
    AutoparError,
    AutoparWarning,
    BatchArgumentError,
    PlanMismatchError,
)
from autopar.base.methods import BATCH_METHODS
from autopar.base.options import Options
from autopar.base.plan_edits import check_edits, edited_parts
from autopar.base.rare_collections import rare_collections
from autopar.base.units import format_examples
from autopar.base.user_code import warn_at_call
from autopar.passes.graph.fingerprint import fingerprint
from autopar.passes.graph.graph import Graph, batch_sizes
from autopar.passes.pieces.pieces import Runnable
from autopar.passes.planner.candidates import PlannedStep, Report, quickest
from autopar.passes.planner.edited_plans import (
    follow_edited,
    with_pins_of,
    with_plain_pins,
)
from autopar.passes.planner.even_shares import warn_of_stages, with_even_shares
from autopar.passes.planner.even_stages import even_pipelines
from autopar.passes.planner.fewer_microbatches import automatic_stages, with_fewer_microbatches
from autopar.passes.planner.following import counts_like, follow_plan, plan_like
from autopar.passes.planner.hopeless import hopeless_plans
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.layouts import StageLayout, asked_layout, microbatch_counts
from autopar.passes.planner.least_memory import state_on_devices
from autopar.passes.planner.model_flops import model_flops
from autopar.passes.planner.one_mesh import OneMeshBound, largest_even
from autopar.passes.planner.plan_writer import leaf_types, write_plan
from autopar.passes.planner.recomputing import recomputed_plans
from autopar.passes.planner.refusals import out_of_memory, state_bytes
from autopar.passes.planner.remedies import SECONDS, remedies
from autopar.passes.planner.stage_shardings import HOPELESS_AS_EXPECTED, memory_limit_of
from autopar.passes.planner.stages_within import seconds_of_best
from autopar.passes.planner.step_lines import warn_of_lines
from autopar.passes.planner.watch import PlanningTimeOutError, PlanningWatch
from autopar.passes.sharding.constraint_axes import warn_of_lost
from autopar.passes.sharding.host_leaves import check_offload
from autopar.passes.sharding.pins import check_pins
from autopar.plans.plan import Plan

ROOM = 2  # times the memory that the whole batch needs at the least: it may fit at once
MUCH_ROOM = 4  # the same: it fits at once, mostly
TRIED_FIRST = 3  # numbers of microbatches of a short program, before its stages
NEARLY_EVEN = 1.1  # times an even share of the state: what is cut so is cut as much as it can be


@dataclass(frozen=True)
class Compiled:
    """A plan, what its meshes run, and the (microbatched) graph that they evaluate."""

    plan: Plan
    runnable: Runnable
    graph: Graph


@rare_collections()
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
    search = LayoutSearch.of(graph, options, cluster, report)
    if plan is not None:
        plan = with_plain_pins(plan)
        options = with_pins_of(plan, options)
    check_pins(graph, options.pins)
    check_offload(graph, options.offload, cluster)
    if plan is not None:
        asked = options.to_dict()
        check_edits(plan)
        plan.require(program_hash=program_hash, options=asked, leaves=leaf_types(graph))
        is_pipeline = len(plan.stages) > 1
        later_loops, again = plan.later_loops or "recompute", plan.recomputation
        split = search.following(plan).split(plan.num_microbatches, is_pipeline, later_loops, again)
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
        others = remedies(search, LayoutSearch.within, candidates, watch.left(SECONDS))
        raise out_of_memory(candidates, options, cluster, reason, others)
    meshes = [planned.mesh for planned in chosen.planned]
    warn_of_stages(chosen, search.graph, options, cluster)
    warn_of_lost(zip((x.graph.jaxpr for x in chosen.stages.graphs), meshes, strict=True))
    made = write_plan(chosen, candidates, program_hash, options, cluster, needed)
    warn_of_lines(made.lines)
    if options.offload == "optimizer" and made.host is None:
        warn_at_call(
            "offload='optimizer' puts nothing into the hosts' memory: the state has no large array "
            "that only the optimizer reads. A pattern of paths says what else shall lie there.",
            AutoparWarning,
        )
    return Compiled(replace(made, interrupted=interrupted), chosen.runnable, chosen.split.graph)


def _all_candidates(search: LayoutSearch) -> tuple[list[PlannedStep], str]:
    """Everything that is tried, and why not more microbatches.

    Where memory binds, with what may lie in the hosts' memory as well.
    """
    if search.options.offload != "auto" or not search.cluster.host_bandwidth:
        return _candidates(search)
    options = replace(search.options, offload="none")
    without = replace(search.within(options, search.cluster), report=search.report)
    found, reason = _candidates(without)
    if all(c.fits and all(p.unlimited is None for p in c.planned) for c in found):
        return found, reason
    search.report("putting state into the hosts' memory")
    search = replace(search, best_seconds=seconds_of_best(found))
    more, other_reason = _candidates(search)
    return found + more, reason if quickest(found) else other_reason


def _candidates(search: LayoutSearch) -> tuple[list[PlannedStep], str]:
    """Everything that is tried with these options, and why not more microbatches."""
    options, cluster = search.options, search.cluster
    layout = asked_layout(options, cluster)
    pipelines: list[PlannedStep] = []
    fewest = 1
    again: tuple[tuple[int, ...], ...] = ()
    stages_first = cluster.num_nodes > 1 or search.is_long
    if small := hopeless_plans(search, layout):
        return small, ""
    first = one_mesh_first(search, layout) if options.stages == "auto" else None
    if first is not None:
        search = replace(search, best_seconds=seconds_of_best(first[0]))
        stages_first &= not _is_of_one_axis(search)
    if options.stages == "auto" and stages_first:
        pipelines = automatic_stages(search)
        if cluster.num_nodes > 1:
            known = min(search.best_seconds, seconds_of_best(pipelines))
            tried = [*search.known.misfits, *pipelines]
            pipelines += even_pipelines(replace(search, best_seconds=known), tried)
    if first is None:
        known = min(search.best_seconds, seconds_of_best(pipelines))
        search = replace(search, best_seconds=known)
        bound = OneMeshBound(1) if layout.is_pipeline else search.bound_on_one_mesh(layout)
        if bound is None:
            return pipelines, ""
        search, again = replace(search, only=bound.only), bound.only_again
        try:
            first = search.candidates(layout, at_least=bound.fewest, expected=bound.expected)
            if bound.hoped and not _are_refuted(first[0], search):
                search = replace(search, only=())
                first[0].extend(search.candidates(layout, at_least=bound.hoped)[0])
            fewest = min([bound.fewest, *(x.split.num_microbatches for x in first[0])])
        except BatchArgumentError:
            # The devices of one mesh are too many for a microbatch; a stage has fewer.
            if options.stages == "auto" and not stages_first:
                pipelines = search.automatic_pipelines()
            pipelines = with_even_shares(pipelines, search.graph, options.method)
            if not pipelines:
                raise
            return pipelines, ""
    candidates, reason = first
    if layout.is_pipeline:
        candidates += with_fewer_microbatches(
            search, candidates, lambda fewer: fewer.candidates(layout, optional=True)[0]
        )
    refuted = _are_refuted(candidates, search)
    refuted = refuted and any(_is_cut_evenly(candidate, search) for candidate in candidates)
    for other in () if refuted else search.rewritten():
        best = quickest(candidates)
        candidates += other.candidates(layout, optional=True, at_least=fewest)[0]
        search = search if quickest(candidates) is best else other
    if layout.is_pipeline or any(candidate.fits for candidate in candidates):
        return candidates + pipelines, reason
    if options.remat in ("auto", "override") and not search.are_slower(candidates):
        counts = search.recomputing(layout)
        made = recomputed_plans(
            search.graph,
            search.split,
            layout,
            options,
            cluster,
            search.report,
            counts,
            largest_even(counts, batch_sizes(search.graph), cluster.num_devices),
            again,
            candidates,
        )
        search.keep(made)
        candidates += made
    fits = any(candidate.fits for candidate in candidates)
    if options.stages == "auto" and not stages_first and not fits:
        search.known.misfits.extend(candidates)
        pipelines = automatic_stages(search)
    return candidates + pipelines, reason


def _is_of_one_axis(search: LayoutSearch) -> bool:
    """Whether the method says how a step lies on the one node: stages are for what misfits so."""
    return search.cluster.num_nodes == 1 and search.options.method in BATCH_METHODS


def _has_room(search: LayoutSearch, times: int) -> bool:
    """Whether there is so many times the memory that the whole batch needs at the least."""
    limit = memory_limit_of(search.options, search.cluster)
    return times * search.least_memory.bytes(1, search.cluster.num_devices) <= limit


def _are_refuted(candidates: Sequence[PlannedStep], search: LayoutSearch) -> bool:
    """Whether one mesh needs too much, as its layers said: no program fits that is cut alike."""
    enough = HOPELESS_AS_EXPECTED * memory_limit_of(search.options, search.cluster)
    return bool(search.only) and all(min(c.peak_bytes) > enough for c in candidates)


def _is_cut_evenly(candidate: PlannedStep, search: LayoutSearch) -> bool:
    """Whether devices share the state nearly evenly: padded, they would hold no less of it."""
    held = state_bytes(candidate.planned[0])
    whole = state_on_devices(search.graph, search.options, search.cluster)
    return held <= NEARLY_EVEN * whole / search.cluster.num_devices


def one_mesh_first(
    search: LayoutSearch, layout: StageLayout
) -> tuple[list[PlannedStep], str] | None:
    """Plans for one mesh, where the layers of a long program say that it is quicker than stages.

    Where that turns out so, stages need not be planned. None if they do not say so, or none fits.
    With much room it is planned before stages are priced, where devices hardly wait for each other.
    A program that is not long, on several nodes, is planned for one mesh with the first numbers of
    microbatches that may fit: that takes less than to price its layers. So is a long one on one
    node with the whole batch at once, by a method that says how it lies, if there is much room.
    """
    if layout.is_pipeline:
        return None
    if search.is_long and _is_of_one_axis(search) and _has_room(search, ROOM):
        whole = search.candidates(layout, optional=True, at_most=1)
        if any(candidate.fits for candidate in whole[0]):
            return whole
    if not search.is_long:
        if search.cluster.num_nodes == 1:  # one mesh comes first in any case
            return None
        fewest = _with_fewest(search, layout)
        if any(candidate.fits for candidate in fewest[0]):
            return fewest
        search.known.misfits.extend(fewest[0])
        return None
    guess = _first_guess(search, layout) if _has_room(search, MUCH_ROOM) else None
    if guess and (found := _expected_to_fit(search, layout, guess)):
        return found
    promise = search.promise_of_stages()
    if math.isinf(promise):
        return None
    hopeful = replace(search, best_seconds=promise)
    bound = hopeful.bound_on_one_mesh(layout)
    if bound is None or min(bound.expected.values(), default=math.inf) > promise:
        return None
    return _expected_to_fit(hopeful, layout, bound)


def _first_guess(search: LayoutSearch, layout: StageLayout) -> OneMeshBound | None:
    """What one mesh is expected to take with the first number of microbatches that may fit.

    None where it may not fit, or devices wait so much for each other that stages come first.
    """
    counts = list(microbatch_counts(search.graph, search.options, layout))
    first = next(iter(counts[len(search.too_few(counts)) :]), 0)
    layers = search.layers_on_one_mesh(first) if first else None
    limit = memory_limit_of(search.options, search.cluster)
    return layers.first_guess(first, limit) if layers else None


def _expected_to_fit(
    search: LayoutSearch, layout: StageLayout, bound: OneMeshBound
) -> tuple[list[PlannedStep], str] | None:
    """Plans for one mesh; None if none fits."""
    try:
        found = search.candidates(layout, at_least=bound.fewest, expected=bound.expected)
    except BatchArgumentError:
        return None
    return found if any(candidate.fits for candidate in found[0]) else None


def _with_fewest(search: LayoutSearch, layout: StageLayout) -> tuple[list[PlannedStep], str]:
    """Plans for one mesh with the first few numbers of microbatches that may fit, if one does."""
    counts = list(microbatch_counts(search.graph, search.options, layout))
    left = counts[len(search.too_few(counts)) :][:TRIED_FIRST]
    if not left:
        return [], ""
    return search.candidates(layout, optional=True, at_least=left[0], at_most=left[-1])


@rare_collections()
def compile_like(
    graph: Graph,
    options: Options,
    cluster: Cluster,
    plan: Plan,
    rows: int | None,
    report: Report = lambda message: None,
) -> Compiled | None:
    """Follow a plan of the same program for a larger batch, or one of other weak types.

    None where its decisions do not fit.

    The state is stored as in that plan, so that both programs can take turns with it. Where the
    batch does not divide among the devices as there, what cannot be cut is computed whole.

    Args:
      graph: the step, traced for a smaller batch or other weak types.
      options: those of the plan.
      cluster: its devices.
      plan: the known plan.
      rows: the size of its batch, if there is one.
      report: takes a line of progress.
    """
    options = with_pins_of(plan, options)
    search = LayoutSearch.of(graph, options, cluster, report)
    try:
        search = search.following(plan)
    except PlanMismatchError:
        return None
    sizes = batch_sizes(graph)
    for count in counts_like(plan, rows, sizes, options):
        try:
            later_loops, again = plan.later_loops or "recompute", plan.recomputation
            split = search.split(count, len(plan.stages) > 1, later_loops, again)
            found = plan_like(plan, split, options, cluster, report)
        except AutoparError:
            continue
        if found.fits:
            followed = "follows the plan for " + (format_examples(rows) if rows else "other types")
            digest, needed = fingerprint(graph.jaxpr), model_flops(search.graph.jaxpr, search.rules)
            made = write_plan(found, [found], digest, options, cluster, needed, followed)
            return Compiled(made, found.runnable, found.split.graph)
    return None
