"""Schedules by name or from a user's function, checked before anyone sees them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from autopar.base.errors import ScheduleError
from autopar.passes.schedules.checker import check
from autopar.passes.schedules.named import CHUNKED, SCHEDULES
from autopar.passes.schedules.schedule import Schedule, Task

ScheduleFunction = Callable[..., Schedule | Iterable[Iterable[tuple[str, int, int]]]]


def make_schedule(
    name_or_function: str | ScheduleFunction,
    num_meshes: int,
    num_microbatches: int,
    *,
    num_chunks: int = 1,
) -> Schedule:
    """The schedule of that name, or the one that a function makes, proved runnable.

    Args:
      name_or_function: "gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_h2",
        "inference", or a function of (num_meshes, num_microbatches) that returns a `Schedule`, or
        for every mesh its tasks in order, as `Task`s or as tuples such as ("F", stage, microbatch).
      num_meshes: meshes that work in parallel.
      num_microbatches: microbatches of one step.
      num_chunks: stages per mesh. Stage s then lies on mesh s % num_meshes. A function that has an
        argument `num_chunks` gets it.

    Returns:
      A schedule that `check` has passed.

    Raises:
      ScheduleError: there is no such schedule, it cannot have so many chunks or microbatches, or
        the function returned something that is not a schedule or cannot run.

    >>> print(make_schedule("1f1b", 2, 3))
    1f1b: 2 stages on 2 meshes, 3 microbatches
    mesh 0: F0 F1 B0 F2 B1 B2
    mesh 1: F0 B0 F1 B1 F2 B2
    """
    num_meshes = _positive("num_meshes", num_meshes)
    num_microbatches = _positive("num_microbatches", num_microbatches)
    num_chunks = _positive("num_chunks", num_chunks)
    if isinstance(name_or_function, str):
        schedule = _named(name_or_function, num_meshes, num_microbatches, num_chunks)
    elif callable(name_or_function):
        schedule = _custom(name_or_function, num_meshes, num_microbatches, num_chunks)
    else:
        raise ScheduleError(
            f"schedule={name_or_function!r} is neither a name nor a function.",
            hint=f"use {_names()}, or a function (num_meshes, num_microbatches) -> task lists.",
        )
    check(schedule)
    return schedule


def _named(name: str, num_meshes: int, num_microbatches: int, num_chunks: int) -> Schedule:
    if name not in SCHEDULES:
        raise ScheduleError(f"There is no schedule {name!r}.", hint=f"use {_names()}.")
    if num_chunks > 1 and name not in CHUNKED:
        raise ScheduleError(
            f"Schedule {name!r} cannot have num_chunks={num_chunks}.",
            why="it runs one stage on each mesh.",
            hint="use schedule='interleaved_1f1b', or num_chunks=1.",
        )
    if name == "interleaved_1f1b" and num_microbatches % num_meshes:
        above = -(-num_microbatches // num_meshes) * num_meshes
        raise ScheduleError(
            f"Schedule 'interleaved_1f1b' cannot run {num_microbatches} microbatches on "
            f"{num_meshes} meshes.",
            why="microbatches pass each chunk in groups of one per mesh, so their number must be a "
            f"multiple of {num_meshes}.",
            hint=f"use microbatches={above}, or schedule='1f1b'.",
        )
    chunks = (num_chunks,) if name in CHUNKED else ()
    lists = SCHEDULES[name](num_meshes, num_microbatches, *chunks)
    homes = tuple(stage % num_meshes for stage in range(num_meshes * num_chunks))
    return Schedule(name, len(homes), num_microbatches, homes, tuple(map(tuple, lists)))


def _custom(
    function: ScheduleFunction, num_meshes: int, num_microbatches: int, num_chunks: int
) -> Schedule:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        takes = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        takes = set()  # some callables written in C have no signature
    given = {"num_chunks": num_chunks, "durations": None}  # those are known to nobody yet
    extras = {name: value for name, value in given.items() if name in takes}
    result = function(num_meshes, num_microbatches, **extras)
    if isinstance(result, Schedule):
        schedule = result
    else:
        lists = _task_lists(name, result)
        homes = _homes(name, lists)
        schedule = Schedule(name, len(homes), num_microbatches, homes, lists)
    if (schedule.num_meshes, schedule.num_microbatches) != (num_meshes, num_microbatches):
        raise ScheduleError(
            f"Schedule function {name!r} made a schedule of {schedule.num_microbatches} "
            f"microbatches on {schedule.num_meshes} meshes.",
            why=f"it was asked for {num_microbatches} microbatches on {num_meshes} meshes.",
            hint="return one list of tasks per mesh.",
        )
    wanted = num_meshes * num_chunks
    if schedule.num_stages != wanted:
        raise ScheduleError(
            f"Schedule function {name!r} made a schedule of {schedule.num_stages} stages.",
            why=f"num_chunks={num_chunks} on {num_meshes} meshes makes {wanted} stages, each of "
            "which needs its tasks.",
            hint="give num_chunks= if a mesh is to have several stages.",
        )
    idle = sorted(set(range(num_meshes)) - set(schedule.mesh_of_stage))
    if idle:
        raise ScheduleError(
            f"Schedule function {name!r} leaves mesh {idle[0]} without a stage.",
            why="every mesh of a plan runs at least one stage.",
            hint="return the tasks of every mesh.",
        )
    return schedule


def _task_lists(name: str, result: object) -> tuple[tuple[Task, ...], ...]:
    """The task lists in what a user's function returned; a `ScheduleError` if there are none."""
    hint = 'return one list per mesh of tasks such as ("F", stage, microbatch).'

    def entries(value: object, where: str, expected: str) -> Iterable[Any]:
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            raise ScheduleError(
                f"Schedule function {name!r} returned {_described(value)}{where}.",
                why=f"{expected} expected.",
                hint=hint,
            )
        return value

    lists = []
    for mesh, tasks in enumerate(entries(result, "", "a Schedule or task lists were")):
        listed = entries(tasks, f" for mesh {mesh}", "a list of tasks was")
        lists.append(tuple(_task(name, mesh, entry, hint) for entry in listed))
    return tuple(lists)


