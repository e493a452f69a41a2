"""How long a schedule takes, from the times of its tasks alone.

This is the recurrence that planners evaluate for many candidates. The simulator
(`autopar.passes.pipeline.simulate`) gives the same numbers from the instructions of a program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.base.errors import ScheduleError
from autopar.passes.schedules.checker import check
from autopar.passes.schedules.schedule import Schedule, Task, TaskKind

Seconds = Sequence[float] | float


@dataclass(frozen=True)
class ScheduleTimes:
    """When the meshes work.

    Args:
      step_seconds: from 0, where the first task starts, to the end of the last task.
      span: for every mesh, from the start of its first task to the end of its last.
      busy: for every mesh, the sum of its tasks' times.
    """

    step_seconds: float
    span: tuple[float, ...]
    busy: tuple[float, ...]


def schedule_times(
    schedule: Schedule, T_F: Seconds, T_B: Seconds = 0.0, T_W: Seconds = 0.0, latency: float = 0.0
) -> ScheduleTimes:
    """The times of a schedule whose meshes start every task as soon as it can.

    Args:
      schedule: any schedule.
      T_F: seconds of the forward pass of each stage, or of every stage.
      T_B: seconds of the backward pass, or of its first part.
      T_W: seconds of the weight gradients where they are a second part. Where the schedule does not
        split the backward pass, B takes T_B + T_W.
      latency: seconds from a task's end until the next stage, on another mesh, has its result.

    Raises:
      ScheduleError: the schedule cannot run (see `check`), or an argument has the wrong length.

    >>> from autopar.passes.schedules import make_schedule
    >>> schedule_times(make_schedule("gpipe", 2, 4), 1.0, 2.0)
    ScheduleTimes(step_seconds=15.0, span=(15.0, 12.0), busy=(12.0, 12.0))
    """
    seconds = task_seconds(schedule, T_F, T_B, T_W)
    home = schedule.mesh_of_stage
    position = [0] * schedule.num_meshes
    first = [0.0] * schedule.num_meshes
    clock = [0.0] * schedule.num_meshes
    busy = [0.0] * schedule.num_meshes
    ends: dict[Task, float] = {}
    remaining = sum(map(len, schedule.tasks))
    while remaining:
        before = remaining
        for mesh, tasks in enumerate(schedule.tasks):
            while position[mesh] < len(tasks):
                task = tasks[position[mesh]]
                needed = schedule.waits_for(task)
                if not all(other in ends for other in needed):
                    break
                start = clock[mesh]
                for other in needed:
                    start = max(start, ends[other] + (home[other.stage] != mesh) * latency)
                if position[mesh] == 0:
                    first[mesh] = start
                length = seconds[task.kind][task.stage]
                clock[mesh] = ends[task] = start + length
                busy[mesh] += length
                position[mesh] += 1
                remaining -= 1
        if remaining == before:
            check(schedule)  # names the cycle, or what is missing
            raise AssertionError("a schedule that passes the checker must run to its end")
    span = tuple(end - start for end, start in zip(clock, first, strict=True))
    return ScheduleTimes(max(clock), span, tuple(busy))


def task_seconds(
    schedule: Schedule, T_F: Seconds, T_B: Seconds, T_W: Seconds
) -> Mapping[TaskKind, Sequence[float]]:
    """The seconds of each kind of task on each stage (see `schedule_times`)."""
    forward = _each("T_F", T_F, schedule.num_stages)
    backward = _each("T_B", T_B, schedule.num_stages)
    weights = _each("T_W", T_W, schedule.num_stages)
    if not schedule.splits_backward:
        backward = [b + w for b, w in zip(backward, weights, strict=True)]
    return {"F": forward, "B": backward, "W": weights}


def _each(name: str, seconds: Seconds, count: int) -> list[float]:
    if isinstance(seconds, int | float):
        return [seconds] * count
    if len(seconds) != count:
        raise ScheduleError(
            f"{name} has {len(seconds)} entries.", why=f"one number or {count} of them are needed."
        )
    return list(seconds)
