"""What nodes could have chosen instead, against all assignments of small problems."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.passes.solver import FORBIDDEN, Problem, solve
from autopar.passes.solver.alternatives import alternatives


def _problem(seed: int, edges: list[tuple[int, int]], sizes: list[int]) -> Problem:
    random = np.random.default_rng(seed)
    return Problem(
        intervals=((0, 0),) * len(sizes),
        node_costs=tuple(random.integers(0, 20, n) for n in sizes),
        usages=tuple(np.zeros(n, np.int64) for n in sizes),
        edges=tuple(edges),
        edge_costs=tuple(random.integers(0, 30, (sizes[u], sizes[v])) for u, v in edges),
    )


def _cost(problem: Problem, assignment: tuple[int, ...]) -> int:
    nodes = sum(int(c[s]) for c, s in zip(problem.node_costs, assignment, strict=True))
    pairs = zip(problem.edges, problem.edge_costs, strict=True)
    return nodes + sum(int(c[assignment[u], assignment[v]]) for (u, v), c in pairs)


def _best_without(problem: Problem, node: int, strategy: int) -> int:
    every = itertools.product(*(range(len(c)) for c in problem.node_costs))
    return min(_cost(problem, a) for a in every if a[node] != strategy)


TREE = [(0, 1), (1, 2), (1, 3), (3, 4)]
CIRCLES = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (3, 4)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("edges", [TREE, CIRCLES])
def test_the_best_alternative_of_a_small_problem(edges: list[tuple[int, int]], seed: int) -> None:
    problem = _problem(seed, edges, [3, 2, 4, 3, 1])
    solved = solve(problem)
    found = alternatives(problem, solved.assignment, range(5))
    assert sorted(found) == [0, 1, 2, 3]  # the last one has no choice
    for node, other in found.items():
        least = _best_without(problem, node, solved.assignment[node]) - solved.cost
        assert other.strategy != solved.assignment[node]
        assert other.more_cost >= least >= 0
        if edges is TREE:  # all of it is near enough, and the tree is exact
            assert other.more_cost == least


def test_a_difference_has_its_parts() -> None:
    problem = Problem(
        intervals=((0, 0),) * 2,
        node_costs=(np.array([5, 7]), np.array([1, 1])),
        usages=(np.zeros(2, np.int64),) * 2,
        edges=((0, 1),),
        edge_costs=(np.array([[0, 40], [30, 10]]),),
    )
    (other,) = alternatives(problem, (0, 0), [0]).values()
    assert (other.strategy, other.more_cost, other.own_cost) == (1, 12, 2)
    assert (other.neighbour, other.neighbour_cost) == (1, 10)


def test_nodes_alike_share_an_answer_and_keep_their_own_neighbours() -> None:
    rungs = 12
    costs, tie = np.array([1, 5]), np.array([[0, 9], [9, 0]])
    problem = Problem(
        intervals=((0, 0),) * (2 * rungs),
        node_costs=(costs,) * (2 * rungs),
        usages=(np.zeros(2, np.int64),) * (2 * rungs),
        edges=tuple((2 * i, 2 * i + 1) for i in range(rungs)),
        edge_costs=(tie,) * rungs,
    )
    found = alternatives(problem, (0,) * (2 * rungs), range(2 * rungs))
    assert {other.more_cost for other in found.values()} == {8}
    assert [found[i].neighbour for i in range(4)] == [1, 0, 3, 2]


def test_usage_is_told_and_does_not_forbid() -> None:
    """A holder of usage after the nodes follows what its node takes."""
    tie = np.array([[FORBIDDEN, 0], [0, FORBIDDEN]])
    problem = Problem(
        intervals=((0, 0), (2, 5)),
        node_costs=(np.array([3, 1]), np.zeros(2, np.int64)),
        usages=(np.zeros(2, np.int64), np.array([10, 70])),
        edges=((0, 1),),
        edge_costs=(tie,),
        usage_limit=80,
    )
    (cheap,) = alternatives(problem, (0,), [0]).values()
    assert (cheap.more_cost, cheap.more_usage) == (-2, 0)
    (large,) = alternatives(problem, (1,), [0]).values()
    assert (large.more_cost, large.more_usage) == (2, 60)
