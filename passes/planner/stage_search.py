"""The exact search: the least sum + bottleneck over all plans that fit.

With a limit on the bottleneck, the least sum is a shortest path (`sweep`). Alpa tries every stage
cost as that limit, from the smallest, and stops where the limit alone costs as much as the best
plan (Zheng et al., OSDI 2022, section 5.2). Here the limits are bisected: the least sum falls as
the limit grows, so the sum at one limit bounds all plans below it, and most limits are never tried.

Costs are counted in ticks of 2**-46 of a good plan's cost. Sums of ticks are exact, so bounds are
too. What an oracle returns is itself rounded, so that plans that are equally good on paper differ
by a few ticks: every stage is charged 64 ticks on top, more than that noise, and the plan of fewest
stages wins. Among plans that still compare equal it is the first in the order of their stages.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from autopar.passes.planner.stage_problem import PathStep, StagePath, StageProblem
from autopar.passes.planner.stage_sweep import (
    StageCosts,
    StageTables,
    bottleneck_cost,
    costs_of,
    least,
    summed_cost,
    sweep,
    tabulate,
    trace,
)

TICK_BITS = 46
"""A good plan costs at most 2**46 ticks, so that sums of 128 such costs are still exact."""

STAGE_TICKS = 64.0
"""What each stage is charged: 9e-13 of the cost."""


def best_path(problem: StageProblem, at_most: float = math.inf) -> StagePath | None:
    """The plan of least cost that fits; None where no plan does, or all cost more than `at_most`.

    Where only bottlenecks count, one sweep of minima over maxima is exact. Otherwise the plan is
    optimal up to the rounding to ticks and the charge per stage, a relative 1e-12 for each stage.

    >>> from autopar.passes.planner.stage_problem import StageKind
    >>> seconds = np.full((1, 4, 4), np.inf)
    >>> for i, j in ((0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 3)):
    ...     seconds[0, i, j] = sum([2.0, 1.0, 1.0][i:j])
    >>> kind = StageKind(devices=1, weight=1, bottleneck=7 * seconds, summed=seconds)
    >>> chain = tuple(np.arange(cut + 1, 4) for cut in range(4))
    >>> path = best_path(StageProblem(chain, (kind,), num_devices=2, max_count=2))
    >>> [(step.start, step.stop) for step in path.steps], path.cost
    ([(0, 1), (1, 3)], 18.0)
    """
    tables = tabulate(problem.in_larger_units, at_most * (1 + 1e-12))
    value = sweep(tables, bottleneck_cost, np.maximum)
    if math.isinf(least(tables, value)[0]):
        return None
    narrow = _path(tables, trace(tables, value, bottleneck_cost, np.maximum))
    if all(kind.summed is None for kind in problem.kinds):
        return narrow if narrow.cost <= at_most else None
    unlimited = summed_cost(np.inf)
    value = sweep(tables, unlimited, np.add)
    lowest_sum = least(tables, value)[0]
    wide = _path(tables, trace(tables, value, unlimited, np.add))
    if lowest_sum + narrow.bottleneck > at_most * (1 + 1e-12):
        return None
    bound = min(narrow.cost, wide.cost, at_most)
    tick = 2.0 ** (math.ceil(math.log2(bound)) - TICK_BITS) if bound > 0 else 1.0
    slack = bound * (1 + 1e-12)
    ticks = _in_ticks(tables, tick, slack, slack - lowest_sum)
    steps = _bisect(ticks)
    found = _path(tables, steps) if steps else None
    return found if found and found.cost <= at_most * (1 + 1e-12) else None


def _path(tables: StageTables, steps: tuple[PathStep, ...]) -> StagePath:
    return StagePath(steps, *costs_of(tables, steps))


def _in_ticks(
    tables: StageTables, tick: float, largest: float, largest_bottleneck: float
) -> StageTables:
    """The costs in whole ticks, without the stages that no plan as good as `largest` can have."""

    def rounded(cell: StageCosts) -> StageCosts:
        costs = cell.summed, cell.bottleneck
        possible = (np.add(*costs) <= largest) & (cell.bottleneck <= largest_bottleneck)
        summed, bottleneck = (np.rint(np.where(possible, x, 0.0) / tick) for x in costs)
        return cell._replace(summed=summed + STAGE_TICKS, bottleneck=bottleneck).only(possible)

    cells = tuple(tuple(rounded(cell) for cell in row) for row in tables.cells)
    return tables._replace(cells=cells)


def _bisect(tables: StageTables) -> tuple[PathStep, ...]:
    """The best plan over all limits on the bottleneck.

    An interval of limits carries a lower bound of the sum of every plan under them; together with
    its smallest limit this bounds their cost. The interval of the least bound is split first, at
    its middle limit. Bounds equal to the best cost are still followed: ties are broken by rule.
    """
    limits = np.concatenate([cell.bottleneck.ravel() for row in tables.cells for cell in row])
    limits = np.unique(limits)
    limits = limits[np.isfinite(limits)]
    best: tuple[float, int, tuple[PathStep, ...]] = (math.inf, 0, ())
    intervals: list[tuple[float, int, int, float]] = []

    def enqueue(first: int, last: int, lowest_sum: float) -> None:
        if first <= last:
            bound = lowest_sum + float(limits[first])
            heapq.heappush(intervals, (bound, first, last, lowest_sum))

    def attempt(first: int, limit: int) -> None:
        """Finds the best plan under one limit; leaves the lower limits that it does not answer."""
        nonlocal best
        cost = summed_cost(float(limits[limit]))
        value = sweep(tables, cost, np.add)
        summed, count = least(tables, value)
        if math.isfinite(summed):
            steps = trace(tables, value, cost, np.add)
            used = costs_of(tables, steps)[1]
            best = min(best, (summed + used, count, steps))
            # The limits from `used` to this one have the same sum and are no better.
            enqueue(first, int(np.searchsorted(limits, used)) - 1, summed)

    if limits.size:
        attempt(0, len(limits) - 1)
    while intervals and intervals[0][0] <= best[0]:
        _, first, last, lowest_sum = heapq.heappop(intervals)
        last = min(last, int(np.searchsorted(limits, best[0] - lowest_sum, side="right")) - 1)
        middle = (first + last) // 2
        attempt(first, middle)
        enqueue(middle + 1, last, lowest_sum)
    return best[2]
