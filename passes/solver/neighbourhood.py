"""Large-neighbourhood search: free some nodes of the best choice, solve for them, repeat."""

from __future__ import annotations

from collections.abc import Callable

from autopar.passes.solver.budget import Budget
from autopar.passes.solver.model import Model


def search_neighbourhoods(
    model: Model,
    chosen: dict[int, int],
    budget: Budget,
    seed: int,
    found: Callable[[dict[int, int]], bool],
) -> int:
    """Returns the number of neighbourhoods looked at."""
    return 0
