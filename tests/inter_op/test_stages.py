"""The stage search against all plans of small instances."""

from __future__ import annotations

import dataclasses
import doctest
import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inter_op.enumerate_plans import Options, Plan, largest_bytes, order, plans, step_seconds

from autopar.passes.planner import stage_choice as stages
from autopar.passes.planner.stage_choice import (
    ENOUGH_GAIN,
    StageChoice,
    StageOption,
    StageOptions,
    best_stages,
)

Oracle = Callable[[int, int, int], Sequence[StageOption]]
"""The options of layers start to stop (half open) on a submesh of so many devices; () if none."""


def options_of(num_layers: int, size: int, oracle: Oracle) -> StageOptions:
    """What an oracle says of all stages on submeshes of one size."""
    cells = {
        (start, stop): oracle(start, stop, size)
        for start, stop in itertools.combinations(range(num_layers + 1), 2)
    }
    shape = max(map(len, cells.values()), default=0), num_layers + 1, num_layers + 1
    names = [field.name for field in dataclasses.fields(StageOption)]
    arrays = {name: np.full(shape, np.inf if name == "seconds" else 0.0) for name in names}
    for cut, found in cells.items():
        for place, option in enumerate(found):
            for name in names:
                arrays[name][place, *cut] = getattr(option, name)
    return StageOptions(size, **arrays)


def best_by(
    num_layers: int, submeshes: Sequence[int], num_devices: int, oracle: Oracle, **others: Any
) -> StageChoice | None:
    """`best_stages` among what an oracle says."""
    options = [options_of(num_layers, size, oracle) for size in submeshes]
    found = best_stages(options, num_devices, **others, gain=0.0)
    hurried = best_stages(options, num_devices, **others)
    assert (found is None) == (hurried is None)
    if found is not None and hurried is not None:
        assert hurried.step_seconds * (1 - ENOUGH_GAIN) <= found.step_seconds
    return found


def random_options(
    seed: int, num_layers: int, submeshes: set[int], largest: int, layered: bool
) -> Options:
    """Up to three options per stage, of whole seconds so that sums are exact and ties are real.

    `layered` costs are those of uneven layers; the others have no structure at all, and gaps.
    """
    source = random.Random(seed)
    weights = [source.randint(0, largest) for _ in range(num_layers)]
    options: Options = {}
    for size in submeshes:
        for start in range(num_layers):
            for stop in range(start + 1, num_layers + 1):
                found = []
                for _ in range(source.randint(0 if not layered else 1, 3)):
                    work = sum(weights[start:stop]) if layered else source.randint(0, largest)
                    found.append(
                        StageOption(
                            seconds=-(-work // size) + source.randint(0, 1),
                            bytes_fixed=(stop - start) * source.randint(0, 3),
                            bytes_per_microbatch=source.randint(0, 3),
                            once_seconds=source.choice([0, 0, source.randint(0, largest)]),
                            awaited_seconds=source.choice([0, 0, source.randint(0, largest)]),
                        )
                    )
                options[start, stop, size] = found
    return options


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_layers=st.integers(1, 5),
    submeshes=st.sets(st.integers(1, 4), min_size=1, max_size=3),
    num_devices=st.integers(1, 6),
    num_microbatches=st.integers(1, 6),
    memory_limit=st.one_of(st.none(), st.integers(0, 14)),
    largest=st.sampled_from([1, 4, 20]),
    layered=st.booleans(),
    is_early=st.booleans(),
)
def test_equals_the_best_of_all_plans(
    seed: int,
    num_layers: int,
    submeshes: set[int],
    num_devices: int,
    num_microbatches: int,
    memory_limit: int | None,
    largest: int,
    layered: bool,
    is_early: bool,
) -> None:
    options = random_options(seed, num_layers, submeshes, largest, layered)
    source = random.Random(seed)
    each = [source.randint(0, largest) * is_early for _ in range(num_layers)]
    early = list(itertools.accumulate(each, initial=0.0))
    filled = [x / 2 for x in early]

    def in_flight(from_the_end: int) -> int:
        return min(from_the_end, num_microbatches)

    def cost(plan: Plan) -> float:
        return step_seconds(plan, options, num_microbatches, early, filled)

    fitting = [
        plan
        for plan in plans(num_layers, num_devices, options)
        if sum(stage.num_devices for stage in plan) == num_devices
        and (memory_limit is None or largest_bytes(plan, options, in_flight) <= memory_limit)
    ]
    found = best_by(
        num_layers,
        sorted(submeshes),
        num_devices,
        lambda start, stop, size: options[start, stop, size],
        num_microbatches=num_microbatches,
        memory_limit=memory_limit,
        early=early,
        filled=filled,
    )
    if not fitting:
        assert found is None
    else:
        best = min(fitting, key=lambda plan: (cost(plan), order(plan)))
        assert found is not None
        assert found.step_seconds == cost(best)
        assert StageChoice.of(found.stages, num_microbatches, early, filled) == found
        assert [stage[:3] for stage in found.stages] == [stage[:3] for stage in best]
        for stage, planned in zip(found.stages, best, strict=True):
            assert stage.option == options[planned[:3]][planned.option]


