"""The checker of programs finds every instruction that was dropped, doubled or moved wrongly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pipelines.pipeline_models import execute, model

from autopar.base.errors import ScheduleError
from autopar.passes.pipeline.instructions import (
    Buffer,
    Free,
    Instruction,
    PipelineProgram,
    Recv,
    Run,
    Send,
)
from autopar.passes.pipeline.order import dispatch_order
from autopar.passes.pipeline.verify import verify
from autopar.passes.schedules.make import make_schedule

PROGRAM = model(3).emit(make_schedule("1f1b", 3, 2))


def changed(mesh: int, instructions: list[Instruction]) -> PipelineProgram:
    lists = list(PROGRAM.meshes)
    lists[mesh] = tuple(instructions)
    return replace(PROGRAM, meshes=tuple(lists), order=dispatch_order(lists))


places = st.integers(0, 2).flatmap(
    lambda mesh: st.tuples(st.just(mesh), st.integers(0, len(PROGRAM.meshes[mesh]) - 1))
)


@settings(deadline=None)
@given(places)
def test_a_dropped_instruction_is_found(place: tuple[int, int]) -> None:
    mesh, index = place
    row = list(PROGRAM.meshes[mesh])
    dropped = row.pop(index)
    # Of an update in place, one without the other looks like a shorter loop.
    assume(not (isinstance(dropped, Run) and set(dropped.writes) <= set(dropped.reads)))
    if type(dropped).__name__ == "Accumulate":
        assume(all(x == dropped or x.writes != dropped.writes for x in row))
    with pytest.raises(ScheduleError):
        verify(changed(mesh, row))


@settings(deadline=None)
@given(places)
def test_a_doubled_communication_or_free_is_found(place: tuple[int, int]) -> None:
    mesh, index = place
    row = list(PROGRAM.meshes[mesh])
    assume(isinstance(row[index], Send | Recv | Free))
    row.insert(index, row[index])
    with pytest.raises(ScheduleError):
        verify(changed(mesh, row))


@settings(deadline=None, max_examples=200)
@given(places, st.data())
def test_what_passes_after_a_move_computes_the_same(
    place: tuple[int, int], data: st.DataObject
) -> None:
    mesh, index = place
    row = list(PROGRAM.meshes[mesh])
    moved = row.pop(index)
    row.insert(data.draw(st.integers(0, len(row))), moved)
    try:
        program = changed(mesh, row)
        verify(program)
    except ScheduleError:
        return
    result = execute(program)
    assert set(result) == set(execute(PROGRAM))
    if isinstance(moved, Recv | Free):
        # A run or a send may now come before another part of a sum: it is there, but not whole.
        assert result == execute(PROGRAM)


def test_messages_name_mesh_instruction_and_buffer() -> None:
    row = list(PROGRAM.meshes[0])
    at = next(i for i, x in enumerate(row) if isinstance(x, Free))
    freed = row[at]
    assert isinstance(freed, Free)
    row.insert(at, freed)
    with pytest.raises(ScheduleError) as caught:
        verify(changed(0, row))
    text = str(caught.value)
    assert "is freed, but it is not there" in text
    assert f"mesh 0, instruction {at + 1}: free" in text
    assert "it was gone after: free" in text


def test_taking_what_the_caller_keeps() -> None:
    labels = next(v.number for v in PROGRAM.values if v.label == "labels.2")
    row = [*PROGRAM.meshes[2], Free((Buffer(labels, 0),))]
    with pytest.raises(ScheduleError, match=r"labels\.2\[0\] belongs to the caller and is taken"):
        verify(changed(2, row))


def test_orders_that_are_none() -> None:
    with pytest.raises(ScheduleError, match="wrong place"):
        verify(replace(PROGRAM, order=PROGRAM.order[::-1]))
    with pytest.raises(ScheduleError, match="ends before"):
        verify(replace(PROGRAM, order=PROGRAM.order[:-1]))
    by_mesh = tuple(sorted(PROGRAM.order))
    with pytest.raises(ScheduleError, match="before its Send"):
        verify(replace(PROGRAM, order=by_mesh))


def test_a_recv_must_fit_its_send() -> None:
    row = list(PROGRAM.meshes[1])
    at = next(i for i, x in enumerate(row) if isinstance(x, Recv))
    recv = row[at]
    assert isinstance(recv, Recv)
    row[at] = replace(recv, source=2)
    with pytest.raises(ScheduleError, match="does not fit its Send"):
        verify(changed(1, row))


def test_a_transfer_that_nobody_receives() -> None:
    kept = next(v.number for v in PROGRAM.values if v.label == "labels.2")
    row = [*PROGRAM.meshes[2], Send(999, 0, (Buffer(kept, 0),))]
    with pytest.raises(ScheduleError, match="No mesh receives the transfer 999"):
        verify(changed(2, row))


def test_an_unknown_value() -> None:
    row = [*PROGRAM.meshes[0], Run("odd", 0, "epilogue", None, (), (Buffer(12345, None),))]
    with pytest.raises(ScheduleError, match="%12345 is not a value of the program"):
        verify(changed(0, row))
