"""The search for pipelines of chosen stages: with which microbatches, and what is planned."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from autopar.base.errors import BatchArgumentError, InexactMicrobatchError
from autopar.passes.graph.graph import batch_sizes
from autopar.passes.planner.candidates import (
    Keep,
    PlannedStep,
    Report,
    plan_layout,
)
from autopar.passes.planner.known_costs import KnownCosts, PricedStages
from autopar.passes.planner.layouts import StageLayout
from autopar.passes.planner.more_microbatches import counts_of_stages, worth_trying
from autopar.passes.planner.searched_step import SearchedStep
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_bound import KnownElsewhere
from autopar.passes.planner.stage_pricing import price_stages
from autopar.passes.planner.stage_shardings import memory_limit_of
from autopar.passes.planner.stages_within import (
    WORTH_PLANNING,
    StagesPlanner,
    pipelines_within,
    seconds_of_best,
)
from autopar.passes.planner.useless_stages import MisfitError

NEARLY = 1.05  # times the limit, what stages need that may fit if they are planned to the end
# Times what stages take with any memory: those that are promised to take more may be quicker by
# computing some values again, of which their search does not know. So they are planned first.
SHORT_OF_MEMORY = 1.25
CLEARLY = 1.05  # times less than what is promised
REALIZED = 1.03  # times what is promised, what a planned step takes without that being a surprise


class PricedStep(SearchedStep, Protocol):
    """A step for which stages are searched."""

    @property
    def report(self) -> Report:
        """Takes a line of progress."""

    @property
    def keep(self) -> Keep:
        """Takes candidates as they are found."""

    @property
    def known(self) -> KnownCosts:
        """What is known of its costs."""

    @property
    def best_seconds(self) -> float:
        """What a step takes that fits elsewhere."""

    @property
    def is_long(self) -> bool:
        """Whether the program has so many layers that these are planned first."""


@dataclass(frozen=True)
class AutomaticStages:
    """The search for stages of a step."""

    search: PricedStep

    @property
    def limit(self) -> int:
        """Bytes that a device may hold."""
        return memory_limit_of(self.search.options, self.search.cluster)

    def promise(self) -> float:
        """What the search for stages expects of a step, with the microbatches that it begins with.

        Infinite where no stages are found.
        """
        found = self._first_stages(self.counts())
        return math.inf if found is None else found.promise

    def counts(self) -> Sequence[int]:
        """The microbatches of automatic stages in the order in which they are tried.

        Those that are asked, else about four for each node, fewer, and more. None for one device,
        or where a mesh is asked for.
        """
        asked, sizes = self.search.options.microbatches, batch_sizes(self.search.graph)
        one_mesh = self.search.options.logical_mesh is not None
        if one_mesh or not sizes or self.search.cluster.num_devices < 2:
            return []
        if asked != "auto":
            return [int(asked)]
        return counts_of_stages(sizes, self.search.cluster.num_nodes, is_long=self.search.is_long)

    def _first_stages(self, counts: Sequence[int]) -> PricedStages | None:
        """The stages with the first of some numbers of microbatches into which the batch divides.

        None where there is no such number, or the program cannot be cut.
        """
        for count in itertools.takewhile(lambda count: count >= 2, counts):
            if any(count > other for other in self.search.known.inexact):
                continue
            if count not in self.search.known.stages:
                try:
                    split = self.search.split(count, is_pipeline=True)
                except (InexactMicrobatchError, BatchArgumentError):
                    self.search.known.inexact.append(count - 1)
                    continue
                elsewhere = KnownElsewhere(self.search.best_seconds, tuple(self.counts()))
                asked = self.search.options, self.search.cluster, self.search.report
                search = price_stages(split, *asked, elsewhere, self._likely_sizes(count))
                if search is None:
                    return None
                first = search.within(self.limit)
                self.search.known.stages[count] = PricedStages(split, search, first)
            return self.search.known.stages[count]
        return None

    def _likely_sizes(self, count: int) -> Sequence[int]:
        """The devices of stages with so many microbatches, by what was priced last with others.

        With nothing priced, those of a node: what stages take there says of smaller submeshes, on
        which more stages need more memory together, whether they need be priced.
        """
        priced = [*self.search.known.stages.values()]
        known = [self._telling(priced)] if priced else []
        longest = self.search.best_seconds
        found = [x.search.with_microbatches(count).within(self.limit, longest) for x in known]
        likely = {size for each in found if each for size in each[0].devices}
        return sorted(likely) if known else [self.search.cluster.devices_per_node]

    def _planner(self, split: SplitStep, missed: list[int]) -> StagesPlanner:
        """What plans stages of a split step, and notes what those need that do not fit."""
        more = self.search.options, self.search.cluster, self.search.report, self.search.keep

        def plan(layout: StageLayout, *, must_fit: bool, longest: float) -> list[PlannedStep]:
            try:
                return plan_layout(split, layout, *more, must_fit=must_fit, longest=longest)
            except MisfitError as misfit:
                missed.append(misfit.peak_bytes)
                raise

        return StagesPlanner(plan, self.search.is_long)

    def pipelines(self) -> list[PlannedStep]:
        """Pipelines whose stages the dynamic program chooses; none where one mesh is best.

        With more microbatches where nothing fits, or where less of a bubble pays. Numbers of them
        are priced before stages are planned, and what promises most is planned first: then the
        others need not be, mostly. Not before stages that memory makes slow, whose promise tells
        little. Where it is known what one mesh lacks, stages are planned to
        their end only if they fit soon, or, where nothing does, if they nearly fit.
        """
        counts, last = self.counts(), None
        made, waiting, tried = list[PlannedStep](), list[PricedStages](), set[int]()
        looked_at: tuple[int, list[int], float] | None = None
        nearly = list[tuple[int, PricedStages]]()
        promised = self.search.best_seconds

        def plan(first: PricedStages, *, must_fit: bool) -> None:
            nonlocal promised
            assert first.first is not None
            missed = list[int]()
            asked = first.search, first.first, self.limit, self._planner(first.split, missed)
            longest = min(self.search.best_seconds, seconds_of_best(made))
            planned = pipelines_within(*asked, must_fit=must_fit, longest=longest)
            made.extend(planned)
            if must_fit and missed and min(missed) <= NEARLY * self.limit:
                nearly.append((min(missed), first))
            if any(candidate.fits for candidate in planned):
                promised = min(promised, first.promise, seconds_of_best(planned))

        while True:
            if last is not None:
                left = [count for count in self.counts() if count not in tried]
                if last in waiting and not made and self._is_short(last, left):
                    waiting.remove(last)
                    plan(last, must_fit=self._knows_others(made))
                hoped = min([promised, *(each.promise for each in waiting)])
                known, looked_at = looked_at, (last.split.num_microbatches, left, hoped)
                # Else there was none, though it had to be no quicker.
                if known is None or known[:2] != looked_at[:2] or hoped > known[2]:
                    told = self._telling([*self.search.known.stages.values(), last])
                    asked = left, self.limit, hoped, told.promise
                    counts = worth_trying(told.search, *asked)
            found = self._first_stages(counts)
            if found is not None:
                last = found
                tried.add(found.split.num_microbatches)
                waiting.append(found)
                continue
            best = min(self.search.best_seconds, seconds_of_best(made) / REALIZED)
            waiting = [x for x in waiting if x.promise * WORTH_PLANNING < best]
            must_fit = self._knows_others(made)
            if not waiting:
                if best < math.inf or not nearly:
                    return made
                _, first = min(nearly, key=lambda each: (each[0], each[1].promise))
                waiting, nearly, must_fit = [first], [], False
            first = min(waiting, key=lambda each: each.promise)
            waiting.remove(first)
            plan(first, must_fit=must_fit)

    def _knows_others(self, made: Sequence[PlannedStep]) -> bool:
        """Whether something fits, or it is known what one mesh lacks."""
        is_known = min(self.search.best_seconds, seconds_of_best(made)) < math.inf
        return is_known or bool(self.search.known.misfits)

    def _is_short(self, stages: PricedStages, left: Sequence[int]) -> bool:
        """Whether memory makes stages so slow that computing values again may well be quicker.

        Not where they are expected to be clearly quicker with a number of microbatches that is
        `left`: by so much, computing again hardly makes stages quicker than is promised.
        """
        enough = stages.promise / SHORT_OF_MEMORY
        if stages.first is None or stages.search.within(sys.maxsize, enough) is None:
            return False
        others = map(stages.search.with_microbatches, left)
        longest = stages.promise / CLEARLY
        return all(other.within(self.limit, longest) is None for other in others)

    def _telling(self, priced: Sequence[PricedStages]) -> PricedStages:
        """The last that tells of other numbers of microbatches; of a single row none does.

        Which of their values have it is not known then, nor what more rows would take.
        """
        rows = min(batch_sizes(self.search.graph), default=1)
        several = [x for x in priced if x.split.num_microbatches < rows]
        return (several or priced)[-1]
