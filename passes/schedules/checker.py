"""The checker: proves that a schedule is complete, free of deadlocks, and inside memory.

It takes any schedule, whoever wrote it, and is the only judge: named schedules pass through it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.base.errors import ScheduleError
from autopar.base.units import format_bytes
from autopar.passes.schedules.schedule import Schedule, Task

_SHOWN = 6  # tasks that a message lists before it says how many more there are


def check(
    schedule: Schedule,
    *,
    activation_bytes: Sequence[int] | int | None = None,
    memory_limit: Sequence[int] | int | None = None,
    retained_bytes: Sequence[int] | int | None = None,
) -> None:
    """Prove that a schedule runs every task once, in an order without deadlock, inside memory.

    Args:
      schedule: any schedule.
      activation_bytes: bytes per device that one microbatch in flight holds on each stage, from its
        F to its B, or one number for all stages.
      memory_limit: bytes per device that microbatches in flight may hold on each mesh, or one
        number for all meshes. Not checked when None.
      retained_bytes: bytes per device that a microbatch still holds on each stage between its B and
        its W, where the backward pass is split; by default `activation_bytes`.

    Raises:
      ScheduleError: a task is missing, duplicated, unknown or on the wrong mesh; tasks wait for
        each other in a cycle (which is named); or a mesh exceeds the limit (the mesh, the task and
        the microbatches in flight are named).
    """
    _check_shape(schedule)
    _check_complete(schedule)
    _check_progress(schedule)
    if memory_limit is None:
        return
    if activation_bytes is None:
        raise ScheduleError(
            "memory_limit cannot be checked without activation_bytes.",
            hint="pass the bytes that one microbatch in flight holds on each stage.",
        )
    activation = _per_stage("activation_bytes", activation_bytes, schedule.num_stages)
    retained = (
        activation
        if retained_bytes is None
        else _per_stage("retained_bytes", retained_bytes, schedule.num_stages)
    )
    limits = _per_stage("memory_limit", memory_limit, schedule.num_meshes)
    for mesh, limit in enumerate(limits):
        _check_memory(schedule, mesh, activation, retained, limit)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most microbatches that each mesh holds between their F and their B, over all its stages.

    Without a backward pass nothing is held: a forward pass counts while it runs.
    """
    peaks = []
    for tasks in schedule.tasks:
        held = peak = 0
        for task in tasks:
            held += task.kind == "F"
            peak = max(peak, held)
            held -= task.kind == "B" or schedule.forward_only
        peaks.append(peak)
    return tuple(peaks)


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
    missing = [task for task in _wanted(schedule) if task not in seen]
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


def _wanted(schedule: Schedule) -> Iterator[Task]:
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            for kind in schedule.kinds:
                yield Task(kind, stage, microbatch)


def _check_progress(schedule: Schedule) -> None:
    """Runs the lists as far as they go; complete lists that get stuck wait in a cycle."""
    done: set[Task] = set()
    position = [0] * schedule.num_meshes
    progress = True
    while progress:
        progress = False
        for mesh, tasks in enumerate(schedule.tasks):
            while position[mesh] < len(tasks) and done.issuperset(
                schedule.waits_for(tasks[position[mesh]])
            ):
                done.add(tasks[position[mesh]])
                position[mesh] += 1
                progress = True
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
            f"- {head} on mesh {mesh} waits for {wanted}, which stands behind {front} on mesh "
            f"{home}"
        )
    raise ScheduleError(
        f"Schedule {schedule.name!r} deadlocks.",
        why="tasks wait for each other in a cycle:\n" + "\n".join(sentences),
        hint="F(s,i) needs F(s-1,i); B(s,i) needs F(s,i) and B(s+1,i); W(s,i) needs B(s,i).",
    )


def _check_memory(
    schedule: Schedule,
    mesh: int,
    activation: Sequence[int],
    retained: Sequence[int],
    limit: int,
) -> None:
    held = 0
    flying: set[tuple[int, int]] = set()
    splits, forward_only = schedule.splits_backward, schedule.forward_only
    for task in schedule.tasks[mesh]:
        stage, key = task.stage, (task.stage, task.microbatch)
        if task.kind == "F":
            held += activation[stage]
            flying.add(key)
        if held > limit:
            raise ScheduleError(
                f"Schedule {schedule.name!r} exceeds the memory of mesh {mesh} at {task}.",
                why=f"{len(flying)} microbatches are in flight there and hold {format_bytes(held)} "
                f"per device ({held:,} bytes); the limit is {format_bytes(limit)} ({limit:,} "
                "bytes).",
                hint="use more, smaller microbatches, a schedule with fewer of them in flight "
                "(1f1b), or rematerialization.",
            )
        if forward_only or task.kind == "W" or (task.kind == "B" and not splits):
            held -= retained[stage] if task.kind == "W" else activation[stage]
            flying.discard(key)
        elif task.kind == "B":
            held += retained[stage] - activation[stage]


def _per_stage(name: str, values: Sequence[int] | int, count: int) -> Sequence[int]:
    if isinstance(values, int):
        return (values,) * count
    if len(values) != count:
        raise ScheduleError(
            f"{name} has {len(values)} entries.", why=f"one number or {count} of them are needed."
        )
    return values
