"""The virtual clock: costs, transfers, shared cores, and what cannot run."""

from __future__ import annotations

import doctest
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from bare_schedules import simulate_schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines.pipeline_models import Model, model

from autopar.base.errors import ScheduleError
from autopar.passes.pipeline import instructions
from autopar.passes.pipeline import simulate as simulate_module
from autopar.passes.pipeline.instructions import (
    Accumulate,
    PipelineProgram,
    Recv,
    Reshard,
    Run,
    Send,
)
from autopar.passes.pipeline.simulate import simulate
from autopar.passes.schedules.make import make_schedule


def apart(num_meshes: int, num_microbatches: int = 1) -> PipelineProgram:
    """Meshes that run one forward piece per microbatch and have nothing to say to each other."""
    made = Model()
    for stage in range(num_meshes):
        made.piece("F", stage, [], [])
    return made.emit(make_schedule("inference", num_meshes, num_microbatches))


def by_stage(seconds: Sequence[float]) -> Any:
    return lambda run: seconds[run.stage]


@pytest.mark.parametrize("module", [instructions, simulate_module])
def test_docstrings(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


def test_transfers_take_time_but_occupy_no_mesh() -> None:
    timeline = simulate_schedule(make_schedule("inference", 2, 3), 2.0, latency=5.0)
    # The second mesh starts at 2 + 5 and is then fed as fast as it works.
    assert timeline.step_seconds == 13
    assert list(timeline.busy) == [6, 6]
    assert list(timeline.span) == [6, 6]
    assert timeline.bubble_fraction == pytest.approx(1 - 12 / 26)


def test_every_instruction_has_its_cost() -> None:
    program = model(4).emit(make_schedule("interleaved_1f1b", 2, 2, num_chunks=2))
    costs = {Run: 64.0, Send: 1.0, Recv: 2.0, Reshard: 4.0, Accumulate: 8.0}
    timeline = simulate(
        program,
        64.0,
        send_seconds=lambda send: 1.0,
        recv_seconds=2.0,
        reshard_seconds=4.0,
        accumulate_seconds=8.0,
    )
    for event in timeline.events:
        assert event.seconds == costs.get(type(timeline.instruction(event)), 0.0)
    for mesh, row in enumerate(program.meshes):
        assert timeline.busy[mesh] == sum(costs.get(type(x), 0.0) for x in row)


def test_events_are_in_order_and_receive_after_the_transfer() -> None:
    program = model(3).emit(make_schedule("zb_h1", 3, 4))
    for shared in (None, 2):
        timeline = simulate(
            program, by_stage([1.5, 2.5, 1.0]), lambda send: 0.25 * send.tag, shared_cores=shared
        )
        assert [(e.mesh, e.index) for e in timeline.events] == sorted(program.order)
        arrival = {}
        for event in timeline.events:
            instruction = timeline.instruction(event)
            if isinstance(instruction, Send):
                arrival[instruction.tag] = event.end + 0.25 * instruction.tag
        for before, event in zip(timeline.events, timeline.events[1:], strict=False):
            if before.mesh == event.mesh:
                assert before.end <= event.start
        for event in timeline.events:
            instruction = timeline.instruction(event)
            if isinstance(instruction, Recv):
                assert event.start >= arrival[instruction.tag]


def test_two_meshes_on_one_core_take_the_sum() -> None:
    timeline = simulate(apart(2), by_stage([2.0, 3.0]), shared_cores=1)
    # Both at half speed until the shorter ends at 4; the longer has 1 left.
    assert [(e.start, e.end) for e in timeline.events] == [(0, 4), (0, 5)]
    assert timeline.step_seconds == 5


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 3))
@settings(deadline=None)
def test_equal_meshes_share_cores_as_in_the_closed_form(
    seconds: list[int], cores: int, count: int
) -> None:
    """Processor sharing: what ends next has done what all others that still run have done."""
    timeline = simulate(apart(len(seconds), count), by_stage(seconds), shared_cores=cores)
    now, done = 0.0, 0
    # Meshes without waits run their microbatches back to back, as one long instruction.
    for position, mesh in enumerate(sorted(range(len(seconds)), key=lambda k: seconds[k])):
        work = seconds[mesh] * count
        now += (work - done) * max(1.0, (len(seconds) - position) / cores)
        done = work
        ends = [event.end for event in timeline.events if event.mesh == mesh]
        assert max(ends) == pytest.approx(now)
    assert timeline.step_seconds == pytest.approx(now)
    if cores == 1:
        assert timeline.step_seconds == pytest.approx(sum(seconds) * count)


