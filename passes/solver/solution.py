"""What the solver returns or raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.base.errors import AutoparError


@dataclass(frozen=True)
class Solution:
    """A feasible assignment, its exact cost, and how far it can be from the optimum.

    Args:
        assignment: the chosen strategy of each node.
        cost: the sum of the chosen node and edge costs.
        lower_bound: no feasible assignment costs less; proven.
        gap: `(cost - lower_bound) / |cost|`, zero for a proven optimum.
        stats: how it was found: sizes after reduction, the method, seconds, work.
    """

    assignment: tuple[int, ...]
    cost: int
    lower_bound: int
    gap: float
    stats: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"cost {self.cost}, lower bound {self.lower_bound}, gap {self.gap:.3%}"


class Infeasible(AutoparError):
    """No assignment keeps within the usage limit and avoids forbidden pairs, or none was found.

    Args:
        what: one sentence that says what is the matter.
        why: the reason.
        hint: what to try.
        smallest_usage: the smallest peak usage found, None if only forbidden pairs are in the way.
        interval: when that peak occurs, in the problem's time.
        proven: whether it is proven that there is no solution.
        lower_bound: no assignment has a smaller peak usage than this.
    """

    def __init__(
        self,
        what: str,
        *,
        why: str | None = None,
        hint: str | None = None,
        smallest_usage: int | None = None,
        interval: tuple[int, int] | None = None,
        proven: bool = False,
        lower_bound: int | None = None,
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.smallest_usage = smallest_usage
        self.interval = interval
        self.proven = proven
        self.lower_bound = lower_bound


class TooDear(Infeasible):
    """Every assignment that keeps within the limit costs more than what is of use; proven.

    Args:
        lower_bound_of_cost: no such assignment costs less.
    """

    def __init__(self, lower_bound_of_cost: int, most: int) -> None:
        super().__init__(
            f"Every assignment costs at least {lower_bound_of_cost}, more than {most}.",
            proven=True,
        )
        self.lower_bound_of_cost = lower_bound_of_cost


def relative_gap(cost: int, lower_bound: int) -> float:
    """`(cost - lower_bound) / |cost|`."""
    return (cost - lower_bound) / max(1, abs(cost))
