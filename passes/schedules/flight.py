"""How many microbatches a stage has in flight, read from a schedule."""

from __future__ import annotations

from collections import Counter

from autopar.passes.graph.microbatched import InFlight
from autopar.passes.schedules.schedule import Schedule, TaskKind

ONE_IN_FLIGHT: InFlight = {("F", "B"): 1, ("F", "W"): 1, ("B", "W"): 1}
"""A schedule that ends one microbatch before the next."""


def in_flight(schedule: Schedule, stage: int) -> InFlight:
    """For any two tasks of a stage, the most microbatches that are between them at once.

    Args:
      schedule: any schedule. Where it does not split the backward pass, W runs with B.
      stage: the stage's number.

    >>> from autopar.passes.schedules.make import make_schedule
    >>> in_flight(make_schedule("1f1b", 4, 16), 1)
    {('F', 'B'): 3, ('F', 'W'): 3, ('B', 'W'): 1}
    """
    most: dict[tuple[TaskKind, TaskKind], int] = {("F", "B"): 0, ("F", "W"): 0, ("B", "W"): 0}
    begun, ended = Counter[str](), Counter[str]()
    for kind, of_stage, _ in schedule.tasks[schedule.mesh_of_stage[stage]]:
        if of_stage != stage:
            continue
        kinds = ("B", "W") if kind == "B" and not schedule.splits_backward else (kind,)
        for one in kinds:
            begun[one] += 1
        for first, last in most:
            most[first, last] = max(most[first, last], begun[first] - ended[last])
        ended = begun.copy()
    return most
