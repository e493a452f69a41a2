"""The recursion over states, from the end: the best rest of a plan for every cut and budget.

`value[state, count, devices]` is the best that the stages after a cut can do if their weights add
up to `count` and they share `devices`. A stage's place counted from the end is part of the state,
so the microbatches that it holds in flight are known when it is chosen, and memory is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.passes.planner.stage_problem import Floats, PathStep, StageProblem


class StageCosts(NamedTuple):
    """The stages of one kind that begin at one state, as arrays `[options, successors]`.

    `room` is the largest number of microbatches in flight that fits; -1: not even none. `options`
    and `after` say which options and successors there are, ascending; what else is possible for
    none of them is left out, so that there may be none.
    """

    summed: Floats
    bottleneck: Floats
    room: Floats
    options: NDArray[np.intp]
    after: NDArray[np.intp]

    def only(self, possible: NDArray[np.bool_]) -> StageCosts:
        """These stages alone: others cost infinitely much."""
        options = np.flatnonzero(possible.any(axis=1))
        stops = np.flatnonzero(possible.any(axis=0))
        span = slice(stops[0], stops[-1] + 1) if stops.size else slice(0, 0)
        left = possible[options, span]
        return StageCosts(
            np.where(left, self.summed[options, span], np.inf),
            np.where(left, self.bottleneck[options, span], np.inf),
            self.room[options, span],
            self.options[options],
            self.after[span],
        )


class StageTables(NamedTuple):
    """A problem as the sweeps read it: cells `[state][kind]`, in-flight counts `[kind][count]`.

    `longest` is, for each state, the most stages of a path from it to the end; -1: there is none.
    """

    problem: StageProblem
    cells: tuple[tuple[StageCosts, ...], ...]
    in_flight: tuple[Floats, ...]
    longest: NDArray[np.intp]


Cost = Callable[[StageCosts, Floats], Floats]
"""From a cell and in-flight counts `[counts]` to costs `[options, successors, counts or 1]`."""

Join = np.ufunc
"""How a stage's cost joins that of the stages after it: `np.add` or `np.maximum`."""


def tabulate(problem: StageProblem, at_most: float = math.inf) -> StageTables:
    """Arranges a problem's costs by the state at which a stage begins.

    Without stages that never fit, or alone cost more than `at_most`.
    """
    in_flight = []
    for kind in problem.kinds:
        counts = range(kind.weight, problem.max_count + 1)
        in_flight.append(np.array([kind.in_flight(count) for count in counts], dtype=np.float64))
    cells = []
    for state, after in enumerate(problem.successors):
        row = []
        for kind, flights in zip(problem.kinds, in_flight, strict=True):
            bottleneck = kind.bottleneck[:, state, after]
            nothing = np.zeros_like(bottleneck)
            summed, fixed, per_microbatch = (
                nothing if array is None else array[:, state, after]
                for array in (kind.summed, kind.bytes_fixed, kind.bytes_per_microbatch)
            )
            room = _room(fixed, per_microbatch, problem.memory_limit)
            places = np.arange(len(bottleneck))
            possible = np.isfinite(summed + bottleneck) & (summed + bottleneck <= at_most)
            possible &= room >= flights.min(initial=np.inf)
            row.append(StageCosts(summed, bottleneck, room, places, after).only(possible))
        cells.append(tuple(row))
    longest = np.full(len(problem.successors), -1)
    longest[-1] = 0
    for state in reversed(range(len(longest) - 1)):
        best = longest[problem.successors[state]].max(initial=-1)
        longest[state] = best + 1 if best >= 0 else -1
    return StageTables(problem, tuple(cells), tuple(in_flight), longest)


def _room(fixed: Floats, per_microbatch: Floats, limit: float | None) -> Floats:
    if limit is None:
        return np.full_like(fixed, np.inf)
    positive = per_microbatch > 0
    # Exact for whole bytes, which a rounded quotient is not.
    room = np.floor_divide(limit - fixed, np.where(positive, per_microbatch, 1.0))
    room = np.where(positive, room, np.inf)
    return np.where(fixed <= limit, room, -1.0)


def summed_cost(threshold: float) -> Cost:
    """What adds up, for stages that fit and whose bottleneck is at most `threshold`."""

    def cost(cell: StageCosts, in_flight: Floats) -> Floats:
        allowed = np.where(cell.bottleneck <= threshold, cell.summed, np.inf)
        return _where_it_fits(allowed, cell, in_flight)

    return cost


def bottleneck_cost(cell: StageCosts, in_flight: Floats) -> Floats:
    """The bottleneck of stages that fit."""
    return _where_it_fits(cell.bottleneck, cell, in_flight)


