"""The named schedules keep their closed forms, for many stages and microbatches."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import bare_schedules
import pytest
from bare_schedules import simulate_schedule
from schedules.reference_clock import times

from autopar.passes.schedules import make as make_module
from autopar.passes.schedules import schedule
from autopar.passes.schedules.make import make_schedule
from autopar.passes.schedules.named import SCHEDULES
from autopar.passes.schedules.schedule import Schedule

SIZES = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 5, 8, 12)]
TASK_SECONDS = [(1, 2), (3, 3), (7, 4)]


def spans(made: Schedule, seconds: dict[str, int]) -> list[int]:
    """The span of every mesh by the independent simulator."""
    every = {kind: [value] * made.num_stages for kind, value in seconds.items()}
    result = times(made.tasks, made.num_stages, every)
    return [
        max(result[task][1] for task in tasks) - min(result[task][0] for task in tasks)
        for tasks in made.tasks
    ]


@pytest.mark.parametrize("module", [schedule, make_module, bare_schedules])
def test_docstrings(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b"])
def test_makespan_is_that_of_a_full_pipeline(name: str) -> None:
    for p, m in SIZES:
        for f, b in TASK_SECONDS:
            made = make_schedule(name, p, m)
            expected = (m + p - 1) * (f + b)
            assert simulate_schedule(made, f, b).step_seconds == expected, (p, m, f, b)
            assert max(spans(made, {"F": f, "B": b})) == expected, (p, m, f, b)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpipe", lambda p, m, s: m),
        ("1f1b", lambda p, m, s: min(p - s, m)),
        ("eager_1f1b", lambda p, m, s: min(2 * (p - s) - 1, m)),
        ("zb_h1", lambda p, m, s: min(p - s, m)),
        ("zb_h2", lambda p, m, s: min(2 * (p - s) - 1, m)),
        ("inference", lambda p, m, s: 1),
    ],
)
def test_microbatches_in_flight(name: str, expected: Callable[[int, int, int], int]) -> None:
    for p, m in SIZES:
        timeline = simulate_schedule(make_schedule(name, p, m), 1.0, 2.0)
        assert timeline.peak_bytes == tuple(expected(p, m, s) for s in range(p))


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    for p in (1, 2, 3, 4):
        for groups in (1, 2, 3):
            for v in (1, 2, 3):
                for f, b in TASK_SECONDS:
                    m = p * groups
                    made = make_schedule("interleaved_1f1b", p, m, num_chunks=v)
                    # Per mesh f and b are v times those of a chunk.
                    expected = m * v * (f + b) + (p - 1) * (f + b)
                    assert simulate_schedule(made, f, b).step_seconds == expected, (p, m, v, f, b)
                    assert max(spans(made, {"F": f, "B": b})) == expected


@pytest.mark.parametrize(("name", "weight"), [("zb_h1", 1), ("zb_h2", 2)])
def test_zero_bubble_schedules_have_their_bubble(name: str, weight: int) -> None:
    for p in (1, 2, 3, 4, 6):
        for m in (2 * p - 1, 2 * p, 3 * p + 1):
            for F, B, W in [(10, 10, 10), (10, 10, 5), (9, 7, 8), (20, 12, 11), (6, 6, 1)]:
                made = make_schedule(name, p, m)
                bubble = max(spans(made, {"F": F, "B": B, "W": W})) - m * (F + B + W)
                assert bubble == (p - 1) * (F + B - weight * W), (p, m, F, B, W)
                quick = simulate_schedule(made, F, B, W)
                assert max(quick.span) - m * (F + B + W) == bubble


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_heavy_weight_gradients_leave_the_first_mesh_waiting_for_its_first_backward_pass(
    name: str,
) -> None:
    for p in (1, 2, 3, 4):
        for m in (2 * p - 1, 3 * p):
            for F, B, W in [(7, 9, 8), (4, 20, 12), (1, 3, 2)]:
                made = make_schedule(name, p, m)
                bubble = max(spans(made, {"F": F, "B": B, "W": W})) - m * (F + B + W)
                assert bubble == (p - 1) * (B if name == "zb_h1" else B - F), (p, m, F, B, W)


def test_zero_bubble_delays_weight_gradients_by_the_stage() -> None:
    made = make_schedule("zb_h1", 3, 4)
    assert str(made).splitlines()[1:] == [
        "mesh 0: F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "mesh 1: F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "mesh 2: F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_inference_passes_every_microbatch_once() -> None:
    for p, m in SIZES:
        for v in (1, 2, 3):
            made = make_schedule("inference", p, m, num_chunks=v)
            assert made.forward_only
            assert not made.splits_backward
            assert made.kinds == ("F",)
            # Full groups leave no gaps: every mesh works from its first task to its last.
            if m % p == 0:
                assert spans(made, {"F": 2}) == [2 * m * v] * p
            assert simulate_schedule(made, 2).step_seconds == max(
                end for _, end in times(made.tasks, made.num_stages, {"F": [2] * p * v}).values()
            )


def test_chunks_lie_round_the_meshes_and_print_with_their_stage() -> None:
    made = make_schedule("interleaved_1f1b", 2, 2, num_chunks=2)
    assert made.mesh_of_stage == (0, 1, 0, 1)
    assert made.stages_of(1) == (1, 3)
    assert str(made).splitlines() == [
        "interleaved_1f1b: 4 stages on 2 meshes, 2 microbatches",
        "mesh 0: F(0,0) F(0,1) F(2,0) F(2,1) B(2,0) B(2,1) B(0,0) B(0,1)",
        "mesh 1: F(1,0) F(1,1) F(3,0) F(3,1) B(3,0) B(3,1) B(1,0) B(1,1)",
    ]


def test_names_are_those_of_the_table() -> None:
    assert set(SCHEDULES) == {
        "gpipe",
        "1f1b",
        "eager_1f1b",
        "interleaved_1f1b",
        "zb_h1",
        "zb_h2",
        "inference",
    }
