"""What repeats in a schedule: rounds that are alike, of which a shorter schedule has fewer.

A round begins where a mesh begins another group of microbatches: in its warm-up with a forward
pass, from its first backward pass on with a backward pass (of its last chunk). Where the rounds of
all meshes are those before with later microbatches, all of them but a few can be left out and what
follows renumbered. The tasks around a round do not depend on how many rounds came before it, so
what is made of the shorter schedule is what is made of the whole one, with rounds repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.passes.schedules.schedule import Schedule, Task

KEPT_ROUNDS = 6
"""How many of the rounds that are alike a shorter schedule has: three before the cut, three after.

The first and the last may differ in what surrounds them: a sum begins, the state is freed.
"""

_Round = tuple[tuple[Task, ...], ...]  # for every mesh, its tasks


@dataclass(frozen=True)
class Stretch:
    """Rounds that are alike: `num_rounds` of them, with `group` microbatches each.

    Args:
      cuts: for every mesh, the places among its tasks at which the rounds begin and the last ends.
      kinds: the kinds of tasks, with their stages, that are in a round.
    """

    cuts: tuple[tuple[int, ...], ...]
    group: int
    kinds: frozenset[tuple[str, int]]

    @property
    def num_rounds(self) -> int:
        return len(self.cuts[0]) - 1


def stretches(schedule: Schedule) -> tuple[Stretch, ...]:
    """The stretches of a schedule in which every task takes part once; () if it has none such.

    >>> from autopar.passes.schedules.make import make_schedule
    >>> [x.num_rounds for x in stretches(make_schedule("gpipe", 2, 9))]
    [9, 9]
    """
    groups = dict.fromkeys((1, schedule.num_meshes))
    for group in groups:
        found = [
            stretch
            for phase in _phases(schedule, group)
            if (stretch := _longest(schedule, phase, group)) is not None
        ]
        kinds = [kind for stretch in found for kind in stretch.kinds]
        every = {(kind, s) for kind in schedule.kinds for s in range(schedule.num_stages)}
        if len(kinds) == len(set(kinds)) and every == set(kinds):
            return tuple(found)
    return ()


class Shortened(NamedTuple):
    """A schedule with fewer rounds.

    `middles` has for every mesh the places among its tasks at which rounds were left out, one for
    each stretch.
    """

    schedule: Schedule
    middles: tuple[tuple[int, ...], ...]


def shortened(schedule: Schedule, found: Sequence[Stretch], num_rounds: int) -> Shortened:
    """The schedule with all but so many of the rounds of its shortest stretch left out.

    >>> from autopar.passes.schedules.make import make_schedule
    >>> whole = make_schedule("1f1b", 2, 40)
    >>> shortened(whole, stretches(whole), 6).schedule == make_schedule("1f1b", 2, 8)
    True
    """
    fewer = min(stretch.num_rounds for stretch in found) - num_rounds
    lists, places = [], []
    for mesh, tasks in enumerate(schedule.tasks):
        made: list[Task] = []
        start, later, middles = 0, dict[tuple[str, int], int](), []
        for stretch in found:
            cuts = stretch.cuts[mesh]
            made += _earlier(tasks[start : cuts[KEPT_ROUNDS // 2]], later)
            start = cuts[KEPT_ROUNDS // 2 + fewer]
            middles.append(len(made))
            for kind in stretch.kinds:
                later[kind] = fewer * stretch.group
        lists.append((*made, *_earlier(tasks[start:], later)))
        places.append(tuple(middles))
    count = schedule.num_microbatches - fewer * found[0].group
    short = replace(schedule, num_microbatches=count, tasks=tuple(lists))
    return Shortened(short, tuple(places))


def _earlier(tasks: Sequence[Task], by: dict[tuple[str, int], int]) -> list[Task]:
    return [Task(kind, stage, i - by.get((kind, stage), 0)) for kind, stage, i in tasks]


def _phases(schedule: Schedule, group: int) -> list[list[list[int]]]:
    """For the warm-up and for what follows it, each mesh's places at which rounds begin; the end.

    A mesh's last place is where the phase ends.
    """
    last_chunk = schedule.num_stages - schedule.num_meshes
    warmup, rest = [], []
    for tasks in schedule.tasks:
        first = next((i for i, task in enumerate(tasks) if task.kind == "B"), len(tasks))
        starts = [
            i
            for i, (_, stage, microbatch) in enumerate(tasks[:first])
            if stage < schedule.num_meshes and microbatch % group == 0
        ]
        warmup.append([*starts, first])
        starts = [
            first + i
            for i, (kind, stage, microbatch) in enumerate(tasks[first:])
            if kind == "B" and stage >= last_chunk and microbatch % group == 0
        ]
        rest.append([*starts, len(tasks)])
    return [warmup, rest]


def _longest(schedule: Schedule, phase: list[list[int]], group: int) -> Stretch | None:
    """The longest stretch of a phase's rounds that are alike, if it is long enough."""
    number = max(map(len, phase)) - 1
    rounds: list[_Round] = [
        tuple(
            tasks[starts[i] : starts[i + 1]] if i + 1 < len(starts) else ()
            for tasks, starts in zip(schedule.tasks, phase, strict=True)
        )
        for i in range(number)
    ]
    alike = [_follows(a, b, group) for a, b in itertools.pairwise(rounds)]
    best, start = (0, 0), 0
    for same, run in itertools.groupby(alike):
        length = len(list(run))
        if same:
            best = max(best, (length + 1, -start))
        start += length
    length, first = best[0], -best[1]
    if length < KEPT_ROUNDS + 2 or not all(rounds[first]):
        return None
    cuts = tuple(tuple(starts[first : first + length + 1]) for starts in phase)
    kinds = frozenset((task.kind, task.stage) for tasks in rounds[first] for task in tasks)
    return Stretch(cuts, group, kinds)


def _follows(before: _Round, after: _Round, group: int) -> bool:
    """Whether a round is the one before with the microbatches of the next group."""
    return all(
        len(a) == len(b)
        and all(x[:2] == y[:2] and x[2] + group == y[2] for x, y in zip(a, b, strict=True))
        for a, b in zip(before, after, strict=True)
    )
