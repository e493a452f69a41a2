"""The integer program: its optimum is the cheapest of all assignments, with and without a limit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from autopar.base.costs import to_picoseconds
from autopar.passes.sharding.integer_program import to_problem
from autopar.passes.sharding.layout import local_shape
from autopar.passes.sharding.peak_memory import FUSION_REACH
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.solver import Infeasible, solve
from sharding.steps import Passes, graph_of, shaped


def tiny_step(weights: Any, x: Any) -> Any:
    return weights - x.T @ (x @ weights)


@pytest.fixture(scope="module")
def built() -> StrategyGraph:
    """Two inputs and two products on two devices: a few hundred assignments."""
    return Passes(graph_of(tiny_step, shaped(64, 64), shaped(256, 64)), (2,)).build()


def assignments(built: StrategyGraph) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(node.num_strategies) for node in built.nodes))


def cost(built: StrategyGraph, assignment: tuple[int, ...]) -> int:
    """Picoseconds of an assignment; every price is rounded by itself."""
    nodes = (node.seconds[s] for node, s in zip(built.nodes, assignment, strict=True))
    edges = (table[assignment[u], assignment[v]] for (u, v), table in built.edges.items())
    return sum(map(to_picoseconds, map(float, itertools.chain(nodes, edges))))


def usage(built: StrategyGraph, assignment: tuple[int, ...]) -> int:
    """Bytes at the worst time: every value that is not fused away, while it is alive."""
    alive = [0] * (built.time + 2)
    for value in built.values:
        first, last = value.live.first, value.live.last
        if last > first and not (value.live.fused and last - first <= FUSION_REACH):
            layout = value.layouts[assignment[value.node]]
            size = math.prod(local_shape(value.shape, layout, built.mesh)) * value.itemsize
            for time in range(first, last + 1):
                alive[time] += size
    return max(alive)


def test_the_optimum_is_the_cheapest_assignment(built: StrategyGraph) -> None:
    costs = [cost(built, a) for a in assignments(built)]
    assert 100 < len(costs) < 1000 and len(set(costs)) > 50
    solution = solve(to_problem(built, None))
    assert solution.cost == min(costs) == cost(built, solution.assignment)
    assert solution.lower_bound == solution.cost and solution.gap == 0


def test_the_optimum_within_every_limit(built: StrategyGraph) -> None:
    every = [(usage(built, a), cost(built, a)) for a in assignments(built)]
    least = min(needed for needed, _ in every)
    limits = sorted({needed for needed, _ in every})
    assert len(limits) > 3
    optima = []
    for limit in limits:
        solution = solve(to_problem(built, limit))
        chosen = solution.assignment[: len(built.nodes)]
        assert usage(built, chosen) <= limit
        expected = min(price for needed, price in every if needed <= limit)
        assert solution.cost == expected == cost(built, chosen)
        optima.append(solution.cost)
    assert optima == sorted(optima, reverse=True) and optima[0] > optima[-1]
    with pytest.raises(Infeasible) as caught:
        solve(to_problem(built, least - 1))
    assert caught.value.smallest_usage == least


def test_prices_are_integers_and_ties_forbid(built: StrategyGraph) -> None:
    problem = to_problem(built, 2**40)
    assert len(problem.node_costs) == len(built.nodes)  # nothing is large beside such a limit
    problem = to_problem(built, 2**16)
    assert len(problem.node_costs) > len(built.nodes)
    assert all(table.dtype == np.int64 for table in (*problem.node_costs, *problem.edge_costs))
    for (_, holder), table in zip(problem.edges, problem.edge_costs, strict=True):
        if holder >= len(built.nodes):  # a value has exactly one size in every strategy
            assert (np.count_nonzero(table == 0, axis=1) == 1).all()
