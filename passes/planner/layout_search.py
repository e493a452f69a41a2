"""What is tried for one graph: layouts, numbers of microbatches, padding, automatic pipelines."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from autopar.base.cluster import Cluster
from autopar.base.errors import BatchArgumentError, InexactMicrobatchError, PlanMismatchError
from autopar.base.methods import WHOLE_PARAMETERS
from autopar.base.options import Options
from autopar.base.plan_records import OutputCertificate, Recomputation
from autopar.passes import microbatch
from autopar.passes.graph.fingerprint import fingerprint
from autopar.passes.graph.graph import Graph, batch_sizes
from autopar.passes.graph.microbatched import in_phases
from autopar.passes.graph.tested_loops import with_tests_in_bodies
from autopar.passes.planner.asked_loops import with_asked_loops
from autopar.passes.planner.automatic_stages import AutomaticStages
from autopar.passes.planner.candidates import Keep, PlannedStep, Report, plan_layout
from autopar.passes.planner.known_costs import KnownCosts
from autopar.passes.planner.layer_units import units_of
from autopar.passes.planner.layouts import (
    ExpectedSeconds,
    StageLayout,
    logical_meshes,
    microbatch_counts,
)
from autopar.passes.planner.least_memory import LeastMemory, state_on_devices, too_few
from autopar.passes.planner.more_microbatches import not_possible, too_small
from autopar.passes.planner.one_mesh import (
    MAY_MEET,
    OneMeshBound,
    OneMeshCosts,
    find_bound,
    hoped_at_most,
    largest_even,
    working_within,
    worth_pricing,
)
from autopar.passes.planner.quicker_again import QuickerAgain
from autopar.passes.planner.recomputed_steps import recomputed_step
from autopar.passes.planner.rewritings import (
    AS_WRITTEN,
    Rewriting,
    check_splits,
    planned_graphs,
    rewritten_steps,
)
from autopar.passes.planner.search_so_far import SearchSoFar
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_shardings import memory_limit_of
from autopar.passes.planner.stages_within import seconds_of_best
from autopar.passes.planner.unit_costs import UnitCosts
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding.host_leaves import may_leave
from autopar.passes.sharding.restrict import check_batch
from autopar.plans.plan import Plan

HARDLY_MORE = 1.02  # times what all takes that is kept: fewer computations again are not looked for
LONG_PROGRAM = 4000  # equations; what is found out of its layers first saves planning it whole


@dataclass(frozen=True)
class LayoutSearch:
    """What is tried for one graph; `best_seconds` is what a step takes that fits elsewhere.

    Of the logical shapes of one mesh, it may be `only` some. Where rows are sorted by example,
    `sorted_whole` sorts all.
    """

    graph: Graph
    rules: Rules
    options: Options
    cluster: Cluster
    report: Report
    rewriting: Rewriting = AS_WRITTEN
    keep: Keep = lambda candidates: None
    best_seconds: float = math.inf
    known: KnownCosts = field(default_factory=KnownCosts.nothing, compare=False)
    only: tuple[tuple[int, ...], ...] = ()
    sorted_whole: Graph | None = field(default=None, compare=False)

    @classmethod
    def of(cls, graph: Graph, options: Options, cluster: Cluster, report: Report) -> LayoutSearch:
        """The search for a traced step."""
        graph, sorted_whole = planned_graphs(graph, options, cluster)
        rules = populate(graph.jaxpr)
        graph = with_asked_loops(graph, rules, options, cluster)
        return cls(graph, rules, options, cluster, report, sorted_whole=sorted_whole)

    @property
    def is_long(self) -> bool:
        """Whether the program has so many layers that these are planned first."""
        return len(self.graph.jaxpr.eqns) >= LONG_PROGRAM

    def within(self, options: Options, cluster: Cluster) -> LayoutSearch:
        """The same search with other options and another cluster, silent."""
        silent = replace(self, options=options, cluster=cluster, report=lambda message: None)
        return replace(silent, known=self.known.elsewhere())

    def rewritten(self) -> Iterator[LayoutSearch]:
        """Searches for other programs of the same step."""
        asked = self.options, self.cluster
        for found in rewritten_steps(self.graph, self.rules, *asked, self.sorted_whole):
            self.report(str(found))
            rules = populate(found.graph.jaxpr)
            other = replace(self, graph=found.graph, rules=rules, rewriting=found.rewriting)
            yield replace(other, known=KnownCosts.nothing(), only=())

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
        later_loops: str = "recompute",
        again: Recomputation | None = None,
    ) -> SplitStep:
        """The step in this number of microbatches; for a pipeline, with one loop, also for one.

        Later loops "keep", "reuse" or "recompute" rows of earlier ones (see `analyze`); the
        backward pass does as `again` says.
        """
        graph, options = self.graph, self.options
        if not is_pipeline and (again is not None or options.remat == "full"):
            cut = self.cluster.num_devices > 1 and options.method not in WHOLE_PARAMETERS
            return recomputed_step(self.split(count, True), self.cluster, again, weights=cut)
        has_loop = count > 1 or is_pipeline
        if (count, has_loop) in self.known.splits:
            return self.known.splits[count, has_loop]
        if count == 1:
            whole = tuple(OutputCertificate(label.path, "whole batch") for label in graph.outputs)
            step, rules = with_tests_in_bodies(in_phases(graph)), self.rules
            if is_pipeline:
                step = with_tests_in_bodies(microbatch.in_one_microbatch(graph, self.rules))
            if step.graph is not graph:
                rules = populate(step.graph.jaxpr)
            split = SplitStep(step, rules, whole, rewriting=self.rewriting)
            return self.known.keep_split(count, has_loop, split)
        check_splits(self.rewriting, count)
        self.report(f"splitting the batch into {count} microbatches")
        analysis = self.analysis(count, is_pipeline, later_loops)
        step = with_tests_in_bodies(microbatch.split(graph, analysis))
        rules = populate(step.graph.jaxpr)
        asked = analysis.certificate, count, self.rewriting
        if len(step.loops) > 1:
            return SplitStep(step, rules, *asked, later_loops)
        return self.known.keep_split(count, has_loop, SplitStep(step, rules, *asked))

    def _with_rows_of_earlier_loops(self, split: SplitStep) -> Iterator[SplitStep]:
        """A step of several loops whose later ones keep or reuse rows, if it can be cut so."""
        known = {fingerprint(split.graph.jaxpr)}
        for later_loops in ("keep", "reuse") if split.later_loops else ():
            try:
                other = self.split(split.num_microbatches, later_loops=later_loops)
            except InexactMicrobatchError:
                continue
            if (program := fingerprint(other.graph.jaxpr)) not in known:
                known.add(program)
                yield other

    def analysis(
        self, count: int, one_loop: bool = False, later_loops: str = "recompute"
    ) -> microbatch.Analysis:
        """How the step is split into so many microbatches; what is known is not found again.

        Raises:
          InexactMicrobatchError: it is asked for one loop, and several do not do either.
        """
        if count not in self.known.analyses:
            analyze = microbatch.analyze_one_loop if one_loop else microbatch.analyze
            names = ("max_flops_share", "max_bytes_share")
            shares: dict[str, Any] = {name: getattr(self.options, name) for name in names}
            found = analyze(self.graph, self.rules, count, later_loops=later_loops, **shares)
            if found.culprits or found.parts:
                return found
            self.known.analyses[count] = found
        return self.known.analyses[count]

    def candidates(
        self,
        layout: StageLayout,
        *,
        optional: bool = False,
        bounded: bool = True,
        at_least: int = 1,
        at_most: int | None = None,
        expected: ExpectedSeconds = MappingProxyType({}),
    ) -> tuple[list[PlannedStep], str]:
        """Plans with a layout, with more microbatches while nothing fits; and why not with more.

        If they are `optional`, there may be none. `at_least` so many microbatches are tried, or the
        most that are possible, and no more than `at_most`; with the first number a step is
        `expected` to take so long on logical shapes of one mesh. If `bounded`, numbers that cannot
        fit one mesh are passed over, but the last.
        """
        made = [] if layout.is_pipeline else [*self.known.misfits]
        at_least = max([at_least, *(2 * step.split.num_microbatches for step in made)])
        options, cluster, whole = self.options, self.cluster, not layout.is_pipeline

        def planned(split: SplitStep, others: SearchSoFar) -> list[PlannedStep]:
            return plan_layout(split, layout, options, cluster, self.report, self.keep, others)

        again = self.computing_again(made) if whole else None
        so_far, last = SearchSoFar(self.best_seconds, only=self.only), None
        possible = list(microbatch_counts(self.graph, options, layout))
        meshes = logical_meshes(options, cluster, self.graph, of_stage=False) if whole else ()
        counts = [count for count in possible if count >= at_least]
        passed = self.too_few(counts) if bounded and not layout.is_pipeline else []
        if again is not None and not made:
            fewer = [count for count in possible if count < counts[len(passed)]]
            again.look_at(passed if self.is_long else fewer)
        for count in counts[len(passed) :]:
            if at_most is not None and count > at_most:
                break
            try:
                for mesh in meshes:
                    check_batch(self.graph, options.method, mesh, count)
                if made and meshes and not self.is_long:
                    small = too_small(made, count, self._limit, options, cluster)
                    is_last = count == counts[-1] and math.isinf(self.best_seconds)
                    if small.issuperset(meshes) and not is_last:
                        if again is not None:
                            again.look_at([count])
                        continue
                    so_far = so_far._replace(too_small=small)
                split = self.split(count, layout.is_pipeline)
            except (InexactMicrobatchError, BatchArgumentError) as error:
                alone = layout.is_pipeline and options.microbatches == "auto" and not optional
                if not made and alone and isinstance(error, InexactMicrobatchError):
                    return planned(self.split(1, is_pipeline=True), so_far), error.what
                if passed:  # says what they would need
                    return self.candidates(layout, optional=optional, bounded=False)
                if not made and not optional:
                    fewer = [other for other in possible if other < count]
                    if not fewer:
                        raise
                    return self.candidates(layout, bounded=bounded, at_least=fewer[-1])
                if last is not None and not layout.is_pipeline:  # all that may fit with so many
                    made += planned(last, so_far)
                return made, not_possible(count, error)
            if split.later_loops and len(passed) > 1:
                # The bound is that of one loop over the microbatches.
                return self.candidates(layout, optional=optional, bounded=False)
            is_short = self._may_gather and self.known.misses_what_it_gathers(count, self._limit)
            if again is not None and is_short:
                split = again.gathering(split)
            more = count != counts[-1] and not split.later_loops
            told = self.known.on_one_mesh(count, self._limit) if whole and self.is_long else {}
            told |= {"expected": expected} if count == at_least else {}
            if again is not None and not split.later_loops:
                told |= {"seconds": again.seconds, "again": partial(again.instead_of, count)}
            before = seconds_of_best(made)
            made += planned(split, so_far._replace(**told, more_microbatches=more))
            for other in self._with_rows_of_earlier_loops(split):
                made += planned(other, so_far)
            last = split if more else None
            fitting = [candidate for candidate in made if candidate.fits]
            kept = (candidate.split.recomputation for candidate in fitting)
            keeps = any(again is None or not again.operations for again in kept)
            best = seconds_of_best(made)
            is_worse = before < math.inf and best >= before
            if keeps or is_worse or self.are_slower(made, best / HARDLY_MORE):
                break
        if again is not None and self.is_long:
            again.look_below(possible, self.known.with_fewer)
        return made, ""

    def computing_again(self, made: list[PlannedStep]) -> QuickerAgain | None:
        """What looks for plans on one mesh that compute values again; None where none may."""
        if not self._may_compute_again:
            return None
        all_meshes = logical_meshes(self.options, self.cluster, self.graph, of_stage=False)
        asked = self.options, self.cluster, self.report, self.keep, made, self.only or all_meshes
        return QuickerAgain(self.graph, self.split, *asked, self.best_seconds)

    def bound_on_one_mesh(self, layout: StageLayout) -> OneMeshBound | None:
        """With how many microbatches one mesh may be quicker than what fits elsewhere, if at all.

        Of a long program that is told by its layers. Where nothing fits elsewhere, and nothing is
        expected to fit on one mesh, it is tried with the most.
        """
        counts = list(microbatch_counts(self.graph, self.options, layout))
        nothing_fits = math.isinf(self.best_seconds)
        # Layers are priced with all in the devices' memory, and all kept for the backward pass.
        is_leaner = self.options.offload != "none"
        is_leaner |= self.options.remat == "full" and not self.known.stages
        if not self.is_long or (nothing_fits and is_leaner):
            return OneMeshBound(counts[0])
        left = counts[min(len(self.too_few(counts)), len(counts) - 1) :]
        limit = int((MAY_MEET if nothing_fits else 1.0) * self._limit)
        if self.known.stages:
            stages = next(iter(self.known.stages.values())).search
            state = state_on_devices(self.graph, self.options, self.cluster)
            left = worth_pricing(left, self.best_seconds, stages, limit, state)
        even = largest_even(left, batch_sizes(self.graph), self.cluster.num_devices)
        found = find_bound(left, self.best_seconds, self.layers_on_one_mesh, limit, even)
        if nothing_fits and (found is None or found.expected):
            return hoped_at_most(found, (even, counts[-1]), self.known.one_mesh, self._limit)
        return found

    def recomputing(self, layout: StageLayout) -> list[int]:
        """The microbatches with which one mesh may fit that keeps nothing for its backward pass."""
        counts = list(microbatch_counts(self.graph, self.options, layout))
        away = self.options.offload != "none"  # less is left of what layers were priced with
        return counts if away else working_within(counts, self.known.one_mesh, self._limit)

    def layers_on_one_mesh(self, count: int) -> OneMeshCosts | None:
        """What the layers cost with so many microbatches; None where they are not cut so."""
        if count not in self.known.one_mesh:
            found = None
            with contextlib.suppress(InexactMicrobatchError, BatchArgumentError):
                split = self.split(count, is_pipeline=True)
                if self._may_gather:
                    split = split.reading_again
                units = units_of(split)
                if units is not None:
                    self.report(f"costs of {len(units.starts)} layers on one mesh")
                    asked = self.options, self.cluster, count
                    costs = UnitCosts(units, units.typical_graphs(split), *asked)
                    found = OneMeshCosts(costs, self.cluster.num_devices)
            self.known.one_mesh[count] = found
        return self.known.one_mesh[count]

    @property
    def _may_compute_again(self) -> bool:
        """Whether values may be computed again for the backward pass on one mesh."""
        return self.options.remat in ("auto", "override") and not self.rewriting.expert_blocks

    @property
    def _may_gather(self) -> bool:
        """Whether weights may be gathered again."""
        return self._may_compute_again and self.cluster.num_devices > 1

    @property
    def _limit(self) -> int:
        return memory_limit_of(self.options, self.cluster)

    def are_slower(self, candidates: Sequence[PlannedStep], than: float = math.inf) -> bool:
        """Whether these, on one mesh, take longer than what fits elsewhere with any memory.

        More microbatches would only take longer still. What computes again is not one of these.
        """
        mine = ((c, c.split.recomputation) for c in candidates if not c.is_pipeline)
        kept = (c for c, again in mine if again is None or not again.operations)
        least = [c.planned[0].least_seconds for c in kept]
        return bool(least) and min(least) > min(self.best_seconds, than)

    def too_few(self, counts: Sequence[int]) -> list[int]:
        """The first of these numbers of microbatches with which no plan for one mesh can fit."""
        if len(counts) < 2:
            return []
        meshes = logical_meshes(self.options, self.cluster, self.graph, of_stage=False)
        devices = max(map(math.prod, meshes))
        return too_few(self.least_memory, counts, devices, self._limit, self.report)

    @property
    def least_memory(self) -> LeastMemory:
        """What every plan has, on all devices together."""
        away = may_leave(self.graph, self.options.offload, self.cluster)
        key = self.cluster.device.name, away
        if key not in self.known.least:
            asked = self.analysis, away, self.known.analyses
            self.known.least[key] = LeastMemory.of(self.graph, self.rules, key[0], *asked)
        return self.known.least[key]

    def promise_of_stages(self) -> float:
        """What the search for stages expects of a step, with the microbatches that it begins with.

        Infinite where no stages are found.
        """
        return AutomaticStages(self).promise()

    def automatic_pipelines(self) -> list[PlannedStep]:
        """Pipelines whose stages the dynamic program chooses; none where one mesh is best."""
        return AutomaticStages(self).pipelines()
