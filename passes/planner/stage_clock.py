"""How long a step in stages takes by a schedule, told by what each stage does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from autopar.passes.schedules.make import make_schedule
from autopar.passes.schedules.schedule import Task, in_turns

STEADY = 4
"""By the number of stages, after how many microbatches one is as the other."""
MOST_CLOCKED = 32  # stages; of more, steps are long beside what stages wait
KINDS = "F", "B", "W"


class StageWork(NamedTuple):
    """What a stage does with one microbatch, and once a step; seconds.

    Args:
      forward: the forward pass.
      backward: the backward pass, the gradients of weights included.
      once: when it is done with its microbatches.
      sent: what it sends to the next stage, or back from there, is on its way; stages go on then.
      awaited: when it can begin, for what it is sent once arrives then.
    """

    forward: float
    backward: float
    once: float
    sent: float
    awaited: float = 0.0


class _Turn(NamedTuple):
    """A task, when its turn comes.

    Args:
      stage: its own.
      kind: place in `KINDS`.
      waits_for: the number of the turn of another stage that it waits for; -1: none.
      link: the stage after which what that one sends is on its way.
    """

    stage: int
    kind: int
    waits_for: int
    link: int


def in_flight_by(schedule: str) -> Callable[[int], int]:
    """Microbatches in flight, by the number of stages from one to the last."""
    return (
        (lambda left: 2 * left - 1) if schedule in ("eager_1f1b", "zb_h2") else (lambda left: left)
    )


def step_seconds(schedule: str, works: Sequence[StageWork], num_microbatches: int) -> float:
    """The time of a step on one mesh for each stage.

    Where the schedule divides the backward pass, gradients of weights are half of it, but take no
    longer than the forward pass: the rest may begin with computing that again. Where there is no
    backward pass, nobody waits for it. Of many microbatches those in the middle are taken to
    be as long as each other: not quite, if what is sent is on its way for longer than a stage
    works.

    >>> works = [StageWork(1.0, 2.0, 0.0, 0.0), StageWork(1.0, 2.0, 0.0, 0.0)]
    >>> [step_seconds(schedule, works, 4) for schedule in ("1f1b", "gpipe", "zb_h2")]
    [15.0, 15.0, 13.0]
    """
    if not any(x.backward for x in works):
        schedule = "inference"
    long, steady = STEADY * len(works), 2 * len(works)
    if num_microbatches > long + steady:
        one, other = (step_seconds(schedule, works, count) for count in (long, long + steady))
        each = max((other - one) / steady, *(x.forward + x.backward for x in works))
        return other + (num_microbatches - long - steady) * each
    turns = _turns(schedule, len(works), num_microbatches)
    is_divided = any(turn.kind == KINDS.index("W") for turn in turns)
    weights = [min(x.forward, x.backward / 2) if is_divided else 0.0 for x in works]
    seconds = [(x.forward, x.backward - w, w) for x, w in zip(works, weights, strict=True)]
    sent = [x.sent for x in works]
    clock, ends = [x.awaited for x in works], list[float]()
    for stage, kind, waits_for, link in turns:
        start = clock[stage]
        if waits_for >= 0:
            start = max(start, ends[waits_for] + sent[link])
        clock[stage] = start + seconds[stage][kind]
        ends.append(clock[stage])
    return max(end + x.once for end, x in zip(clock, works, strict=True))


@lru_cache(maxsize=64)
def _turns(schedule: str, num_stages: int, num_microbatches: int) -> tuple[_Turn, ...]:
    """The tasks in an order in which all that one waits for comes before."""
    made = make_schedule(schedule, num_stages, num_microbatches)
    numbers: dict[Task, int] = {}

    def is_ready(task: Task) -> bool:
        return all(before in numbers for before in made.waits_for(task))

    found = []
    for _, task in in_turns(made.tasks, is_ready, [0] * num_stages):
        others = [x for x in made.waits_for(task) if x.stage != task.stage]
        number = numbers[others[0]] if others else -1
        link = min(task.stage, others[0].stage) if others else 0
        found.append(_Turn(task.stage, KINDS.index(task.kind), number, link))
        numbers[task] = len(numbers)
    return tuple(found)
