"""Whether one mesh of all devices can be quicker than stages, told by the layers of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from autopar.passes.planner.unit_costs import UnitCost, UnitCosts

MARGIN = 1.02  # times what fits elsewhere: more than the layers of one mesh must take
ONE_BATCH_MARGIN = 1.25  # the same without microbatches


class OneMeshBound(NamedTuple):
    """The fewest microbatches with which one mesh may fit.

    And what a step is expected to take with them with any memory, by logical shape, where that is
    known.
    """

    fewest: int
    expected: Mapping[tuple[int, ...], float] = MappingProxyType({})


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
        counts = [
            more
            for more in counts[1:]
            if any(total.with_rows(count / more).bytes_for_one <= limit for total in costs.totals)
        ]
    return None
