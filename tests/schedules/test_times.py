"""A schedule's times equal the independent simulator's, whatever tasks and transfers take."""

from __future__ import annotations

from bare_schedules import simulate_schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules.reference_clock import times

from autopar.passes.schedules.make import make_schedule

NAMES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "inference")


@settings(deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 5), st.integers(0, 7), st.data())
def test_times_are_those_of_the_longest_path(
    name: str, p: int, m: int, latency: int, data: st.DataObject
) -> None:
    chunks = data.draw(st.integers(1, 3)) if name in ("interleaved_1f1b", "inference") else 1
    schedule = make_schedule(name, p, m * p if name == "interleaved_1f1b" else m, num_chunks=chunks)
    whole = st.lists(st.integers(1, 20), min_size=p * chunks, max_size=p * chunks)
    F, B, W = data.draw(whole), data.draw(whole), data.draw(whole)
    fused = B if schedule.splits_backward else [b + w for b, w in zip(B, W, strict=True)]
    expected = times(schedule.tasks, p * chunks, {"F": F, "B": fused, "W": W}, latency)
    found = simulate_schedule(schedule, F, B, W, latency)
    assert found.step_seconds == max(end for _, end in expected.values())
    for mesh, tasks in enumerate(schedule.tasks):
        rows = [expected[task] for task in tasks]
        assert found.span[mesh] == rows[-1][1] - rows[0][0]
        assert found.busy[mesh] == sum(end - start for start, end in rows)
