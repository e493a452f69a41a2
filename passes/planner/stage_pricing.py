"""Prices units on sizes of submesh, as far as stages on them may be quick.

One size after the other, those first on which equal stages may fit: with any memory, then at prices
of it, and casting in every microbatch, unless it is slower so than what fits elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.passes.graph.casts_again import casts_again
from autopar.passes.planner.auto_stages import OptionsKey, StageSearch
from autopar.passes.planner.layer_units import FinerUnits, Kind, Units, units_of
from autopar.passes.planner.layouts import chunks_of
from autopar.passes.planner.sent_once import OnceSent, sent_once
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_bound import NOTHING_ELSEWHERE, KnownElsewhere
from autopar.passes.planner.stage_choice import StageOptions
from autopar.passes.planner.stage_costs import Mesh, UnitCost, Way, with_halfway, without_memory
from autopar.passes.planner.unit_costs import UnitCosts
from autopar.passes.slicing.stage_graphs import StageGraph

# Times what stages take that fit: other submeshes on which units take longer with any memory are
# not looked at further.
LONGER = 1.02
SLOWER = 1.1  # times what fits elsewhere, what units are guessed to take: they are not priced
PASSED_OVER = 2  # sizes above all that are priced, in a row, that are not: no others are looked at
HARDLY_LESS = 1.001  # times what stages may take with no memory: else prices of it are not tried


def price_stages(
    split: SplitStep,
    options: Options,
    cluster: Cluster,
    report: Callable[[str], None],
    elsewhere: KnownElsewhere = NOTHING_ELSEWHERE,
    likely: Collection[int] = (),
) -> StageSearch | None:
    """The search for a step; None where it cannot be cut.

    Args:
      split: the program with its batch split.
      options: method, pins, memory limit and so on; `stages` is "auto".
      cluster: all devices.
      report: takes a line of progress.
      elsewhere: what stages have to be quicker than.
      likely: the devices of the stages that are expected to be quickest: of the sizes that have a
        prospect, these come first.
    """
    units = units_of(split)
    if units is None:
        return None
    report(f"slicing into {len(units.starts)} layers")
    return _StagePricing(split, units, options, cluster, report, elsewhere).found(likely)


class _StagePricing:
    """What is priced, size by size, and how quick the best stages are so far."""

    def __init__(
        self,
        split: SplitStep,
        units: Units,
        options: Options,
        cluster: Cluster,
        report: Callable[[str], None],
        elsewhere: KnownElsewhere,
    ) -> None:
        self.split, self.units, self.options, self.cluster = split, units, options, cluster
        self.report, self.elsewhere, self.finer = report, elsewhere, FinerUnits(units)
        # With nothing known, some stages are priced in any case.
        is_first = math.isinf(elsewhere.seconds)
        sliced = units.graphs_of(units.sliced(split)) if is_first else None
        self.graphs = units.typical_graphs(split) if sliced is None else sliced
        self.costs = UnitCosts(units, self.graphs, options, cluster, split.num_microbatches)
        self.priced, self.best = dict[int, list[tuple[Mesh, Way]]](), math.inf
        self.costed: dict[OptionsKey, StageOptions] = {}

    def found(self, likely: Collection[int]) -> StageSearch:
        """The search among all that has a prospect; `likely` sizes come first."""
        costs, free = self.costs, list[int]()
        for size in self._sizes(likely):
            self.report(f"costs of {len(costs.typical)} kinds of layers on {size} devices")
            self.priced[size] = costs.free_ways(size, self._longest_of(size))
            if not costs.may_take(size, self._longest_of(size)):
                continue
            self.best = min(self.best, self._seconds())
            if self._seconds([size]) * HARDLY_LESS < self.best:
                self._price(size)
                self.best = min(self.best, self._seconds())
            else:
                free.append(size)
        if free and self._seconds(free) * HARDLY_LESS < self.best:  # together
            for size in free:
                self._price(size)
        return self._search()

    def _sizes(self, likely: Collection[int]) -> Iterator[int]:
        """The sizes that have a prospect, in turn; each is asked for when others are priced."""
        elsewhere, costs = self.elsewhere, self.costs
        sizes = elsewhere.hopeful(sizes_of(self.cluster)[:-1], self._least)
        sizes.sort(key=lambda size: size not in likely)
        if sizes and elsewhere.seconds < math.inf:
            most_stages = self.cluster.num_devices // min(sizes)
            self.best = elsewhere.longest(self.split.num_microbatches, most_stages)
            costs.is_useless = lambda size, total: self._least_of(size, total) > elsewhere.seconds
            if not self._may_be_quicker(sizes):
                return
        passed = 0
        for size, may_fit in _hopeful_first(sizes, self._is_hopeful):
            if not may_fit and math.isfinite(self.best):
                break  # something fits elsewhere
            known = [x for x in self.priced if self.priced[x]]
            nearest = min(known, key=lambda x: max(x, size) / min(x, size), default=None)
            if nearest is not None and costs.guess(size, nearest) > SLOWER * self.best:
                passed += size > max(known)
                if passed == PASSED_OVER:
                    break
                continue
            passed = 0
            yield size

    def _may_be_quicker(self, sizes: Sequence[int]) -> bool:
        """Whether stages of whole units on these submeshes may be quicker than what fits elsewhere.

        As far as the kind of units that computes most tells, with any memory, then with what that
        needs; and as all kinds tell that are planned with any memory, on the submeshes that the
        quickest stages have. Few units tell nothing.
        """
        left, limit = sorted({self.split.num_microbatches, *self.elsewhere.counts}), sys.maxsize
        for told in (self._least_ways, self._least_that_need):
            search = self._search_among({size: [*told(size).values()] for size in sizes})
            if not search.are_alike:
                return True
            before, left = left, self.elsewhere.beaten_with(search, left, limit)
            sizes = [size for size in sizes if self._is_hopeful(size)] if left else []
            if not sizes or (left == before and limit < sys.maxsize):
                return bool(sizes)
            # What casts in every microbatch needs less.
            limit = self.costs.limit + self._again.kept_bytes // self.cluster.num_devices
        ways = {size: [*self._least_that_need(size).values()] for size in sizes}
        planned = set[int]()
        while True:
            if planned and not self._search_among({x: ways[x] for x in planned}).are_alike:
                return True
            quick = self.elsewhere.submeshes_with(self._search_among(ways), left, limit)
            unplanned = set[int]().union(*quick.values()) - planned
            if not quick or not unplanned:
                return bool(quick)
            left, planned = [*quick], planned | unplanned
            ways |= {x: [*self._planned_that_need(x).values()] for x in sorted(unplanned)}

    def _least_ways(self, size: int) -> Mapping[Mesh, Way]:
        return self.costs.least_ways(size)

    def _least_that_need(self, size: int) -> Mapping[Mesh, Way]:
        return self.costs.least_ways(size, needs=True)

    def _planned_that_need(self, size: int) -> Mapping[Mesh, Way]:
        """The time of all units as they are planned with any memory, with the needs of one kind."""
        need = self._least_that_need(size)
        return {
            mesh: tuple(map(UnitCost.slowed_to, need[mesh], way))
            for mesh, way in self.costs.free_ways(size, self._longest_of(size))
        }

    def _search(self, hoped: Collection[int] = ()) -> StageSearch:
        """The search among what is priced; on some submeshes as if plans needed no memory."""
        found = {
            size: [*with_halfway(ways), *(without_memory(ways) if size in hoped else ())]
            for size, ways in sorted(self.priced.items())
        }
        return dataclasses.replace(
            self._search_among({size: [way for _, way in ways] for size, ways in found.items()}),
            once=self._once if self.priced else (),
            meshes={size: [mesh for mesh, _ in ways] for size, ways in found.items()},
        )

    def _search_among(self, ways: Mapping[int, Sequence[Way]]) -> StageSearch:
        """The search among ways to run units on submeshes, with nothing sent once a step."""
        finer = self.finer
        return StageSearch(
            starts=tuple(finer.starts),
            crossing=tuple(finer.crossing),
            inside=tuple(finer.inside),
            once=(),
            ways={size: [*map(finer.shared_out, found)] for size, found in ways.items()},
            num_microbatches=self.split.num_microbatches,
            cluster=self.cluster,
            remat=self.options.remat,
            schedules=_schedules(self.options),
            known=self.costed,
        )

    def _seconds(self, hoped: Collection[int] = ()) -> float:
        return self._search(hoped).bound(self.costs.limit, self.best)

    @cached_property
    def _once(self) -> tuple[OnceSent, ...]:
        return sent_once(self.units.sliced(self.split), self.finer.first_of)

    @cached_property
    def _again(self) -> _Casting:
        return _Casting.of(self.graphs, self.units.kinds)

    @cached_property
    def _casting(self) -> UnitCosts:
        count = self.split.num_microbatches
        asked = self._again.graphs, self.options, self.cluster, count
        return UnitCosts(self.units, *asked, alike=self.costs)

    def _longest_of(self, size: int) -> float:
        """What equal stages of so many devices may take by 1F1B, to be looked at further.

        More stages than are priced wait longer so, which other schedules need not: that is left.
        """
        priced = self.priced
        if size > max((x for x in priced if priced[x] and x != size), default=0):
            return LONGER * self.best
        waiting, count = self.cluster.num_devices / size - 1, self.split.num_microbatches
        return LONGER * self.best * (count + waiting) / count

    def _price(self, size: int) -> None:
        """At prices of memory, and casting in every microbatch where equal stages do not fit.

        Not where that takes longer than what fits elsewhere.
        """
        costs, longest = self.costs, self._longest_of(size)
        self.priced[size] = costs.ways(size, longest)
        least = costs.least_that_fits(size, self.priced[size])
        if math.isfinite(least) or not costs.may_take(size, longest):
            return
        spared = self._again.kept_bytes
        if spared and costs.may_fit_casting(size, self.priced[size], spared):
            self.report(f"costs of layers that cast in every microbatch on {size} devices")
            ways = self._casting.ways(size, longest)
            more = [(mesh, tuple(x._replace(casts=True) for x in way)) for mesh, way in ways]
            self.priced[size] = [*self.priced[size], *more]

    def _is_hopeful(self, size: int) -> bool:
        crossed = min(filter(None, self.finer.crossing), default=0)
        if self.costs.may_fit(size, crossed):
            return True
        return self.costs.may_fit(size, crossed, self._again.kept_bytes)

    def _least_of(self, size: int, total: UnitCost) -> float:
        """What has to be known elsewhere, for stages in which units take so long to be of use."""
        stages, schedules = self.cluster.num_devices / size, _schedules(self.options)
        return self.elsewhere.least(total, stages, self.split.num_microbatches, schedules)

    def _least(self, size: int, enough: float) -> float:
        """The same for stages of so many devices."""
        seconds = 0.0
        for known in (False, True):  # what is told by one device alone takes no plans
            if seconds < enough:
                totals = self.costs.least_totals(size, known=known)
                seconds = min((self._least_of(size, total) for total in totals), default=math.inf)
        return seconds


def _hopeful_first(
    sizes: Iterable[int], is_hopeful: Callable[[int], bool]
) -> Iterator[tuple[int, bool]]:
    """Sizes that are hopeful, then the others; one is asked for when its turn has come."""
    others = list[int]()
    for size in sizes:
        if is_hopeful(size):
            yield size, True
        else:
            others.append(size)
    yield from ((size, False) for size in others)


class _Casting(NamedTuple):
    """Typical units that cast parameters in every microbatch, and the bytes that all spare so.

    As many as the typical one of its kind does, each; none where nothing is cast.
    """

    graphs: dict[Kind, StageGraph]
    kept_bytes: int

    @classmethod
    def of(cls, graphs: Mapping[Kind, StageGraph], kinds: Sequence[Kind]) -> _Casting:
        """Of the typical units of each kind, and the kinds of all."""
        found = {kind: (unit, casts_again(unit.step)) for kind, unit in graphs.items()}
        made = {
            kind: unit if again is None else dataclasses.replace(unit, step=again.step)
            for kind, (unit, again) in found.items()
        }
        kept = {kind: again.kept_bytes if again else 0 for kind, (_, again) in found.items()}
        return cls(made, sum(map(kept.__getitem__, kinds)))


def _schedules(options: Options) -> tuple[str, ...]:
    """By what stages are chosen: 1F1B stands for all that hold about as much."""
    if options.schedule in ("auto", None) and chunks_of(options) == 1:
        return ("1f1b", "eager_1f1b")
    return ("eager_1f1b",) if options.schedule == "eager_1f1b" else ("1f1b",)


def sizes_of(cluster: Cluster) -> list[int]:
    """Powers of two within a node, and whole nodes: powers of two, and numbers that divide all."""
    inside = {2**i for i in range(cluster.devices_per_node.bit_length())}
    nodes = {2**i for i in range(1, cluster.num_nodes.bit_length())}
    nodes |= {n for n in range(2, cluster.num_nodes) if cluster.num_nodes % n == 0}
    whole = {n * cluster.devices_per_node for n in nodes}
    return sorted(inside | whole | {cluster.num_devices})
