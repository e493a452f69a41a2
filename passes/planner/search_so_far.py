"""What is known when the logical meshes of a step are planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from autopar.passes.planner.layouts import ExpectedSeconds
from autopar.passes.planner.planned_stage import PlannedStage


class SearchSoFar(NamedTuple):
    """What is known when meshes are planned: a step that fits takes so long elsewhere.

    Whether `more_microbatches` can be tried after these, and what a step is `expected` to take on
    some of the meshes; the `only` meshes that are worth planning, if not all are, and those that
    are `too_small`, if there are others. The bytes that layers `need` of a device at the least tell
    which meshes cannot fit where another one does not. `again` is asked at most once, with a
    quick plan that keeps all and does not fit: it may find one that computes values again, and says
    what the quickest step takes that fits.
    """

    seconds: float = math.inf
    more_microbatches: bool = False
    expected: ExpectedSeconds = MappingProxyType({})
    only: tuple[tuple[int, ...], ...] = ()
    too_small: frozenset[tuple[int, ...]] = frozenset()
    need: Mapping[tuple[int, ...], int] = MappingProxyType({})
    again: Callable[[PlannedStage], float] = lambda planned: math.inf


NOTHING_SO_FAR = SearchSoFar()
