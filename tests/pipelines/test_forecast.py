"""A forecast is what the whole list of instructions takes, however many microbatches there are."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines.pipeline_models import model

from autopar.passes.pipeline import forecast as forecast_module
from autopar.passes.pipeline.emit import origins_of
from autopar.passes.pipeline.forecast import StepCosts, forecast
from autopar.passes.pipeline.instructions import PipelineProgram, Send, ValueTransfer
from autopar.passes.pipeline.parts import PipelineParts, bundled
from autopar.passes.pipeline.timeline import Forecast
from autopar.passes.schedules import repeats
from autopar.passes.schedules.make import make_schedule
from autopar.passes.schedules.repeats import KEPT_ROUNDS, shortened, stretches
from autopar.passes.schedules.schedule import Schedule, Task

NAMES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("eager_1f1b", 1),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("inference", 1),
    ("inference", 2),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
]


def parts_of(
    schedule: Schedule, sizes: st.DataObject | None = None, weights: bool = True
) -> PipelineParts:
    backward = not schedule.forward_only
    made = model(schedule.num_stages, backward=backward, weights=weights)
    size = st.integers(0, 50)
    values = (
        value if sizes is None else replace(value, bytes_per_device=sizes.draw(size))
        for value in made.values
    )
    return replace(made.parts, values=tuple(values))


def costs_of(parts: PipelineParts, meshes: int, data: st.DataObject | None = None) -> StepCosts:
    seconds = st.sampled_from([1.0, 1.0, 0.3, 0.9, 0.0]) | st.floats(1e-9, 4)

    def drawn(strategy: st.SearchStrategy[Any], else_: Any) -> Any:
        return else_ if data is None else data.draw(strategy)

    latency = drawn(st.sampled_from([0.0, 0.1, 2.5]), 0.1)

    def transfer_seconds(program: PipelineProgram, transfers: Sequence[ValueTransfer]) -> Any:
        sizes = {}
        for target, origin in origins_of(transfers).items():
            both = (program.value_of[number].bytes_per_device for number in (target, origin))
            sizes[origin, program.mesh_of(target)] = min(both)

        def seconds(send: Send) -> float:
            return float(latency + 0.01 * sum(sizes[b.value, send.to] for b in send.buffers))

        return seconds

    names = [piece.name for piece in parts.pieces]
    runs = {name: drawn(seconds, 1.0) for name in names}
    inside = {name: drawn(st.integers(0, 30), 0) for name in names}
    return StepCosts(runs, transfer_seconds, (2,) * meshes, inside)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 64), st.booleans(), st.data())
def test_a_forecast_is_the_simulation_of_the_whole_list(
    named: tuple[str, int], meshes: int, count: int, weights: bool, data: st.DataObject
) -> None:
    name, chunks = named
    if name == "interleaved_1f1b":
        count = -(-count // meshes) * meshes
    schedule = make_schedule(name, meshes, count, num_chunks=chunks)
    parts = parts_of(schedule, data, weights or schedule.splits_backward)
    costs = costs_of(parts, meshes, data)
    found = forecast(parts, schedule, costs)
    expected = costs.timeline(parts, schedule).forecast
    # The same seconds are added in another order, so that their last digits differ.
    close = 1e-12 * expected.step_seconds
    assert found.busy == pytest.approx(expected.busy, rel=0, abs=close)
    assert found.span == pytest.approx(expected.span, rel=0, abs=close)
    assert found.bubble_fraction == pytest.approx(expected.bubble_fraction, rel=0, abs=1e-12)
    assert replace(found, busy=expected.busy, span=expected.span) == expected


def test_a_step_without_idle_time_says_so() -> None:
    busy = 0.1 + 0.2  # 0.30000000000000004
    found = Forecast("1f1b", 0.3, (busy,), (busy,), (0,), (1,))
    assert "0.0% bubble" in str(found) and "-" not in str(found)
    assert "0 s a step" in str(replace(found, step_seconds=1e-261, busy=(0.0,)))


@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_many_microbatches_write_no_more_instructions(
    name: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    real = PipelineParts.program

    def counted(self: PipelineParts, schedule: Schedule) -> PipelineProgram:
        program = real(self, schedule)
        written.append(sum(map(len, program.meshes)))
        return program

    monkeypatch.setattr(PipelineParts, "program", counted)
    totals = []
    for count in (60, 600):
        schedule = make_schedule(name, 3, count, num_chunks=chunks)
        parts, written[:] = parts_of(schedule), []
        forecast(parts, schedule, costs_of(parts, 3))
        totals.append(sum(written))
    assert totals[0] == totals[1]


@pytest.mark.parametrize("module", [forecast_module, repeats])
def test_docstrings(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(("name", "chunks"), NAMES)
@pytest.mark.parametrize("meshes", [1, 2, 5])
def test_a_schedule_without_some_rounds_is_that_of_fewer_microbatches(
    name: str, chunks: int, meshes: int
) -> None:
    schedule = make_schedule(name, meshes, 20 * meshes, num_chunks=chunks)
    found = stretches(schedule)
    for kept in (KEPT_ROUNDS, KEPT_ROUNDS + 1):
        short = shortened(schedule, found, kept).schedule
        assert short.num_microbatches < schedule.num_microbatches
        count = short.num_microbatches
        assert short == make_schedule(name, meshes, count, num_chunks=chunks)


def test_a_function_of_the_user_s_may_repeat_nothing() -> None:
    def pairs(num_meshes: int, count: int) -> list[list[Task]]:
        # The rounds grow: one forward pass, then two, then three.
        tasks: list[Task] = []
        first = size = 0
        while first < count:
            size += 1
            group = range(first, min(first + size, count))
            tasks += [Task("F", 0, i) for i in group] + [Task("B", 0, i) for i in group]
            first += size
        return [tasks]

    schedule = make_schedule(pairs, 1, 60)
    assert stretches(schedule) == ()
    parts = parts_of(schedule, weights=False)
    costs = costs_of(parts, 1)
    assert forecast(parts, schedule, costs) == costs.timeline(parts, schedule).forecast


def test_values_that_are_used_alike_are_one() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    parts = parts_of(schedule)
    twice = [replace(value, number=value.number + 1000) for value in parts.values]

    def both(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return (*numbers, *(n + 1000 for n in numbers))

    doubled = PipelineParts(
        (*parts.values, *twice),
        tuple(
            replace(p, reads=both(p.reads), writes=both(p.writes), donates=both(p.donates))
            for p in parts.pieces
        ),
        (
            *parts.transfers,
            *(replace(t, source=t.source + 1000, target=t.target + 1000) for t in parts.transfers),
        ),
        both(parts.inputs),
        both(parts.outputs),
        both(parts.donated),
    )
    once, again = bundled(parts, schedule), bundled(doubled, schedule)
    assert [v.number for v in again.values] == [v.number for v in once.values]
    assert sum(v.bytes_per_device for v in again.values) == 2 * sum(
        v.bytes_per_device for v in once.values
    )
    assert again.pieces == once.pieces and again.transfers == once.transfers
