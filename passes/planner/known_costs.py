"""What the search for layouts has found out, by numbers of microbatches."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

from autopar.passes import microbatch
from autopar.passes.planner.auto_stages import StageSearch
from autopar.passes.planner.candidates import PlannedStep
from autopar.passes.planner.layouts import ExpectedSeconds, StageLayout
from autopar.passes.planner.least_memory import LeastMemory
from autopar.passes.planner.one_mesh import OneMeshCosts
from autopar.passes.planner.split_step import SplitStep

KEPT_SPLITS = 3  # the last ones
FAR = 4  # times the microbatches that layers were priced with, of which these tell


class PricedStages(NamedTuple):
    """A split step, the search for its stages, and what that finds within the memory first."""

    split: SplitStep
    search: StageSearch
    first: tuple[StageLayout, float] | None

    @property
    def promise(self) -> float:
        """The seconds of a step with these stages; infinite where none fit."""
        return math.inf if self.first is None else self.first[1]


class KnownCosts(NamedTuple):
    """What layers cost, by microbatches; a batch is not divided into more than `inexact` say.

    `analyses` are of steps that one loop over their microbatches does for; `misfits` are plans for
    one mesh that do not fit; `splits` are the last that were made, with one loop or none,
    by microbatches and whether they have it. `least` is what every plan has, by the device's name
    and the leaves that may be away from it.
    """

    stages: dict[int, PricedStages]
    one_mesh: dict[int, OneMeshCosts | None]
    inexact: list[int]
    analyses: dict[int, microbatch.Analysis]
    misfits: list[PlannedStep]
    splits: dict[tuple[int, bool], SplitStep]
    least: dict[tuple[str, frozenset[int]], LeastMemory]

    def keep_split(self, count: int, is_loop: bool, split: SplitStep) -> SplitStep:
        """A step that was split, of which others may want what is known of it."""
        for oldest in list(self.splits)[: 1 - KEPT_SPLITS]:
            del self.splits[oldest]
        self.splits[count, is_loop] = split
        return split

    def on_one_mesh(self, count: int, limit: int) -> dict[str, Any]:
        """What a step is expected to take, and layers need, on logical shapes of one mesh.

        As far as they were priced with about as many microbatches, or fewer; {}: they were not.
        """
        priced, costs = self._nearest(count)
        if costs is None:
            return {}
        expected = costs.expected(count, priced, limit)
        return {"expected": expected, "need": costs.needed(count, priced)}

    def misses_what_it_gathers(self, count: int, limit: int) -> bool:
        """Whether layers on one mesh do not fit, as far as they tell, mostly for their weights."""
        priced, costs = self._nearest(count)
        return costs is not None and costs.misses_what_it_gathers(count, limit, priced)

    def with_fewer(self, count: int) -> ExpectedSeconds:
        """What a step takes on logical shapes of one mesh with any memory, as layers tell.

        Those that were priced with more microbatches, the next ones; {}: none were.
        """
        priced = [(n, costs) for n, costs in self.one_mesh.items() if costs and n > count]
        if not priced:
            return {}
        nearest, costs = min(priced, key=lambda item: item[0])
        return costs.expected(count, nearest, sys.maxsize)

    def _nearest(self, count: int) -> tuple[int, OneMeshCosts | None]:
        """What layers cost on one mesh with about as many microbatches, or fewer."""
        priced = max(
            (n for n, costs in self.one_mesh.items() if costs and 1 < n <= count), default=0
        )
        return priced, self.one_mesh[priced] if 0 < count <= FAR * priced else None

    @classmethod
    def nothing(cls) -> KnownCosts:
        """Before anything is priced."""
        return cls({}, {}, [], {}, [], {}, {})

    def elsewhere(self) -> KnownCosts:
        """What of it holds as well on another cluster, and with other options."""
        return self.nothing()._replace(analyses=self.analyses, splits=self.splits, least=self.least)
