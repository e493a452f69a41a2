"""Whether one mesh of all devices can be quicker than stages, told by the layers of a step."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from autopar.passes.planner.auto_stages import StageSearch
from autopar.passes.planner.layouts import ExpectedSeconds
from autopar.passes.planner.stage_costs import UnitCost, joined
from autopar.passes.planner.unit_costs import UnitCosts

MARGIN = 1.06  # times what fits elsewhere: more than the layers of one mesh must take
ONE_BATCH_MARGIN = 1.25  # the same without microbatches
MAY_MEET = 1.1  # times the limit that layers alone may need: where they meet, there is less of it
HARDLY_MORE = 1.02  # times the least memory of all shapes: as good, for all that is known
KEPT_AT_LEAST = 0.5  # of an even part of the activations that stages keep; one mesh may keep less
NEEDED_AT_LEAST = 0.8  # of an even part of all that units need on smaller meshes
HARDLY_SLOWER = 1.15  # times what devices take one by one: together they hardly wait for each other
WORTH_GATHERING = 0.25  # of what is missing: gathered weights, to gather them for each pass
NEAR = 2  # times the microbatches that were priced: what these tell needs no pricing of its own
SURELY = 0.95  # times the limit, what is told so may need


class OneMeshBound(NamedTuple):
    """The fewest microbatches with which one mesh may fit.

    And what a step is expected to take with them, by logical shape, where that is known: within the
    memory on shapes on which it is expected to fit, on others with any. Where it is not expected to
    fit at all, the `only` shapes that are worth trying, those on which layers need least; and those
    `only_again` where values are computed again. If it may fit all the same, with the most
    microbatches, `hoped` are the fewest with which it may then.
    """

    fewest: int
    expected: ExpectedSeconds = MappingProxyType({})
    only: tuple[tuple[int, ...], ...] = ()
    only_again: tuple[tuple[int, ...], ...] = ()
    hoped: int = 0


@dataclass(frozen=True)
class OneMeshCosts:
    """What all layers cost on one mesh of all devices."""

    costs: UnitCosts
    num_devices: int

    def by_mesh(self, longest: float) -> dict[tuple[int, ...], float]:
        """The seconds of a step with any memory, by logical shape; of longer ones a guess."""
        return self.costs.seconds_by_mesh(self.num_devices, longest)

    def first_guess(self, count: int, limit: int) -> OneMeshBound | None:
        """What a step is expected to take, if the devices hardly wait for each other and it fits.

        By the layers that compute most: on one device, and on all together. Where these take hardly
        longer, stages have little to win; whether they do is cheaper to tell from a plan than the
        other way round.
        """
        alone, together = (
            min(count * total.seconds + total.once_seconds for total in totals)
            for totals in map(self.costs.least_totals, (1, self.num_devices))
        )
        if not 0 < together * self.num_devices <= HARDLY_SLOWER * alone:
            return None
        free, fitting = self.by_mesh(0.0), self.fitting(count, limit)
        if min(fitting.values(), default=math.inf) > ONE_BATCH_MARGIN * together:
            return None
        return OneMeshBound(count, self.within(free, fitting))

    @cached_property
    def by_way(self) -> list[tuple[tuple[int, ...], UnitCost]]:
        """What each way of running them costs and needs, with its logical shape."""
        return self.costs.totals(self.num_devices)

    def smallest(self, keeps: bool = True) -> tuple[tuple[int, ...], ...]:
        """The logical shapes on which a microbatch needs least, or hardly more; may be none.

        The two quickest of these; or one, if nothing is kept for the backward pass.
        """
        needs = [
            (total.bytes_for_one if keeps else total.bytes_fixed + total.bytes_working, total, mesh)
            for mesh, total in self.by_way
        ]
        enough = HARDLY_MORE * min((need for need, _, _ in needs), default=0)
        near = [(total.seconds, mesh) for need, total, mesh in needs if need <= enough]
        shapes = dict.fromkeys(mesh for _, mesh in sorted(near))
        return tuple(shapes)[: 2 if keeps else 1]

    @property
    def totals(self) -> list[UnitCost]:
        """The same without the shapes."""
        return [total for _, total in self.by_way]

    def fitting(
        self, count: int, limit: int, priced: int | None = None
    ) -> dict[tuple[int, ...], float]:
        """The least seconds of `count` microbatches in ways that fit, by logical shape.

        At the least, where another number of microbatches was `priced`.
        """
        found: dict[tuple[int, ...], float] = {}
        for mesh, known in self.by_way:
            total = known.with_rows((priced or count) / count)
            if total.bytes_for_one <= limit:
                seconds = count * total.seconds + total.once_seconds
                found[mesh] = min(found.get(mesh, math.inf), seconds)
        return found

    def expected(self, count: int, priced: int, limit: int) -> dict[tuple[int, ...], float]:
        """The seconds of `count` microbatches by logical shape, where another number was `priced`.

        Within the limit where they are expected to fit, else with any memory. Shapes of which
        only a guess is known, that of so many as were `priced`, take about as long with others.
        """
        free = {**self.by_mesh(math.inf), **self.fitting(count, sys.maxsize, priced)}
        return self.within(free, self.fitting(count, limit, priced))

    def within(
        self, free: ExpectedSeconds, fitting: ExpectedSeconds
    ) -> dict[tuple[int, ...], float]:
        """What a step is expected to take, where it is known with any memory and where it fits.

        Shapes of which only a guess is known take as much longer within the memory as the others.
        """
        planned = {mesh for mesh, _ in self.by_way}
        both = (fitting[mesh] / free[mesh] for mesh in fitting if free.get(mesh))
        longer = min(both, default=1.0)
        guessed = {mesh: longer * x for mesh, x in free.items() if mesh not in planned}
        return {**free, **guessed, **fitting}

    def misses_what_it_gathers(self, count: int, limit: int, priced: int) -> bool:
        """Whether layers do not fit in their quickest ways, mostly for their weights.

        What these ways gather for `count` microbatches is there throughout; at prices of memory it
        is not.
        """
        found = list[bool]()
        for mesh, way in self.costs.free_ways(self.num_devices):
            total = joined(way).with_rows(priced / count)
            least = min(x.bytes_fixed for other, x in self.by_way if other == mesh)
            missing, spared = total.bytes_for_one - limit, total.bytes_fixed - least
            found.append(missing > 0 and spared >= WORTH_GATHERING * missing)
            if missing <= 0:
                return False
        return any(found)

    def needed(self, count: int, priced: int) -> dict[tuple[int, ...], int]:
        """The least bytes of a device with `count` microbatches by logical shape, in the same way.

        At prices of memory too, where it does not fit with any.
        """
        found: dict[tuple[int, ...], int] = {}
        for mesh, known in self.by_way:
            size = known.with_rows(priced / count).bytes_for_one
            found[mesh] = min(found.get(mesh, size), size)
        return found

    def may_do(self, priced: int, count: int, limit: int, longest: float) -> bool:
        """Whether `count` microbatches may fit and be quick enough, where fewer were `priced`."""
        return min(self.fitting(count, limit, priced).values(), default=math.inf) <= longest


def find_bound(
    counts: Sequence[int],
    best_seconds: float,
    layers: Callable[[int], OneMeshCosts | None],
    limit: int,
    even: int = 0,
) -> OneMeshBound | None:
    """The microbatches with which one mesh may fit and be quicker than what fits elsewhere.

    From one number that does not fit, or only by what takes too long, to the first that may; what
    is told of twice as many by fewer rows is not priced again where it surely fits (not by the
    whole batch at once, which has no gradients to add up). Where nothing fits elsewhere, so that no
    number is too slow, the largest `even` number is priced next, or the most, and then those in the
    middle. Where layers meet better than each has it alone, a whole plan takes less, hence the
    margin; that of the whole batch is larger. What fits with more microbatches may be quicker than
    what fits with fewer only by other shards; but none is quicker than the fewest with any memory.

    Args:
      counts: numbers of microbatches, ascending.
      best_seconds: of a step elsewhere.
      layers: what layers cost with so many microbatches; None: that is not known.
      limit: bytes that a device may hold.
      even: the most microbatches of which each device has a row. With fewer rows less is cut, so
        that more microbatches may need more memory.

    Returns:
      None where there is no such number.
    """
    while counts:
        count = counts[0]
        costs = layers(count)
        if costs is None:
            return OneMeshBound(count)
        longest = _longest(count, best_seconds)
        free = costs.by_mesh(longest)
        if min(free.values(), default=math.inf) > longest:
            return None
        fitting = costs.fitting(count, limit)
        if fitting and min(fitting.values()) <= longest:
            return OneMeshBound(count, costs.within(free, fitting))
        longest, counts = MARGIN * best_seconds, counts[1:]
        if count > 1:  # layers of the whole batch at once say too much of seconds and bytes
            nearly = int(MAY_MEET * limit)  # of so many more rows it is a guess
            counts = [more for more in counts if costs.may_do(count, more, nearly, longest)]
        if count > 1 and counts and counts[0] <= NEAR * count:  # one has no sums
            near = costs.fitting(counts[0], int(SURELY * limit), count)
            if near and min(near.values()) <= longest:
                return OneMeshBound(counts[0], costs.within(free, near))
        if math.isinf(best_seconds):
            return _first_that_fits(counts, layers, limit, even)
    return None


def _first_that_fits(
    counts: Sequence[int],
    layers: Callable[[int], OneMeshCosts | None],
    limit: int,
    even: int,
) -> OneMeshBound | None:
    """The same where time does not matter: up to even ones, more microbatches need less memory."""

    def bound(count: int) -> OneMeshBound | None:
        costs = layers(count)
        if costs is None:
            return OneMeshBound(count)
        fitting = costs.fitting(count, limit)
        return (
            OneMeshBound(count, costs.within(costs.by_mesh(math.inf), fitting)) if fitting else None
        )

    for most in dict.fromkeys(x for x in (even, *counts[-1:]) if x in counts):
        if found := bound(most):
            low, high = 0, counts.index(most) - 1
            while low <= high:
                middle = (low + high) // 2
                if less := bound(counts[middle]):
                    found, high = less, middle - 1
                else:
                    low = middle + 1
            return found
    return None


def largest_even(counts: Sequence[int], rows: Collection[int], num_devices: int) -> int:
    """The most microbatches that have as many rows for each device, of every batch; 0: none."""
    return max((n for n in counts if all(x % (n * num_devices) == 0 for x in rows)), default=0)


def hoped_at_most(
    found: OneMeshBound | None,
    most: tuple[int, int],
    known: Mapping[int, OneMeshCosts | None],
    limit: int,
) -> OneMeshBound:
    """What is tried where nothing fits elsewhere, and layers need about as much as there is.

    Where they may need more with any number of microbatches, the most are tried first, on the
    logical shapes on which they may need least: that says what is missing. With fewer it is tried
    where that needs hardly more than there is.

    Args:
      found: what may fit with a little more memory than the limit.
      most: the most microbatches of which each device has a row, and the most of all.
      known: what layers cost with some numbers of microbatches.
      limit: bytes that a device may hold.
    """
    even, last = most
    surely = any(x and x.fitting(count, limit) for count, x in known.items())
    if found is None:
        return last_try(last, known.get(last))
    first = even if even > found.fewest else last
    if surely or found.fewest == first:
        return found
    return last_try(first, known.get(first))._replace(hoped=found.fewest)


def last_try(count: int, layers: OneMeshCosts | None) -> OneMeshBound:
    """So many microbatches, on the logical shapes on which they may need least."""
    if layers is None:
        return OneMeshBound(count)
    return OneMeshBound(count, {}, layers.smallest(), layers.smallest(keeps=False))


def worth_pricing(
    counts: Sequence[int], best_seconds: float, stages: StageSearch, limit: int, state: int
) -> list[int]:
    """The numbers of microbatches with which one mesh may do, by what layers cost on submeshes.

    The devices of a larger mesh together take no less time than those of a part of it, which send
    each other less. So what layers take with any memory on the largest submesh is a bound, scaled
    to the rows of a microbatch. And all devices together keep the activations of a microbatch, and
    hold about as much as those of smaller meshes; the whole batch at once needs no sums beside, but
    the state and what one layer works with.

    Args:
      counts: numbers of microbatches.
      best_seconds: of a step elsewhere.
      stages: what layers cost with some number of microbatches.
      limit: bytes that a device may hold.
      state: bytes that all devices hold of it between steps, at the least.
    """
    devices = stages.cluster.num_devices
    totals = {size: [*map(joined, ways)] for size, ways in stages.ways.items() if ways}
    if not totals:
        return [*counts]
    largest = max(totals)
    left = list[int]()
    for count in counts:
        rows = stages.num_microbatches / count
        costs = [total.with_rows(rows) for total in totals[largest]]
        least = min(count * total.seconds + total.once_seconds for total in costs)
        parts = [(size, total.with_rows(rows)) for size, ways in totals.items() for total in ways]
        kept = min(size * total.bytes_per_microbatch for size, total in parts)
        needed = state + KEPT_AT_LEAST * kept
        if count > 1:
            whole = min(size * total.bytes_for_one for size, total in parts)
            needed = max(needed, NEEDED_AT_LEAST * whole)
        else:
            needed += min(size * total.bytes_working for size, total in parts)
        fits = needed <= limit * devices
        if fits and least * largest / devices <= _longest(count, best_seconds):
            left.append(count)
    return left


def working_within(
    counts: Sequence[int], known: Mapping[int, OneMeshCosts | None], limit: int
) -> list[int]:
    """The numbers of microbatches with which one mesh may fit that keeps nothing of them.

    It holds its state and works on one microbatch, as far as layers were priced: with every number
    that was, for the worst moment of few rows says little of many. At the least the most of these
    numbers: two layers that read one leaf are counted with it each.
    """
    priced = {count: costs for count, costs in known.items() if costs is not None}
    if not priced:
        return [*counts]

    def may_fit(count: int, known: int) -> bool:
        needs = (
            total.bytes_fixed + total.with_rows(known / count).bytes_working
            for total in priced[known].totals
        )
        return any(need <= MAY_MEET * limit for need in needs)

    fitting = [count for count in counts if all(may_fit(count, known) for known in priced)]
    return fitting or [*counts[-1:]]


def _longest(count: int, best_seconds: float) -> float:
    """What the layers of one mesh may take with so many microbatches."""
    return (MARGIN if count > 1 else ONE_BATCH_MARGIN) * best_seconds
