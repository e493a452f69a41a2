"""Stages made better by moving single cuts between them, told by the clock of their schedule.

The dynamic program's objective (`stage_choice`) adds up what stages wait for at the most. Where one
stage takes longer than the others, these wait less; where one does much once a step, the others may
take longer before. So each cut is moved by a unit, as long as that helps; and stays where it was
if all that helps little, for units alone do not tell so exactly what stages take. Where devices
wait for little, nothing is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from autopar.passes.planner.stage_choice import StageChoice, StageOption, StageRange

MOST_STAGES = 8  # with more, a cut matters less and the clock takes longer
HELPS = 0.999  # times what the best so far takes
CLEARLY = 0.97  # times what a step takes with the cuts as they were
MOST_ROUNDS = 16

Fitting = Callable[[int, int, int, int], Sequence[StageOption]]
"""By the units with which a stage begins and ends, its devices, and its number from the end: the
options that fit."""


def moved_cuts(
    choice: StageChoice,
    fitting: Fitting,
    own_seconds: Callable[[StageOption], float],
    step_seconds: Callable[[Sequence[StageRange]], float],
) -> tuple[StageChoice, float]:
    """The stages with cuts moved by single units, and the seconds of a step; maybe as they were.

    Args:
      choice: the stages to begin with.
      fitting: the options that fit of a stage.
      own_seconds: what a stage does in a step by an option.
      step_seconds: of all stages.
    """
    first = step_seconds(choice.stages)
    best, least = choice, first
    count = len(choice.stages)
    if not 2 <= count <= MOST_STAGES or hardly_waits(choice, first, own_seconds):
        return best, least
    for _ in range(MOST_ROUNDS):
        before = least
        for place, step in itertools.product(range(1, count), (-1, 1)):
            moved = _moved(best, place, step, fitting, own_seconds)
            if moved is None:
                continue
            seconds = step_seconds(moved.stages)
            if seconds < HELPS * least:
                best, least = moved, seconds
        if least == before:
            break
    return (best, least) if least < CLEARLY * first else (choice, first)


def hardly_waits(
    choice: StageChoice, seconds: float, own_seconds: Callable[[StageOption], float]
) -> bool:
    """Whether devices work in nearly all of a step of so many seconds, or send what they made."""
    busy = sum(stage.num_devices * own_seconds(stage.option) for stage in choice.stages)
    return busy / sum(stage.num_devices for stage in choice.stages) > CLEARLY * seconds


def _moved(
    choice: StageChoice,
    place: int,
    step: int,
    fitting: Fitting,
    own_seconds: Callable[[StageOption], float],
) -> StageChoice | None:
    """With the cut before a stage elsewhere; None if a stage would be empty, or does not fit."""
    stages = list(choice.stages)
    cut = stages[place].start + step
    for number, start, stop in (
        (place - 1, stages[place - 1].start, cut),
        (place, cut, stages[place].stop),
    ):
        devices = stages[number].num_devices
        options = fitting(start, stop, devices, len(stages) - number) if start < stop else ()
        if not options:
            return None
        stages[number] = StageRange(start, stop, devices, min(options, key=own_seconds))
    return StageChoice(tuple(stages), choice.step_seconds)
