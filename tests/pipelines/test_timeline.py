"""Timelines print, compare, and become traces with the same rows whether simulated or measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from bare_schedules import simulate_schedule
from pipelines.pipeline_models import model

from autopar.base.errors import ScheduleError
from autopar.passes.pipeline.instructions import Free, Recv, Run, Send
from autopar.passes.pipeline.simulate import simulate
from autopar.passes.pipeline.timeline import Event, Timeline, difference
from autopar.passes.schedules.make import make_schedule


def simulated() -> Timeline:
    program = model(2).emit(make_schedule("1f1b", 2, 2))
    return simulate(program, lambda run: 0.002 if run.kind == "B" else 0.001, 0.0005)


def test_bytes_over_time_follow_the_events() -> None:
    timeline = simulated()
    for mesh in range(2):
        steps = timeline.bytes_over_time(mesh)
        seconds = [time for time, _ in steps]
        assert seconds == sorted(seconds)
        assert max(size for _, size in steps) == timeline.peak_bytes[mesh]
        assert len(steps) == 1 + 2 * len(timeline.program.meshes[mesh])
    # In the end the new state, the metrics and what the caller kept (the labels) are there.
    assert timeline.bytes_over_time(0)[-1][1] == 100
    assert timeline.bytes_over_time(1)[-1][1] == 100 + 100 + 1 + 2 * 1 + 2 * 2


def test_the_order_of_runs_is_by_their_start() -> None:
    timeline = simulate_schedule(make_schedule("1f1b", 2, 2), 1.0, 2.0)
    assert timeline.run_order == (
        (0, "F0[0]"),
        (0, "F0[1]"),
        (1, "F1[0]"),
        (1, "B1[0]"),
        (0, "B0[0]"),
        (1, "F1[1]"),
        (1, "B1[1]"),
        (0, "B0[1]"),
    )


def test_a_measured_timeline_may_start_at_any_time() -> None:
    timeline = simulated()
    later = replace(
        timeline,
        events=tuple(Event(e.mesh, e.index, e.start + 8, e.end + 8) for e in timeline.events),
    )
    assert later.step_seconds == pytest.approx(timeline.step_seconds)
    assert later.bubble_fraction == pytest.approx(timeline.bubble_fraction)
    assert later.bytes_over_time(0)[0][0] == 8
    assert later.peak_bytes == timeline.peak_bytes


def test_a_timeline_without_events_is_empty() -> None:
    program = simulated().program
    empty = Timeline(replace(program, meshes=((), ()), order=()), ())
    assert (empty.step_seconds, empty.bubble_fraction, empty.busy) == (0.0, 0.0, (0.0, 0.0))


def test_the_trace_is_json_with_a_row_per_mesh() -> None:
    timeline = simulated()
    trace = json.loads(json.dumps(timeline.to_chrome_trace()))
    rows = trace["traceEvents"]
    threads = {r["tid"]: r["args"]["name"] for r in rows if r["name"] == "thread_name"}
    assert threads == {0: "mesh 0", 1: "mesh 1"}
    complete = [r for r in rows if r["ph"] == "X"]
    events = [e for e in timeline.events if not isinstance(timeline.instruction(e), Free)]
    assert len(complete) == len(events)
    for row, event in zip(complete, events, strict=True):
        instruction = timeline.instruction(event)
        assert (row["pid"], row["tid"], row["name"]) == (0, event.mesh, instruction.label)
        assert row["ts"] == pytest.approx(event.start * 1e6)
        assert row["dur"] == pytest.approx(event.seconds * 1e6)
        assert row["cat"] == (
            instruction.kind if isinstance(instruction, Run) else type(instruction).__name__
        )
    sends = {r["id"]: r["ts"] for r in rows if r["ph"] == "s"}
    recvs = {r["id"]: r["ts"] for r in rows if r["ph"] == "f"}
    assert set(sends) == set(recvs)
    assert set(sends) == {
        x.tag for row in timeline.program.meshes for x in row if isinstance(x, Send | Recv)
    }
    assert all(recvs[tag] >= sends[tag] + 500 - 1e-6 for tag in sends)
    counters = [r for r in rows if r["ph"] == "C"]
    for mesh in range(2):
        peak = max(r["args"]["bytes"] for r in counters if r["tid"] == mesh)
        assert peak == timeline.peak_bytes[mesh]


def test_the_difference_of_two_timelines_is_a_table() -> None:
    expected = simulate_schedule(make_schedule("1f1b", 2, 2), 1.0, 2.0)
    measured = simulate(
        expected.program, lambda run: 1.1 if run.kind == "F" else 2.0, recv_seconds=0.5
    )
    assert difference(expected, measured).splitlines() == [
        "mesh  instruction  count  expected  measured  difference",
        "   0           F0      2       2 s     2.2 s      +10.0%",
        "   0         recv      2       0 s       1 s           -",
        "   0           B0      2       4 s       4 s       +0.0%",
        "   1         recv      2       0 s       1 s           -",
        "   1           F1      2       2 s     2.2 s      +10.0%",
        "   1           B1      2       4 s       4 s       +0.0%",
        "             step              9 s    10.8 s      +20.0%",
    ]
    with pytest.raises(ScheduleError, match="same instructions"):
        difference(expected, simulated())
