"""The smallest peak usage, for a problem that has no solution: by how much the limit is missed.

All costs but the forbidden ones are set to zero, and the limit is bisected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autopar.passes.solver.budget import Stop, never
from autopar.passes.solver.flat import Flat
from autopar.passes.solver.problem import FORBIDDEN, Integers, Problem

Feasible = Callable[[Problem], tuple[tuple[int, ...] | None, bool]]
"""Finds an assignment; if there is none, says whether that is proven."""


@dataclass(frozen=True)
class SmallestPeak:
    """The smallest peak found, where it is, and the proven bound below which no peak is."""

    usage: int
    interval: tuple[int, int]
    lower_bound: int


def smallest_peak(
    problem: Problem, feasible: Feasible, stop: Stop = never, steps: int = 64
) -> SmallestPeak | None:
    """The smallest peak usage of any allowed assignment, None if `feasible` finds no assignment."""
    if stop():
        return None
    free = replace(
        problem,
        node_costs=tuple(_only_forbidden(costs) for costs in problem.node_costs),
        edge_costs=tuple(_only_forbidden(costs) for costs in problem.edge_costs),
        usage_limit=None,
    )
    assignment, _ = feasible(free)
    if assignment is None:
        return None
    flat = Flat(free)
    usage, interval = flat.peak(np.array(assignment, np.int64))
    least, _ = Flat(
        replace(free, usages=tuple(np.full_like(u, u.min()) for u in free.usages))
    ).peak(np.zeros(free.num_nodes, np.int64))
    proven = tried = least
    for _ in range(steps):
        if tried >= usage or stop():
            break
        middle = (tried + usage) // 2
        assignment, certain = feasible(replace(free, usage_limit=middle))
        if assignment is not None:
            usage, interval = flat.peak(np.array(assignment, np.int64))
        else:
            tried = middle + 1
            if certain:
                proven = tried
    return SmallestPeak(usage, interval, min(proven, usage))


def _only_forbidden(costs: Integers) -> Integers:
    return np.where(costs >= FORBIDDEN, FORBIDDEN, 0).astype(np.int64)