@pytest.mark.parametrize("seed", range(8))
def test_equals_the_best_of_all_plans_where_sums_round(seed: int) -> None:
    source = random.Random(seed)
    seconds = [source.random() ** 3 for _ in range(7)]
    options: Options = {
        (start, stop, size): [
            StageOption(
                sum(seconds[start:stop]) / size**share, stop - start, 1, once_seconds=share / 7
            )
            for share in (0.6, 0.9)
        ]
        for size in (1, 2, 3)
        for start in range(7)
        for stop in range(start + 1, 8)
    }
    best = min(
        step_seconds(plan, options, 9)
        for plan in plans(7, 6, options)
        if sum(stage.num_devices for stage in plan) == 6
        and largest_bytes(plan, options, lambda from_the_end: min(from_the_end, 9)) <= 5
    )
    found = best_by(
        7,
        [1, 2, 3],
        6,
        lambda start, stop, size: options[start, stop, size],
        num_microbatches=9,
        memory_limit=5,
    )
    assert found is not None
    assert found.step_seconds == pytest.approx(best, rel=1e-11)


def even(start: int, stop: int, size: int) -> list[StageOption]:
    """One second and 100 bytes a layer, divided by the devices."""
    work = stop - start
    return [StageOption(work / size, 100 * work // size, 10 * work // size)]


def test_equal_layers_and_equally_good_plans_give_the_fewest_stages() -> None:
    found = best_by(12, [1, 2, 4], 4, even, num_microbatches=1, memory_limit=None)
    assert found is not None
    assert [stage[:3] for stage in found.stages] == [(0, 12, 4)]

    def free(start: int, stop: int, size: int) -> list[StageOption]:
        # Steps of one microbatch take the same time whatever the split.
        return [StageOption((stop - start) / 3, 0, 0)]

    found = best_by(6, [1, 3], 3, free, num_microbatches=1, memory_limit=None)
    assert found is not None
    assert [stage[:3] for stage in found.stages] == [(0, 6, 3)]

    def exact(start: int, stop: int, size: int) -> list[StageOption]:
        return [StageOption((stop - start) / 4, 0, 0)]

    found = best_by(6, [1], 3, exact, num_microbatches=1, memory_limit=None)
    assert found is not None
    assert [stage[:3] for stage in found.stages] == [(0, 1, 1), (1, 2, 1), (2, 6, 1)]


def test_memory_moves_layers_to_the_later_stages() -> None:
    def oracle(start: int, stop: int, size: int) -> list[StageOption]:
        return [StageOption(stop - start, 0, stop - start)]

    roomy = best_by(12, [1], 3, oracle, num_microbatches=8, memory_limit=12)
    assert roomy is not None
    assert [stage.stop for stage in roomy.stages] == [4, 8, 12]
    tight = best_by(12, [1], 3, oracle, num_microbatches=8, memory_limit=9)
    assert tight is not None
    assert [stage.stop for stage in tight.stages] == [3, 7, 12]


def test_rematerialization_is_bought_only_where_memory_needs_it() -> None:
    def oracle(start: int, stop: int, size: int) -> list[StageOption]:
        layers = stop - start
        return [
            StageOption(3 * layers, 0, 4 * layers, remat=False),
            StageOption(4 * layers, 0, layers, remat=True),
        ]

    found = best_by(8, [1], 4, oracle, num_microbatches=4, memory_limit=17)
    assert found is not None
    assert [stage.option.remat for stage in found.stages] == [True, True, False, False]


def test_layers_that_no_submesh_can_run() -> None:
    assert best_by(3, [1], 3, lambda *_: [], num_microbatches=1, memory_limit=None) is None
    assert best_by(3, [], 3, lambda *_: [], num_microbatches=1, memory_limit=None) is None


def test_stages_that_cost_nothing() -> None:
    found = best_by(
        3, [1], 2, lambda *_: [StageOption(0.0, 0, 0)], num_microbatches=4, memory_limit=0
    )
    assert found is not None
    assert found.step_seconds == 0.0


@pytest.mark.full
def test_many_layers_on_many_devices() -> None:
    sizes = [1, 2, 4, 8, 16, 32, 64]
    source = random.Random(0)
    weights = [source.uniform(0.5, 1.5) for _ in range(48)]

    def oracle(start: int, stop: int, size: int) -> list[StageOption]:
        work = sum(weights[start:stop])
        return [
            StageOption(work / size**0.9 * slower, int(work * 1e6), int(work * 1e6 * kept))
            for slower, kept in ((1.0, 1.0), (1.1, 0.5), (1.3, 0.1))
        ]

    def seconds(num_devices: int) -> float:
        found = best_by(48, sizes, num_devices, oracle, num_microbatches=32, memory_limit=2e7)
        assert found is not None
        return found.step_seconds

    assert seconds(64) < seconds(48)


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(stages).failed == 0


def test_jax_is_not_imported() -> None:
    code = "import autopar.passes.planner.stage_choice, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert "autopar.passes.planner.stage_choice" in loaded.stdout.split()
    assert "jax" not in loaded.stdout.split()