def test_meshes_want_as_many_cores_as_they_have_devices() -> None:
    program = apart(2)
    alone = simulate(apart(1), 3.0, shared_cores=2, devices_per_mesh=8)
    assert alone.step_seconds == 3.0  # as measured: it has the machine to itself
    both = simulate(program, 3.0, shared_cores=2, devices_per_mesh=8)
    assert both.step_seconds == 6.0
    uneven = simulate(program, by_stage([3.0, 4.0]), shared_cores=2, devices_per_mesh=(1, 2))
    # Three cores are wanted and two are there: 3 / (2/3) = 4.5, and 1 left for the second.
    assert [event.end for event in uneven.events] == [pytest.approx(4.5), pytest.approx(5.5)]
    assert uneven.bubble_fraction == pytest.approx(1 - (4.5 + 2 * 5.5) / (3 * 5.5))


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["gpipe", "1f1b", "zb_h1", "zb_h2"]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
    st.integers(0, 5),
)
def test_enough_cores_change_nothing_and_fewer_bound_the_work(
    name: str, p: int, m: int, seconds: list[int], latency: int
) -> None:
    program = model(p).emit(make_schedule(name, p, m))
    own = simulate(program, by_stage(seconds), latency)
    shared = simulate(program, by_stage(seconds), latency, shared_cores=p)
    assert shared.events == own.events
    work = sum(own.busy)
    one = simulate(program, by_stage(seconds), shared_cores=1)
    assert one.step_seconds == pytest.approx(
        work
    )  # one core is never idle while transfers are free
    two = simulate(program, by_stage(seconds), latency, shared_cores=2)
    assert own.step_seconds <= two.step_seconds + 1e-9
    assert work / 2 <= two.step_seconds + 1e-9


@pytest.mark.parametrize("cores", [None, 1])
def test_a_deadlock_is_named_and_not_waited_for(cores: int | None) -> None:
    program = model(2).emit(make_schedule("1f1b", 2, 2))
    first, second = program.meshes
    without = tuple(
        x for x in first if not (isinstance(x, Send) and "activation" in names(program, x))
    )
    broken = replace(program, meshes=(without, second))
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        simulate(broken, 1.0, shared_cores=cores)
    assert "mesh 1 waits for received.1[0], skipped.1[0]" in str(caught.value)
    assert caught.value.why is not None
    assert caught.value.why.endswith("before F1[0], and no mesh sends it.")

    # Each mesh waits first for what the other sends only after that.
    recv = {
        mesh: next(x for x in row if isinstance(x, Recv))
        for mesh, row in enumerate((first, second))
    }
    waiting = [x for x in first if isinstance(x, Recv) and x.buffers[0].microbatch == 0]
    early = (waiting[0], *(x for x in first if x != waiting[0]))
    with pytest.raises(ScheduleError, match="wait for each other in a cycle") as caught:
        simulate(replace(program, meshes=(early, second)), 1.0, shared_cores=cores)
    assert "mesh 0 waits for arrived.0[0] from mesh 1" in str(caught.value)
    assert recv[1].source == 0


def names(program: PipelineProgram, send: Send) -> str:
    return " ".join(program.value_of[buffer.value].label for buffer in send.buffers)


@pytest.mark.parametrize("odd", [-1.0, math.nan, math.inf])
def test_odd_costs_are_refused(odd: float) -> None:
    program = apart(1)
    with pytest.raises(ScheduleError, match="cannot take") as caught:
        simulate(program, odd)
    assert "F0[0]" in str(caught.value)
    with pytest.raises(ScheduleError, match="cannot take"):
        simulate(program, lambda run: odd, shared_cores=1)


def test_odd_machines_are_refused() -> None:
    with pytest.raises(ScheduleError, match="devices_per_mesh"):
        simulate(apart(2), 1.0, devices_per_mesh=(1,))
    with pytest.raises(ScheduleError, match="devices_per_mesh"):
        simulate(apart(2), 1.0, devices_per_mesh=0)
    with pytest.raises(ScheduleError, match="shared_cores=0"):
        simulate(apart(2), 1.0, shared_cores=0)


def test_a_schedule_without_split_runs_weight_gradients_in_its_backward_pass() -> None:
    timeline = simulate_schedule(make_schedule("1f1b", 3, 4), 1.0, 1.5, 0.5)
    assert timeline.step_seconds == (4 + 3 - 1) * 3.0
    assert timeline.peak_bytes == (3, 2, 1)