def _where_it_fits(costs: Floats, cell: StageCosts, in_flight: Floats) -> Floats:
    if in_flight.size == 0 or cell.room.min(initial=np.inf) >= in_flight.max():
        return costs[:, :, None]
    return np.where(cell.room[:, :, None] >= in_flight, costs[:, :, None], np.inf)


def sweep(tables: StageTables, cost: Cost, join: Join) -> Floats:
    """The best rest of a plan: float64 `[states, counts, devices]`, infinite where there is none.

    Args:
      tables: the problem.
      cost: the cost of a stage.
      join: how it joins the cost of the stages after it.
    """
    problem = tables.problem
    num_states = len(problem.successors)
    value = np.full((num_states, problem.max_count + 1, problem.num_devices + 1), np.inf)
    value[-1, 0, : 1 if problem.all_devices else None] = 0.0
    heaviest = max((kind.weight for kind in problem.kinds), default=0)
    for state in reversed(range(num_states - 1)):
        # No path from here can have a larger count.
        counts = min(problem.max_count, max(0, tables.longest[state]) * heaviest) + 1
        for kind, cell, in_flight in zip(
            problem.kinds, tables.cells[state], tables.in_flight, strict=True
        ):
            if not cell.options.size:
                continue
            rest_counts = counts - kind.weight
            rest_devices = problem.num_devices + 1 - kind.devices
            if rest_counts <= 0 or rest_devices <= 0:
                continue
            stage = cost(cell, in_flight[:rest_counts]).min(axis=0, initial=np.inf)
            possible = np.flatnonzero(np.isfinite(stage).any(axis=1))
            if not possible.size:
                continue
            stage = stage[possible[0] : possible[-1] + 1]
            later = _as_slice(cell.after[possible[0] : possible[-1] + 1])
            rest = value[later, :rest_counts, :rest_devices]
            best = join(stage[:, :, None], rest).min(axis=0)
            here = value[state, kind.weight : counts, kind.devices :]
            np.minimum(here, best, out=here)
    return value


def _as_slice(states: NDArray[np.intp]) -> slice | NDArray[np.intp]:
    """Neighbouring states as a slice, whose values NumPy need not copy."""
    first, last = int(states[0]), int(states[-1])
    return slice(first, last + 1) if last - first + 1 == len(states) else states


def least(tables: StageTables, value: Floats) -> tuple[float, int]:
    """The best value of a whole plan, and the least count that reaches it."""
    values = value[0, :, tables.problem.num_devices]
    count = int(values.argmin())
    return float(values[count]), count


def trace(tables: StageTables, value: Floats, cost: Cost, join: Join) -> tuple[PathStep, ...]:
    """The first plan, in lexicographic order, among those of the least value and then count.

    Plans are compared by their stages: where the first ends, its kind, its option, then the second.
    """
    problem = tables.problem
    target, count = least(tables, value)
    state, devices = 0, problem.num_devices
    steps: list[PathStep] = []
    while state != len(problem.successors) - 1:
        found: list[tuple[int, int, int, float]] = []
        for index, kind in enumerate(problem.kinds):
            cell = tables.cells[state][index]
            if kind.weight > count or kind.devices > devices or not cell.options.size:
                continue
            in_flight = tables.in_flight[index][count - kind.weight :][:1]
            stages = cost(cell, in_flight)[:, :, 0]
            rest = value[cell.after, count - kind.weight, devices - kind.devices]
            # `<=` alone would hold between two infinite values.
            fits = np.isfinite(stages) & (join(stages, rest) <= target)
            for position in np.flatnonzero(fits.any(axis=0))[:1]:
                option = int(cell.options[fits[:, position].argmax()])
                found.append((int(cell.after[position]), index, option, float(rest[position])))
        stop, index, option, rest_value = min(found)
        steps.append(PathStep(state, stop, index, option))
        state = stop
        count -= problem.kinds[index].weight
        devices -= problem.kinds[index].devices
        if join is np.add:
            target = rest_value
    return tuple(steps)


def costs_of(tables: StageTables, steps: Sequence[PathStep]) -> tuple[float, float]:
    """What adds up over the stages of a plan, and its largest bottleneck."""
    summed = bottleneck = 0.0
    for step in steps:
        cell = tables.cells[step.start][step.kind]
        place = np.searchsorted(cell.options, step.option), np.searchsorted(cell.after, step.stop)
        summed += float(cell.summed[place])
        bottleneck = max(bottleneck, float(cell.bottleneck[place]))
    return summed, bottleneck
