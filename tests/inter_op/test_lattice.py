"""Cut states: chains, predecessors and downsets."""

from __future__ import annotations

import doctest
import itertools
import random

import numpy as np
import pytest
from benchmark_modules import lattices

from autopar.passes.planner.stage_problem import StageProblem
from autopar.passes.planner.stage_sweep import tabulate


def test_predecessors() -> None:
    found = lattices.from_predecessors([(), (0,), (0,), (2,), (0, 1)])
    assert [after.tolist() for after in found] == [[1, 2, 4], [4], [3], [], []]
    # State 2 leads to 3 alone, which is not the end.
    problem = StageProblem(found, (), num_devices=1, max_count=1)
    assert tabulate(problem).longest.tolist() == [2, 1, -1, -1, 0]


@pytest.mark.parametrize("predecessors", [[[0]], [[1], []], [[], [-1]]])
def test_predecessors_must_be_earlier(predecessors: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="cannot precede"):
        lattices.from_predecessors(predecessors)


def test_successors_must_be_later_and_in_order() -> None:
    with pytest.raises(ValueError, match="successors of state 0"):
        StageProblem((np.array([2, 1]), np.array([2]), np.array([], dtype=np.intp)), (), 1, 1)
    with pytest.raises(ValueError, match="successors of state 1"):
        StageProblem((np.array([1]), np.array([1])), (), 1, 1)
    with pytest.raises(ValueError, match="needs a state"):
        StageProblem((), (), 1, 1)


@pytest.mark.parametrize("seed", range(10))
def test_downsets_are_all_sets_closed_under_predecessors(seed: int) -> None:
    source = random.Random(seed)
    predecessors = [[u for u in range(v) if source.random() < 0.3] for v in range(6)]
    closed = {
        frozenset(members)
        for size in range(7)
        for members in itertools.combinations(range(6), size)
        if all(set(predecessors[node]) <= set(members) for node in members)
    }
    found = lattices.downsets(predecessors, limit=64)
    assert found is not None
    sets = [frozenset(np.flatnonzero(row).tolist()) for row in found]
    assert set(sets) == closed
    assert len(sets) == len(closed)
    after = lattices.inclusion_lattice(found)
    for state, members in enumerate(sets):
        assert after[state].tolist() == [k for k, other in enumerate(sets) if members < other]


def test_more_downsets_than_the_limit() -> None:
    assert lattices.downsets([[], [], []], limit=7) is None
    found = lattices.downsets([[], [], []], limit=8)
    assert found is not None
    assert len(found) == 8


def test_a_cycle_is_refused() -> None:
    with pytest.raises(ValueError, match="cycle"):
        lattices.downsets([[], [2], [1]], limit=10)


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(lattices).failed == 0
