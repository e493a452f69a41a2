"""The logical meshes of a whole step, one after the other, as far as one can be the quickest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.base.units import format_bytes
from autopar.passes.planner.layouts import submesh
from autopar.passes.planner.planned_stage import PlannedStage
from autopar.passes.planner.search_so_far import NOTHING_SO_FAR, SearchSoFar
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_shardings import (
    DEAR,
    ENOUGH_MEMORY_GAP,
    ENOUGH_OF_LARGE,
    HOPELESS,
    HOPELESS_AS_EXPECTED,
    MeshSearch,
    memory_limit_of,
)
from autopar.passes.solver import TooDear

NEARLY = 1.05  # times the limit, what may need less where it is chosen to fit
ALIKE = 1.005  # times what the quickest mesh is expected to take: as quick, for all that is known
MESHES_TRIED = 2  # of those that do not fit, before more microbatches are


def plan_meshes(
    split: SplitStep,
    meshes: Sequence[tuple[int, ...]],
    options: Options,
    cluster: Cluster,
    report: Callable[[str], None],
    fits: Callable[[PlannedStage], None] = lambda planned: None,
    others: SearchSoFar = NOTHING_SO_FAR,
) -> list[PlannedStage]:
    """`plan_mesh` for each mesh, as far as that can be the cheapest of all that fit.

    A mesh whose cheapest program exceeds the memory and costs more than one that fits elsewhere is
    not planned within the limit. Where it is known what a step may be expected to take, the meshes
    are planned in that order, and not at all if it is hardly less than with what fits; by how much
    such expectations are wrong, the planned ones tell. Meshes of the same devices need about the
    same at the least: where more microbatches can be tried and two meshes of a large program do not
    fit with these, or one on which layers need no more, the others are not planned within the limit
    either. Nor are they planned at all where two need far too much, also chosen for their bytes; or
    one needs too much, where nothing was expected to fit and `others.only` are tried; or, where
    more microbatches can be tried, on two what needs more than there is takes longer than what
    fits. Nor is a mesh planned within the limit, where more can be tried, that plans chosen for
    their bytes miss by more than little. To plan within the limit ends where the solver proves that
    a mesh takes longer than what fits. Where nothing fits the smallest plan of all is looked for.

    Args:
      split: the whole step.
      meshes: logical shapes.
      options: method, memory limit and so on.
      cluster: the devices; a mesh may have fewer.
      report: takes a line of progress.
      fits: takes what fits, as it is found.
      others: what is known from elsewhere.
    """
    return _MeshesInTurn(split, meshes, options, cluster, report, fits, others).planned()


@dataclass
class _MeshesInTurn:
    """What is found and left to be planned; meshes go by their places. Fields as `plan_meshes`."""

    split: SplitStep
    meshes: Sequence[tuple[int, ...]]
    options: Options
    cluster: Cluster
    report: Callable[[str], None]
    fits: Callable[[PlannedStage], None]
    others: SearchSoFar
    searches: dict[int, MeshSearch] = field(default_factory=dict)
    found: dict[int, PlannedStage] = field(default_factory=dict)
    smaller: dict[int, list[PlannedStage]] = field(default_factory=dict)  # chosen for their bytes
    left: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)  # where the smallest plan is looked for at last
    failed: int = 0
    too_dear: int = 0
    again: float | None = None  # what a step takes that computes values again, once that is asked

    def __post_init__(self) -> None:
        self.limit, self.left = (
            memory_limit_of(self.options, self.cluster),
            [*range(len(self.meshes))],
        )

    def planned(self) -> list[PlannedStage]:
        while self.left:
            i = self.next()
            fitting = [_whole_seconds(x, self.cluster) for x in self.found.values() if x.fits]
            quickest = min(self.again or math.inf, *(fitting or [self.others.seconds]))
            if i in self.found and self.again is None and self.asks(i, quickest):
                self.again = self.others.again(self.found[i])
                quickest = min(quickest, self.again)
            if self.found and min(map(self.least, self.left)) > quickest:
                break
            if i in self.found:
                self.left.remove(i)
                self.plan_within_limit(i, fitting, quickest)
                continue
            self.begin(i)
            enough = 1 if self.others.only else MESHES_TRIED
            may_stop = len(self.found) == enough and not self.others.more_microbatches
            if may_stop and all(i in self.left and self.is_hopeless(i) for i in self.found):
                self.ask_again(min(self.found.values(), key=lambda x: x.least_seconds))
                return [self.smallest_of(i) for i in self.found]
        for i in self.last:
            if any(x.fits for x in self.found.values()):
                break
            self.keep(i, self.searches[i].smaller_than(self.found[i]))
        return [self.found[i] for i in sorted(self.found)]

    def next(self) -> int:
        """The mesh on which a step takes least; of those that hardly differ, of fewest axes."""
        first = min(self.left, key=self.least)
        if first in self.found or not self.others.expected:
            return first
        near = (i for i in self.left if self.least(i) <= ALIKE * self.least(first))
        return min(
            (i for i in near if i not in self.found),
            key=lambda i: (len(self.meshes[i]), self.least(i)),
        )

    def begin(self, i: int) -> None:
        """Plans a mesh with any memory."""
        of = f", {len(self.found) + 1} of {len(self.meshes)}" if len(self.meshes) > 1 else ""
        self.report(f"choosing shardings on a mesh of {self.shape(i)}{of}")
        part = submesh(self.cluster, math.prod(self.meshes[i]))
        self.searches[i] = MeshSearch.of(self.split, self.meshes[i], self.options, part, None, None)
        self.keep(i, self.searches[i].attempt(None, False))
        if self.found[i].fits:
            self.left.remove(i)

    def plan_within_limit(self, i: int, fitting: Sequence[float], quickest: float) -> None:
        """Plans a mesh within the memory, or what comes nearest; ends where that has no prospect.

        `fitting` are the seconds of what fits on other meshes, `quickest` of what fits at all.
        """
        first, search, others = self.found[i], self.searches[i], self.others
        may_wait = others.more_microbatches and search.is_large
        hurries = may_wait and not others.expected.get(self.meshes[i])
        if hurries and self.failed == MESHES_TRIED:
            self.left.clear()
            return
        missing = f"{format_bytes(first.peak.bytes - self.limit)} a device are missing on"
        if others.more_microbatches and not (fitting or search.is_large or self.is_near(i)):
            self.report(f"{missing} {self.shape(i)}: too much")
            self.found[i] = self.smallest_of(i)
            return
        self.report(f"{missing} {self.shape(i)}: solving within the limit")
        tries = 1 if may_wait and not hurries else None
        at_most = quickest if search.is_large else min(fitting, default=math.inf)
        by_price = search.is_better_priced(first)
        try:
            if by_price:
                near = search.at_least_price(first, at_most)
            else:
                near = search.tightened(first, tries, at_most)
            is_dear = may_wait and not near.fits and near.step_seconds > at_most
        except TooDear:
            is_dear = True
        if is_dear:
            self.ask_again(first)
            self.too_dear += may_wait
            if self.too_dear == MESHES_TRIED:
                self.left.clear()
            return
        if tries and not near.fits:
            hurries = not self.small(i, 1)[0].fits  # then nothing fits, or hardly
            near = near if hurries or by_price else search.tightened(near)
        tried = [first, near]
        if not near.fits:
            tried += self.small(i, 1 if hurries else len(DEAR))
            if any(x.fits for x in tried) and not by_price:
                tried.append(search.at_least_price(first))
            elif not hurries and not self.is_hopeless(i):
                self.last.append(i)
            if not any(x.fits for x in tried):
                self.failed += 1
                need = others.need.get(self.meshes[i], math.inf) if may_wait else math.inf
                self.left = [j for j in self.left if others.need.get(self.meshes[j], 0) < need]
        within = min(
            (x for x in tried if x.fits),
            key=lambda x: x.step_seconds,
            default=min(tried, key=lambda x: x.peak.bytes),
        )
        if within is not first:
            self.keep(i, replace(within.proven_by(first), unlimited=first))
        is_enough = within.fits and within.step_seconds <= self.slack(i) * first.least_seconds
        if not is_enough:
            self.ask_again(first)

    def ask_again(self, first: PlannedStage) -> None:
        """Has values computed again instead of what does not fit, unless that was asked before."""
        if self.again is None:
            self.again = self.others.again(first)

    def keep(self, i: int, planned: PlannedStage) -> None:
        self.found[i] = planned
        if planned.fits:
            self.fits(planned)

    def shape(self, i: int) -> str:
        return " x ".join(map(str, self.meshes[i]))

    def least(self, i: int) -> float:
        """What is known of the seconds on a mesh before it is planned (within the limit)."""
        if i in self.found:
            return self.slack(i) * self.found[i].least_seconds
        known = self.others.expected
        wrong = [
            (x.step_seconds if x.fits else x.least_seconds) / known[x.mesh]
            for x in self.found.values()
            if known.get(x.mesh)
        ]
        enough = ENOUGH_OF_LARGE if wrong else 1.0
        return known.get(self.meshes[i], 0.0) * min(wrong, default=1.0) * enough

    def slack(self, i: int) -> float:
        """Times what a mesh takes at the least: what is found within the limit may lack as much."""
        return 1 + ENOUGH_MEMORY_GAP if i in self.found and self.searches[i].is_large else 1.0

    def small(self, i: int, count: int = len(DEAR)) -> list[PlannedStage]:
        """Plans on a mesh that are chosen for their bytes."""
        known, dear = self.smaller.setdefault(i, []), self.searches[i].dear
        known += (dear(self.found[i], number) for number in range(len(known), count))
        return known[:count]

    def smallest_of(self, i: int) -> PlannedStage:
        """The smallest of the plans on a mesh so far."""
        first = self.found[i]
        best = min([first, *self.small(i)], key=lambda x: x.peak.bytes)
        return best if best is first else replace(best, unlimited=first)

    def is_hopeless(self, i: int) -> bool:
        """Whether a large program needs far too much on a mesh, also if chosen for its bytes."""
        far = (HOPELESS_AS_EXPECTED if self.others.only else HOPELESS) * self.limit
        if not self.searches[i].is_large or self.found[i].bytes_at_least <= far:
            return False
        return min(x.bytes_at_least for x in self.small(i)) > far

    def is_near(self, i: int) -> bool:
        """Whether one of them fits, or hardly exceeds the limit."""
        return any(
            self.small(i, n + 1)[n].peak.bytes <= NEARLY * self.limit for n in range(len(DEAR))
        )

    def asks(self, i: int, quickest: float) -> bool:
        """Whether values may be computed again instead; of a large step, before other shards do."""
        is_far = self.found[i].peak.bytes > NEARLY * self.limit
        return not self.searches[i].is_large or (is_far and self.least(i) <= quickest)


def _whole_seconds(planned: PlannedStage, cluster: Cluster) -> float:
    """With what no node decides."""
    return planned.step_seconds + planned.costs(cluster).scalar_sums(planned.program.block)
