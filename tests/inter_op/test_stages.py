"""The stage search against all plans of small instances, and what it says about bad input."""

from __future__ import annotations

import doctest
import pickle
import random
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inter_op.enumerate_plans import Options, Plan, largest_bytes, order, plans, step_seconds

from autopar.base.errors import MemoryLimitError, OptionError
from autopar.passes.planner import stage_choice as stages
from autopar.passes.planner.stage_choice import StageOption, best_stages

IN_FLIGHT: dict[str, Callable[[int, int], int]] = {
    "1f1b": min,
    "eager": lambda from_the_end, microbatches: min(2 * from_the_end - 1, microbatches),
    "gpipe": lambda from_the_end, microbatches: microbatches,
}


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
    num_stages=st.one_of(st.none(), st.integers(1, 4)),
    all_devices=st.booleans(),
    schedule=st.sampled_from(sorted(IN_FLIGHT)),
    largest=st.sampled_from([1, 4, 20]),
    layered=st.booleans(),
)
def test_equals_the_best_of_all_plans(
    seed: int,
    num_layers: int,
    submeshes: set[int],
    num_devices: int,
    num_microbatches: int,
    memory_limit: int | None,
    num_stages: int | None,
    all_devices: bool,
    schedule: str,
    largest: int,
    layered: bool,
) -> None:
    options = random_options(seed, num_layers, submeshes, largest, layered)

    def in_flight(from_the_end: int) -> int:
        return IN_FLIGHT[schedule](from_the_end, num_microbatches)

    def cost(plan: Plan) -> float:
        return step_seconds(plan, options, num_microbatches)

    possible = [
        plan
        for plan in plans(num_layers, num_devices, options)
        if num_stages in (None, len(plan))
        and (not all_devices or sum(stage.num_devices for stage in plan) == num_devices)
    ]
    needed = {plan: largest_bytes(plan, options, in_flight) for plan in possible}
    fitting = [plan for plan in possible if memory_limit is None or needed[plan] <= memory_limit]

    def search() -> stages.StageChoice:
        return best_stages(
            num_layers,
            sorted(submeshes),
            num_devices,
            lambda start, stop, size: options[start, stop, size],
            num_microbatches=num_microbatches,
            memory_limit=memory_limit,
            in_flight=IN_FLIGHT[schedule],
            num_stages=num_stages,
            all_devices=all_devices,
        )

    if not possible:
        with pytest.raises(OptionError):
            search()
    elif not fitting:
        with pytest.raises(MemoryLimitError) as error:
            search()
        assert error.value.least_bytes == min(needed.values())
    else:
        best = min(fitting, key=lambda plan: (cost(plan), order(plan)))
        found = search()
        assert found.step_seconds == cost(best)
        assert [stage[:3] for stage in found.stages] == [stage[:3] for stage in best]
        for stage, planned in zip(found.stages, best, strict=True):
            assert stage.option is options[planned[:3]][planned.option]
        assert max(found.bytes_per_device) == needed[best]


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
    found = best_stages(
        7,
        [3, 1, 2, 2],
        6,
        lambda start, stop, size: options[start, stop, size],
        num_microbatches=9,
        memory_limit=5,
    )
    assert found.step_seconds == pytest.approx(best, rel=1e-11)


