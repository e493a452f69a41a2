"""The checker: proves that a schedule is complete and free of deadlocks.

It takes any schedule, whoever wrote it, and is the only judge: named schedules pass through it too.
"""

from __future__ import annotations

from autopar.base.errors import ScheduleError
from autopar.passes.schedules.schedule import Schedule, Task, in_turns

_SHOWN = 6  # tasks that a message lists before it says how many more there are


def check(schedule: Schedule) -> None:
    """Prove that a schedule runs every task once, in an order without deadlock.

    Args:
      schedule: any schedule.

    Raises:
      ScheduleError: a task is missing, duplicated, unknown or on the wrong mesh; or tasks wait for
        each other in a cycle (which is named).
    """
    _check_shape(schedule)
    _check_complete(schedule)
    _check_progress(schedule)


def _check_shape(schedule: Schedule) -> None:
    """Stages lie on meshes that exist, and tasks name stages and microbatches that exist."""
    if schedule.num_stages < 1 or schedule.num_microbatches < 1 or schedule.num_meshes < 1:
        raise ScheduleError(
            f"Schedule {schedule.name!r} has no stage, no microbatch or no mesh.",
            why=f"it has {schedule.num_stages} stages, {schedule.num_microbatches} microbatches "
            f"and task lists for {schedule.num_meshes} meshes.",
        )
    homes = schedule.mesh_of_stage
    if len(homes) != schedule.num_stages or not all(
        0 <= home < schedule.num_meshes for home in homes
    ):
        raise ScheduleError(
            f"Schedule {schedule.name!r} has mesh_of_stage={homes}.",
            why=f"each of its {schedule.num_stages} stages needs a mesh from 0 to "
            f"{schedule.num_meshes - 1}.",
        )
    for mesh, tasks in enumerate(schedule.tasks):
        for task in tasks:
            if (
                task.kind not in ("F", "B", "W")
                or not 0 <= task.stage < schedule.num_stages
                or not 0 <= task.microbatch < schedule.num_microbatches
            ):
                raise ScheduleError(
                    f"Schedule {schedule.name!r} has a task {task} that cannot exist.",
                    where=f"mesh {mesh}",
                    why=f"a task is F, B or W of a stage from 0 to {schedule.num_stages - 1} and a "
                    f"microbatch from 0 to {schedule.num_microbatches - 1}.",
                )
            if homes[task.stage] != mesh:
                raise ScheduleError(
                    f"Schedule {schedule.name!r} runs {task} on mesh {mesh}.",
                    why=f"mesh_of_stage puts stage {task.stage} on mesh {homes[task.stage]}.",
                )


def _check_complete(schedule: Schedule) -> None:
    """Every stage runs each kind of task once for every microbatch."""
    seen: set[Task] = set()
    for mesh, tasks in enumerate(schedule.tasks):
        for task in tasks:
            if task in seen:
                raise ScheduleError(
                    f"Schedule {schedule.name!r} runs {task} twice.", where=f"mesh {mesh}"
                )
            seen.add(task)
    missing = [
        task
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
        for kind in schedule.kinds
        if (task := Task(kind, stage, microbatch)) not in seen
    ]
    if missing:
        shown = ", ".join(map(str, missing[:_SHOWN]))
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        stage = missing[0].stage
        raise ScheduleError(
            f"Schedule {schedule.name!r} lacks {shown}{more}.",
            where=f"mesh {schedule.mesh_of_stage[stage]}, which runs stage {stage}",
            why=f"every stage needs {', '.join(schedule.kinds)} once for each of the "
            f"{schedule.num_microbatches} microbatches.",
            hint="leave out all W tasks to keep the backward pass whole, and all B tasks as well "
            "for a program without one.",
        )


def _check_progress(schedule: Schedule) -> None:
    """Runs the lists as far as they go; complete lists that get stuck wait in a cycle."""
    done: set[Task] = set()
    position = [0] * schedule.num_meshes
    for _, task in in_turns(
        schedule.tasks, lambda task: done.issuperset(schedule.waits_for(task)), position
    ):
        done.add(task)
    stuck = [m for m, tasks in enumerate(schedule.tasks) if position[m] < len(tasks)]
    if not stuck:
        return
    # Each stuck mesh waits for a task that stands later in the list of a stuck mesh: following
    # these waits must come back to a mesh where it has been.
    waits: dict[int, Task] = {}
    mesh = stuck[0]
    while mesh not in waits:
        head = schedule.tasks[mesh][position[mesh]]
        waits[mesh] = next(task for task in schedule.waits_for(head) if task not in done)
        mesh = schedule.mesh_of_stage[waits[mesh].stage]
    cycle = list(waits)[list(waits).index(mesh) :]
    sentences = []
    for mesh in cycle:
        head, wanted = schedule.tasks[mesh][position[mesh]], waits[mesh]
        home = schedule.mesh_of_stage[wanted.stage]
        front = schedule.tasks[home][position[home]]
        sentences.append(
            f"- {head} on mesh {mesh} waits for {wanted}, which stands after {front} on mesh {home}"
        )
    raise ScheduleError(
        f"Schedule {schedule.name!r} deadlocks.",
        why="tasks wait for each other in a cycle:\n" + "\n".join(sentences),
        hint="F(s,i) needs F(s-1,i); B(s,i) needs F(s,i) and B(s+1,i); W(s,i) needs B(s,i).",
    )
