"""The shared cases: 381 simulated schedules and the published zero-bubble table."""

from __future__ import annotations

from pathlib import Path

import pytest
from bare_schedules import simulate_schedule
from schedules.reference_clock import times
from schedules.shared_cases import shared_cases

from autopar.passes.schedules.make import make_schedule

NAMES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_h2")


def test_every_case_is_of_a_known_schedule() -> None:
    cases = shared_cases("test_vectors.json")
    assert cases["count"] == len(cases["vectors"]) == 381
    assert {case["schedule"] for case in cases["vectors"]} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_makespan_span_busy_and_in_flight_are_exact(name: str) -> None:
    cases = [c for c in shared_cases("test_vectors.json")["vectors"] if c["schedule"] == name]
    assert cases
    for case in cases:
        schedule = make_schedule(name, case["p"], case["m"], num_chunks=case["v"])
        costs = (case["T_F"], case["T_B"], case.get("T_W", 0), case["comm_latency"])
        timeline = simulate_schedule(schedule, *costs)
        expected = (case["makespan"], case["span_per_device"], case["busy_per_device"])
        simulated = (timeline.step_seconds, list(timeline.span), list(timeline.busy))
        assert simulated == expected, case
        assert list(timeline.peak_bytes) == case["peak_inflight_per_device"], case
        seconds = {"F": case["T_F"], "B": case["T_B"], "W": case.get("T_W", ())}
        independent = times(schedule.tasks, schedule.num_stages, seconds, case["comm_latency"])
        assert max(end for _, end in independent.values()) == case["makespan"], case


LONGEST = (10, 11)
"""The rows with 32 stages and 128 or 256 microbatches take more than all others."""


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=pytest.mark.full if n in LONGEST else ()) for n in range(12)],
)
def test_published_bubble_rates(number: int) -> None:
    rows = shared_cases("zero_bubble_table5_9.json")["rows"]
    assert len(rows) == 12
    row = rows[number]
    p, m, T_F, T_B, T_W = (row[key] for key in ("p", "m", "T_F", "T_B", "T_W"))
    for name, column in {"1f1b": "1F1B", "zb_h1": "ZB_H1", "zb_h2": "ZB_H2"}.items():
        schedule = make_schedule(name, p, m)
        span = max(simulate_schedule(schedule, T_F, T_B, T_W, row["T_comm"]).span)
        rate = (span - m * (T_F + T_B + T_W)) / span
        assert round(rate, 4) == row[f"bubble_rate_{column}"], (row, name)


def test_a_folder_without_the_schedules_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_SHARED", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match="lacks schedules"):
        shared_cases("test_vectors.json")
    monkeypatch.setenv("AUTOPAR_SHARED", str(tmp_path / "absent"))
    with pytest.raises(pytest.skip.Exception, match="not beside the repository"):
        shared_cases("test_vectors.json")