def even(start: int, stop: int, size: int) -> list[StageOption]:
    """One second and 100 bytes a layer, divided by the devices."""
    work = stop - start
    return [StageOption(work / size, 100 * work // size, 10 * work // size, f"{work} on {size}")]


def test_equal_layers_and_equally_good_plans_give_the_fewest_stages() -> None:
    found = best_stages(12, [1, 2, 4], 4, even, num_microbatches=1, memory_limit=None)
    assert [stage[:3] for stage in found.stages] == [(0, 12, 4)]

    def free(start: int, stop: int, size: int) -> list[StageOption]:
        # Steps of one microbatch take the same time whatever the split.
        return [StageOption((stop - start) / 3, 0, 0)]

    found = best_stages(6, [1], 3, free, num_microbatches=1, memory_limit=None, all_devices=False)
    assert [stage[:3] for stage in found.stages] == [(0, 6, 1)]

    def exact(start: int, stop: int, size: int) -> list[StageOption]:
        return [StageOption((stop - start) / 4, 0, 0)]

    found = best_stages(6, [1], 3, exact, num_microbatches=1, memory_limit=None)
    assert [stage[:3] for stage in found.stages] == [(0, 1, 1), (1, 2, 1), (2, 6, 1)]


def test_memory_moves_layers_to_the_later_stages() -> None:
    def oracle(start: int, stop: int, size: int) -> list[StageOption]:
        return [StageOption(stop - start, 0, stop - start)]

    roomy = best_stages(12, [1], 3, oracle, num_microbatches=8, memory_limit=12)
    assert [stage.stop for stage in roomy.stages] == [4, 8, 12]
    tight = best_stages(12, [1], 3, oracle, num_microbatches=8, memory_limit=9)
    assert [stage.stop for stage in tight.stages] == [3, 7, 12]
    assert tight.bytes_per_device == (9, 8, 5)


def test_rematerialization_is_bought_only_where_memory_needs_it() -> None:
    def oracle(start: int, stop: int, size: int) -> list[StageOption]:
        layers = stop - start
        return [
            StageOption(3 * layers, 0, 4 * layers, "kept"),
            StageOption(4 * layers, 0, layers, "recomputed"),
        ]

    found = best_stages(8, [1], 4, oracle, num_microbatches=4, memory_limit=17, num_stages=4)
    assert [stage.option.choice for stage in found.stages] == [
        "recomputed",
        "recomputed",
        "kept",
        "kept",
    ]


def test_prints() -> None:
    found = best_stages(3, [1], 2, even, num_microbatches=2, memory_limit=None)
    assert str(found) == (
        "2 stages, 2 microbatches: 5 s a step\n"
        "  layer 0 on 1 device: 1 s a microbatch, 2 in flight, 120 B per device, 1 on 1\n"
        "  layers 1..2 on 1 device: 2 s a microbatch, 1 in flight, 220 B per device, 2 on 1"
    )


def test_what_does_not_fit_is_named() -> None:
    def oracle(start: int, stop: int, size: int) -> list[StageOption]:
        held = [
            (f"params.layer_{layer}", 1000 if layer == 2 else 10) for layer in range(start, stop)
        ]
        return [StageOption(1.0, sum(size for _, size in held), 7, tensors=tuple(held))]

    with pytest.raises(MemoryLimitError) as caught:
        best_stages(4, [1], 3, oracle, num_microbatches=4, memory_limit=512)
    error = caught.value
    # Layer 2 with layer 3 needs 1010 + 7 bytes; alone as the second of three 1000 + 2 * 7.
    assert error.least_bytes == 1014
    assert error.largest_tensors == (
        ("params.layer_2", 1000),
        ("what 2 microbatches in flight keep", 14),
    )
    assert "stage 2 of 3" in str(error) and "layer 2 on 1 device" in " ".join(str(error).split())
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_another_number_of_stages_that_fits_is_proposed() -> None:
    def whole(start: int, stop: int, size: int) -> list[StageOption]:
        return [StageOption((stop - start) / size, 100 * (stop - start), 10)]

    with pytest.raises(MemoryLimitError, match="use 4 stages, which fit"):
        best_stages(4, [1, 2], 4, whole, num_microbatches=4, memory_limit=150, num_stages=2)


@pytest.mark.parametrize(
    ("layers", "submeshes", "devices", "microbatches", "num_stages", "message"),
    [
        (4, [1, 2], 8, 4, 5, "5 stages are more than the 4 layers"),
        (8, [1, 2], 4, 4, 5, "5 stages are more than the 4 devices"),
        (4, [], 4, 4, None, "no submesh for a stage on 4 devices"),
        (4, [8], 4, 4, None, "no submesh for a stage on 4 devices"),
        (4, [0, 1], 4, 4, None, "devices of a submesh must be at least 1, not 0"),
        (4, [3], 8, 4, None, "do not add up to 8 devices in at most 4 stages"),
        (4, [1, 2], 8, 4, 3, "do not add up to 8 devices in exactly 3 stages"),
        (4, [4], 8, 4, 3, "do not add up to 8 devices in exactly 3 stages"),
        (0, [1], 8, 4, None, "number of layers must be at least 1, not 0"),
        (4, [1], 0, 4, None, "number of devices must be at least 1, not 0"),
        (4, [1], 4, 0, None, "number of microbatches must be at least 1, not 0"),
        (4, [1], 4, 4, 0, "number of stages must be at least 1, not 0"),
    ],
)
def test_numbers_that_do_not_fit_together(
    layers: int,
    submeshes: list[int],
    devices: int,
    microbatches: int,
    num_stages: int | None,
    message: str,
) -> None:
    with pytest.raises(OptionError) as caught:
        best_stages(
            layers,
            submeshes,
            devices,
            even,
            num_microbatches=microbatches,
            memory_limit=None,
            num_stages=num_stages,
        )
    assert message in caught.value.what


def test_layers_that_no_submesh_can_run() -> None:
    with pytest.raises(OptionError, match="No stages cover the 3 layers"):
        best_stages(3, [1], 3, lambda *_: [], num_microbatches=1, memory_limit=None)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_costs_are_finite_and_not_negative(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds of a stage must be finite"):
        StageOption(seconds, 0, 0)


def test_stages_that_cost_nothing() -> None:
    found = best_stages(
        3, [1], 2, lambda *_: [StageOption(0.0, 0, 0)], num_microbatches=4, memory_limit=0
    )
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

    def seconds(all_devices: bool) -> float:
        return best_stages(
            48,
            sizes,
            64,
            oracle,
            num_microbatches=32,
            memory_limit=2e7,
            all_devices=all_devices,
        ).step_seconds

    assert seconds(all_devices=False) <= seconds(all_devices=True)


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(stages).failed == 0


def test_jax_is_not_imported() -> None:
    code = "import autopar.passes.planner.stage_choice, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert "autopar.passes.planner.stage_choice" in loaded.stdout.split()
    assert "jax" not in loaded.stdout.split()
