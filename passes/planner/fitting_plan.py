"""The cheapest plan of a stage on a logical mesh that fits, where the cheapest of all does not."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace

from autopar.passes.planner.planned_stage import PlannedStage
from autopar.passes.planner.stage_shardings import ENOUGH_OF_LARGE, HOPELESS, MeshSearch
from autopar.passes.solver import TooDear

ENOUGH_AT_PRICES = 0.25  # a plan at a price is taken that lacks at most this part of its cost

ComputesAgain = Callable[[PlannedStage, PlannedStage], PlannedStage | None]
"""Of a plan that does not fit, and what else there is: what fits by computing some values again."""


def fitting_plan(
    search: MeshSearch,
    first: PlannedStage,
    expected: float = 0.0,
    *,
    is_only: bool = True,
    computes_again: ComputesAgain | None = None,
) -> PlannedStage:
    """The cheapest plan that fits; where none does, the smallest.

    `first` is the cheapest of all, which does not fit. Of a large stage, one is enough that takes
    hardly more than what is `expected`, or than with any memory: at a price of memory, or as it
    `computes_again` some of its values. What fits in neither way is nothing, if it must fit, or is
    not the only mesh that is left to try.
    """
    ways, is_staged = list[PlannedStage](), search.place is not None and search.hurries
    again: PlannedStage | None = None
    if is_staged:
        ways = [search.at_least_price(first)]
        enough = ENOUGH_OF_LARGE * max(first.least_seconds, expected)
        if _seconds(ways) <= enough:
            return replace(ways[0], unlimited=first)
        first = search.checked(first)
        if computes_again is not None and not first.fits:
            found = computes_again(first, ways[0])
            again = found if found is not None and found.fits else None
            if again is not None and again.step_seconds <= enough:
                return again
    made = [first, *(search.rematerialized(first) for _ in search.remats[1:])]
    small = [] if search.hurries else search.small(made[-1])
    if small and min(x.peak.bytes for x in small) > HOPELESS * search.limit:
        best = min([*made, *small, *search.least(search.remats[-1])], key=lambda x: x.peak.bytes)
        return best if best is first else replace(best, unlimited=first)
    if is_staged:
        ways += made
        some = [again] if again is not None else []
        for all_again in made[1:]:
            most = _seconds([*ways, *some])
            if not all_again.fits and ENOUGH_OF_LARGE * all_again.step_seconds < most:
                ways.append(search.at_least_price(all_again))
        priced = _seconds(ways)
        assert search.place is not None
        if math.isinf(priced) and search.place.must_fit and again is not None:
            return again
        if math.isinf(priced) and (search.place.must_fit or (not is_only and again is None)):
            return replace(min(ways, key=lambda x: x.peak.bytes), unlimited=first)
        made += [x for x in (*ways, *some) if x.fits]
        if priced * (1 - ENOUGH_AT_PRICES) <= first.least_seconds:
            best = min((x for x in made if x.fits), key=lambda x: x.step_seconds)
            return replace(best, unlimited=first)
    with contextlib.suppress(TooDear):  # else something fits that is as quick
        made.append(search.tightened(first, at_most=_seconds(made)))
    if not any(x.fits for x in made) and len(search.remats) > 1:
        made.append(search.tightened(made[1]))
    if any(x.fits for x in made):
        # What was chosen for its bytes may be quicker than what the rows' account takes to fit.
        best = min((x for x in (*made, *small) if x.fits), key=lambda x: x.step_seconds)
    else:
        small = small or search.small(made[len(search.remats) - 1])
        made += [*small, *search.least(search.remats[-1])]
        best = min(made, key=lambda x: x.peak.bytes)
    return best if best is first else replace(best, unlimited=first)


def _seconds(planned: list[PlannedStage]) -> float:
    """What a step takes with the quickest that fits; infinite without any."""
    return min((x.step_seconds for x in planned if x.fits), default=math.inf)
