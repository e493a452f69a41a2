"""The checker finds what is missing, doubled or deadlocked, and says where."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from bare_schedules import simulate_schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules.reference_clock import has_cycle

from autopar.base.errors import ScheduleError
from autopar.passes.schedules.checker import check
from autopar.passes.schedules.make import make_schedule
from autopar.passes.schedules.schedule import Schedule, Task

NAMES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "inference")


@st.composite
def made_schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(NAMES))
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    chunks = draw(st.integers(1, 3)) if name in ("interleaved_1f1b", "inference") else 1
    if name == "interleaved_1f1b":
        m *= p
    return make_schedule(name, p, m, num_chunks=chunks)


def with_tasks(schedule: Schedule, mesh: int, tasks: list[Task]) -> Schedule:
    lists = list(schedule.tasks)
    lists[mesh] = tuple(tasks)
    return replace(schedule, tasks=tuple(lists))


@settings(deadline=None)
@given(made_schedules())
def test_named_schedules_pass(schedule: Schedule) -> None:
    check(schedule)
    assert not has_cycle(schedule.tasks, schedule.num_stages)


@settings(deadline=None)
@given(made_schedules(), st.data())
def test_a_dropped_task_is_named(schedule: Schedule, data: st.DataObject) -> None:
    mesh = data.draw(st.integers(0, schedule.num_meshes - 1))
    tasks = list(schedule.tasks[mesh])
    dropped = tasks.pop(data.draw(st.integers(0, len(tasks) - 1)))
    if (
        sum(map(len, schedule.tasks)) == 1
        or sum(task.kind == dropped.kind for row in schedule.tasks for task in row) == 1
    ):
        # The only one of its kind: what is left is a schedule without a backward pass, or nothing.
        return
    with pytest.raises(ScheduleError, match=re.escape(f"lacks {dropped}.")) as caught:
        check(with_tasks(schedule, mesh, tasks))
    assert f"mesh {mesh}" in str(caught.value)


@settings(deadline=None)
@given(made_schedules(), st.data())
def test_a_doubled_task_is_named(schedule: Schedule, data: st.DataObject) -> None:
    mesh = data.draw(st.integers(0, schedule.num_meshes - 1))
    tasks = list(schedule.tasks[mesh])
    doubled = data.draw(st.sampled_from(tasks))
    tasks.insert(data.draw(st.integers(0, len(tasks))), doubled)
    with pytest.raises(ScheduleError, match=re.escape(f"runs {doubled} twice")):
        check(with_tasks(schedule, mesh, tasks))


@settings(max_examples=300, deadline=None)
@given(made_schedules(), st.data())
def test_another_order_is_refused_exactly_if_it_has_a_cycle(
    schedule: Schedule, data: st.DataObject
) -> None:
    mesh = data.draw(st.integers(0, schedule.num_meshes - 1))
    tasks = list(schedule.tasks[mesh])
    if data.draw(st.booleans()):
        tasks = data.draw(st.permutations(tasks))
    else:
        moved = tasks.pop(data.draw(st.integers(0, len(tasks) - 1)))
        tasks.insert(data.draw(st.integers(0, len(tasks))), moved)
    changed = with_tasks(schedule, mesh, tasks)
    if not has_cycle(changed.tasks, changed.num_stages):
        check(changed)
        return
    with pytest.raises(ScheduleError, match="deadlocks") as caught:
        check(changed)
    assert_names_a_cycle(changed, caught.value)
    with pytest.raises(ScheduleError):
        simulate_schedule(changed, 1, 1, 1)


def assert_names_a_cycle(schedule: Schedule, error: ScheduleError) -> None:
    """Each line's wait is real, and its last mesh is the next line's first, round the cycle."""
    line = re.compile(
        r"- (\S+) on mesh (\d+) waits for (\S+), which stands after (\S+) on mesh (\d+)"
    )
    task_of = {str(task): task for tasks in schedule.tasks for task in tasks}
    assert error.why is not None
    rows = error.why.splitlines()[1:]
    found = [match.groups() for match in map(line.fullmatch, rows) if match]
    assert len(found) == len(rows) >= 1
    for groups, following in zip(found, found[1:] + found[:1], strict=True):
        head, mesh, wanted, front, home = groups
        assert task_of[wanted] in schedule.waits_for(task_of[head])
        assert task_of[head] in schedule.tasks[int(mesh)]
        row = schedule.tasks[int(home)]
        assert row.index(task_of[front]) <= row.index(task_of[wanted])
        assert following[:2] == (front, home)


def test_a_cycle_between_two_meshes_reads_well() -> None:
    tasks = (
        (Task("F", 0, 0), Task("B", 0, 0), Task("F", 0, 1), Task("B", 0, 1)),
        (Task("F", 1, 0), Task("F", 1, 1), Task("B", 1, 0), Task("B", 1, 1)),
    )
    with pytest.raises(ScheduleError) as caught:
        check(Schedule("mine", 2, 2, (0, 1), tasks))
    assert str(caught.value).splitlines() == [
        "Schedule 'mine' deadlocks.",
        "  why:   tasks wait for each other in a cycle:",
        "         - B(0,0) on mesh 0 waits for B(1,0), which stands after F(1,1) on mesh 1",
        "         - F(1,1) on mesh 1 waits for F(0,1), which stands after B(0,0) on mesh 0",
        "  try:   F(s,i) needs F(s-1,i); B(s,i) needs F(s,i) and B(s+1,i); W(s,i) needs B(s,i).",
    ]


def test_many_missing_tasks_are_counted() -> None:
    made = make_schedule("zb_h1", 2, 5)
    without = with_tasks(made, 0, [t for t in made.tasks[0] if t.kind != "W"])
    with pytest.raises(ScheduleError, match="lacks") as caught:
        check(replace(without, num_microbatches=9))
    assert "and " in str(caught.value)
    assert "more" in str(caught.value)
    with pytest.raises(ScheduleError, match=r"lacks W\(0,0\), W\(0,1\)"):
        check(without)


def test_stages_and_meshes_must_exist() -> None:
    made = make_schedule("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match=r"mesh_of_stage=\(0, 2\)"):
        check(replace(made, mesh_of_stage=(0, 2)))
    with pytest.raises(ScheduleError, match=r"mesh_of_stage=\(0,\)"):
        check(replace(made, mesh_of_stage=(0,)))
    with pytest.raises(ScheduleError, match=r"runs F\(0,0\) on mesh 0"):
        check(replace(made, mesh_of_stage=(1, 0)))
    with pytest.raises(ScheduleError, match="no stage"):
        check(replace(made, num_microbatches=0))
    odd = (Task("X", 0, 0), *made.tasks[0])  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"task X\(0,0\) that cannot exist"):
        check(replace(made, tasks=(odd, made.tasks[1])))
