"""The search on general lattices against all of their paths."""

from __future__ import annotations

import doctest
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from benchmark_modules import lattices, pipedream
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.passes.planner import stage_search as search
from autopar.passes.planner.stage_problem import StageKind, StageProblem, Successors
from autopar.passes.planner.stage_search import best_path

Path = tuple[tuple[int, int, int, int], ...]
"""Stages as (start, stop, kind, option)."""


def chain(num_layers: int) -> Successors:
    """Every cut of layers in a row."""
    return tuple(np.arange(cut + 1, num_layers + 1) for cut in range(num_layers + 1))


def random_problem(source: random.Random, sums: bool) -> StageProblem:
    """A lattice of five states with two or three kinds of stages, of whole costs."""
    states = 5
    lattice = lattices.from_predecessors(
        [[k for k in range(state) if source.random() < 0.8] for state in range(states)]
    )
    allowed = np.zeros((states, states), dtype=bool)
    for state, after in enumerate(lattice):
        allowed[state, after] = True
    kinds = []
    for _ in range(source.randint(1, 3)):
        options = source.randint(1, 2)
        arrays = [
            np.array(
                [
                    [[source.randint(0, 6) for _ in range(states)] for _ in range(states)]
                    for _ in range(options)
                ],
                dtype=np.float64,
            )
            for _ in range(4)
        ]
        missing = np.array([[source.random() < 0.1 for _ in range(states)] for _ in range(states)])
        divisor = source.randint(1, 2)
        kinds.append(
            StageKind(
                devices=source.randint(0, 2),
                weight=source.randint(0, 2),
                bottleneck=np.where(allowed & ~missing, arrays[0], np.inf),
                summed=arrays[1] if sums else None,
                bytes_fixed=arrays[2],
                bytes_per_microbatch=arrays[3],
                in_flight=lambda count, divisor=divisor: -(-count // divisor),  # type: ignore[misc]
            )
        )
    return StageProblem(
        lattice,
        tuple(kinds),
        num_devices=source.randint(1, 5),
        max_count=source.randint(0, 6),
        all_devices=source.random() < 0.5,
        memory_limit=source.choice([None, source.randint(2, 30)]),
    )


def paths(problem: StageProblem, start: int) -> Iterator[Path]:
    """All plans from a state to the end, whatever memory they need."""

    def extend(state: int) -> Iterator[Path]:
        if state == len(problem.successors) - 1:
            yield ()
        for stop in problem.successors[state]:
            for rest in extend(int(stop)):
                for index, kind in enumerate(problem.kinds):
                    for option in range(len(kind.bottleneck)):
                        if np.isfinite(kind.bottleneck[option, state, stop]):
                            yield ((state, int(stop), index, option), *rest)

    for path in extend(start):
        used = sum(problem.kinds[kind].devices for _, _, kind, _ in path)
        count = sum(problem.kinds[kind].weight for _, _, kind, _ in path)
        devices_fit = (
            used == problem.num_devices if problem.all_devices else used <= problem.num_devices
        )
        if devices_fit and count <= problem.max_count:
            yield path


def memory(problem: StageProblem, path: Path) -> float:
    """The bytes of the largest stage."""
    largest = 0.0
    count = 0
    for start, stop, index, option in reversed(path):
        kind = problem.kinds[index]
        count += kind.weight
        assert kind.bytes_fixed is not None
        assert kind.bytes_per_microbatch is not None
        kept = kind.bytes_per_microbatch[option, start, stop] * kind.in_flight(count)
        largest = max(largest, float(kind.bytes_fixed[option, start, stop] + kept))
    return largest


def bottleneck(problem: StageProblem, path: Path) -> float:
    return max(
        (float(problem.kinds[kind].bottleneck[option, i, j]) for i, j, kind, option in path),
        default=0.0,
    )


def cost(problem: StageProblem, path: Path) -> float:
    summed = 0.0
    for start, stop, index, option in path:
        array = problem.kinds[index].summed
        summed += 0.0 if array is None else float(array[option, start, stop])
    return summed + bottleneck(problem, path)


def order(problem: StageProblem, path: Path, sums: bool) -> tuple[int, int, Path]:
    """Among the best: fewest stages where costs add up, then the least count, then the first."""
    count = sum(problem.kinds[kind].weight for _, _, kind, _ in path)
    return (len(path) if sums else 0, count, path)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), sums=st.booleans())
def test_equals_the_best_of_all_paths(seed: int, sums: bool) -> None:
    problem = random_problem(random.Random(seed), sums)
    limit = math.inf if problem.memory_limit is None else problem.memory_limit
    fitting = [path for path in paths(problem, 0) if memory(problem, path) <= limit]
    found = best_path(problem)
    if not fitting:
        assert found is None
    else:
        assert found is not None
        best = min(fitting, key=lambda path: (cost(problem, path), order(problem, path, sums)))
        assert found.cost == cost(problem, best)
        assert tuple(step[:4] for step in found.steps) == best
        assert best_path(problem, found.cost) == found
        assert found.cost <= 0 or best_path(problem, 0.999 * found.cost) is None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_one_sweep_has_the_bottleneck_from_every_state(seed: int) -> None:
    problem = random_problem(random.Random(seed), sums=False)
    limit = math.inf if problem.memory_limit is None else problem.memory_limit
    found = pipedream.least_bottlenecks(problem)
    for state in range(len(problem.successors) - 1):
        costs = [
            bottleneck(problem, path)
            for path in paths(problem, state)
            if memory(problem, path) <= limit
        ]
        assert found[state] == min(costs, default=math.inf)


def test_costs_far_apart_stay_exact() -> None:
    # A stage that costs far more must not blur the difference between the good ones.
    seconds = np.full((2, 3, 3), 1e300)
    seconds[0, 0, 1], seconds[0, 1, 2], seconds[0, 0, 2] = 1e-6, 1.0000001e-6, 2.0000002e-6
    kind = StageKind(devices=1, weight=1, bottleneck=np.zeros((2, 3, 3)), summed=seconds)
    found = best_path(StageProblem(chain(2), (kind,), 2, 2, all_devices=False))
    assert found is not None
    assert [step.stop for step in found.steps] == [1, 2]


def test_what_does_not_fit_together_is_refused() -> None:
    ones = np.ones((1, 3, 3))
    with pytest.raises(ValueError, match="cannot have -1 devices"):
        StageKind(-1, 1, ones)
    with pytest.raises(ValueError, match="must not be negative"):
        StageKind(1, 1, -ones)
    with pytest.raises(ValueError, match="must not be negative"):
        StageKind(1, 1, ones, summed=ones * np.nan)
    with pytest.raises(ValueError, match="shapes differ"):
        StageKind(1, 1, ones, summed=np.ones((2, 3, 3)))
    with pytest.raises(ValueError, match="for 5 states"):
        StageProblem(chain(4), (StageKind(1, 1, ones),), 2, 2)


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(search).failed == 0