def _task(name: str, mesh: int, entry: Any, hint: str) -> Task:
    try:
        kind, stage, microbatch = entry
        if kind not in ("F", "B", "W") or isinstance(stage, bool) or isinstance(microbatch, bool):
            raise ValueError
        return Task(kind, operator.index(stage), operator.index(microbatch))
    except (TypeError, ValueError):
        raise ScheduleError(
            f"Schedule function {name!r} returned {_described(entry)} as a task of mesh {mesh}.",
            why='a task is "F", "B" or "W", the stage\'s number and the microbatch\'s number.',
            hint=hint,
        ) from None


def _homes(name: str, lists: tuple[tuple[Task, ...], ...]) -> tuple[int, ...]:
    """The mesh of every stage, read from where its tasks are."""
    homes: dict[int, int] = {}
    for mesh, tasks in enumerate(lists):
        for task in tasks:
            if homes.setdefault(task.stage, mesh) != mesh:
                raise ScheduleError(
                    f"Schedule function {name!r} runs stage {task.stage} on two meshes.",
                    where=f"{task} on mesh {mesh}, others on mesh {homes[task.stage]}",
                    hint="a stage's parameters live on one mesh, so all its tasks run there.",
                )
    absent = sorted(set(range(max(homes, default=-1) + 1)) - set(homes))
    if absent or not homes or min(homes) < 0:
        raise ScheduleError(
            f"Schedule function {name!r} has no task for stage {absent[0]}."
            if absent
            else f"Schedule function {name!r} has no task, or one of a negative stage.",
            why="stages are numbered from 0 without gaps, and each has tasks.",
        )
    return tuple(homes[stage] for stage in range(len(homes)))


def _positive(name: str, number: int) -> int:
    try:
        value = operator.index(number)
    except TypeError:
        value = 0
    if value < 1 or isinstance(number, bool):
        raise ScheduleError(f"{name}={number!r} is not a positive whole number.")
    return value


def _described(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _names() -> str:
    return ", ".join(repr(name) for name in SCHEDULES)
