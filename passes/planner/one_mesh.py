"""Whether one mesh of all devices can be quicker than stages, told by the layers of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from autopar.passes.planner.layouts import ExpectedSeconds
from autopar.passes.planner.unit_costs import UnitCost, UnitCosts

MARGIN = 1.02  # times what fits elsewhere: more than the layers of one mesh must take
ONE_BATCH_MARGIN = 1.25  # the same without microbatches


class OneMeshBound(NamedTuple):
    """The fewest microbatches with which one mesh may fit.

    And what a step is expected to take with them with any memory, by logical shape, where that is
    known.
    """

    fewest: int
    expected: ExpectedSeconds = MappingProxyType({})


@dataclass(frozen=True)
class OneMeshCosts:
    """What all layers cost on one mesh of all devices."""

    costs: UnitCosts
    num_devices: int

    @cached_property
    def by_mesh(self) -> dict[tuple[int, ...], float]:
        """The seconds of a step with any memory, by logical shape."""
        return self.costs.seconds_by_mesh(self.num_devices)

    @cached_property
    def totals(self) -> list[UnitCost]:
        """What each way of running them costs and needs."""
        return self.costs.totals(self.num_devices)


def find_bound(
    counts: Sequence[int],
    best_seconds: float,
    layers: Callable[[int], OneMeshCosts | None],
    limit: int,
) -> OneMeshBound | None:
    """The microbatches with which one mesh may fit and be quicker than what fits elsewhere.

    From one number that does not fit to the first that may. Where layers meet better than each has
    it alone, a whole plan takes less, hence the margin; the whole batch at once has no gradients to
    add up, hence a larger one. More microbatches only take longer.

    Args:
      counts: numbers of microbatches, ascending.
      best_seconds: of a step elsewhere.
      layers: what layers cost with so many microbatches; None: that is not known.
      limit: bytes that a device may hold.

    Returns:
      None where there is no such number.
    """
    while counts:
        count = counts[0]
        costs = layers(count)
        if costs is None:
            return OneMeshBound(count)
        longest = (MARGIN if count > 1 else ONE_BATCH_MARGIN) * best_seconds
        if min(costs.by_mesh.values(), default=math.inf) > longest:
            return None
        fitting = [total for total in costs.totals if total.bytes_for_one <= limit]
        if fitting:
            quickest = min(count * total.seconds + total.once_seconds for total in fitting)
            return None if quickest > longest else OneMeshBound(count, costs.by_mesh)
        longest = MARGIN * best_seconds
        counts = [more for more in counts[1:] if _may_do(costs.totals, count, more, limit, longest)]
    return None


def _may_do(totals: Sequence[UnitCost], count: int, more: int, limit: int, longest: float) -> bool:
    """Whether a way to run `count` microbatches may fit with more of them, and be quick enough."""
    for total in totals:
        fewer_rows = total.with_rows(count / more)
        seconds = more * fewer_rows.seconds + fewer_rows.once_seconds
        if fewer_rows.bytes_for_one <= limit and seconds <= longest:
            return True
    return False
