"""What stages cost and need, by the units that they are made of."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class UnitCost(NamedTuple):
    """A unit on one mesh: per microbatch, once a step, and memory per device.

    `forward_seconds` are the part of `seconds` that computing the forward pass again would add,
    `rowless_seconds` the part that is as long with fewer rows of the batch. `bytes_fixed` are there
    all the time, `bytes_working` at the worst moment beside them, `bytes_rowless` of these however
    few the rows. Where the gradients of weights come after the rest of a stage's backward pass,
    `bytes_waiting` are there until then. `casts` says whether parameters are cast in every
    microbatch.
    """

    seconds: float
    forward_seconds: float
    rowless_seconds: float
    once_seconds: float
    bytes_fixed: int
    bytes_per_microbatch: int
    bytes_working: int
    bytes_rowless: int
    casts: bool = False
    bytes_waiting: int = 0

    def joined(self, other: UnitCost) -> UnitCost:
        """Both, one after the other."""
        return UnitCost(
            self.seconds + other.seconds,
            self.forward_seconds + other.forward_seconds,
            self.rowless_seconds + other.rowless_seconds,
            self.once_seconds + other.once_seconds,
            self.bytes_fixed + other.bytes_fixed,
            self.bytes_per_microbatch + other.bytes_per_microbatch,
            max(self.bytes_working, other.bytes_working),
            max(self.bytes_rowless, other.bytes_rowless),
            self.casts or other.casts,
            self.bytes_waiting + other.bytes_waiting,
        )

    def halfway(self, other: UnitCost) -> UnitCost:
        """As part of a stage of which half the layers are run in one way and half in the other."""
        return UnitCost(
            (self.seconds + other.seconds) / 2,
            (self.forward_seconds + other.forward_seconds) / 2,
            (self.rowless_seconds + other.rowless_seconds) / 2,
            (self.once_seconds + other.once_seconds) / 2,
            math.ceil((self.bytes_fixed + other.bytes_fixed) / 2),
            math.ceil((self.bytes_per_microbatch + other.bytes_per_microbatch) / 2),
            max(self.bytes_working, other.bytes_working),
            max(self.bytes_rowless, other.bytes_rowless),
            self.casts or other.casts,
            math.ceil((self.bytes_waiting + other.bytes_waiting) / 2),
        )

    def often(self, times: int) -> UnitCost:
        """The time of so many, one after the other; the memory of one."""
        return self._replace(
            seconds=times * self.seconds,
            forward_seconds=times * self.forward_seconds,
            rowless_seconds=times * self.rowless_seconds,
            once_seconds=times * self.once_seconds,
        )

    def shared_by(self, times: int) -> UnitCost:
        """The time on so many times the devices, which share what is done; no memory."""
        return NOTHING._replace(
            seconds=self.seconds / times,
            forward_seconds=self.forward_seconds / times,
            rowless_seconds=self.rowless_seconds / times,
            once_seconds=self.once_seconds / times,
        )

    def needing_at_most(self, other: UnitCost) -> UnitCost:
        """The time with the memory of another plan, as far as that is less."""
        return self._replace(
            bytes_fixed=min(self.bytes_fixed, other.bytes_fixed),
            bytes_per_microbatch=min(self.bytes_per_microbatch, other.bytes_per_microbatch),
            bytes_working=min(self.bytes_working, other.bytes_working),
            bytes_rowless=min(self.bytes_rowless, other.bytes_rowless),
            bytes_waiting=min(self.bytes_waiting, other.bytes_waiting),
        )

    def slowed_to(self, other: UnitCost) -> UnitCost:
        """The memory with the time of another plan."""
        return self._replace(
            seconds=other.seconds,
            forward_seconds=other.forward_seconds,
            rowless_seconds=other.rowless_seconds,
            once_seconds=other.once_seconds,
        )

    def with_rows(self, part: float) -> UnitCost:
        """With a part of the rows of a microbatch, or with more of them: at the least.

        The worst moment is another one with another number of rows.
        """
        seconds = self.rowless_seconds + part * (self.seconds - self.rowless_seconds)
        rowless, working = self.bytes_rowless, self.bytes_working
        least = max(rowless, part * working) if part < 1 else rowless + part * (working - rowless)
        return UnitCost(
            seconds,
            self.forward_seconds * (seconds / self.seconds if self.seconds else 1.0),
            self.rowless_seconds,
            self.once_seconds,
            self.bytes_fixed,
            math.floor(self.bytes_per_microbatch * part),
            math.floor(least),
            rowless,
            self.casts,
            math.floor(self.bytes_waiting * part),
        )

    @property
    def backward_seconds(self) -> float:
        """Of one microbatch."""
        return self.seconds - self.forward_seconds

    @property
    def bytes_for_one(self) -> int:
        """With one microbatch in flight."""
        return self.bytes_fixed + self.bytes_per_microbatch + self.bytes_working


class EqualStages(NamedTuple):
    """The seconds of a step in stages that are equal, and the bytes of a device of the first."""

    seconds: float
    bytes: int


NOTHING = UnitCost(0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0)


Mesh = tuple[int, ...]
Way = tuple[UnitCost, ...]
"""What each unit costs on one mesh at one price of memory."""


def in_equal_stages(way: Way, stages: int, num_microbatches: int) -> EqualStages | None:
    """What a step takes and a device needs, where stages have about as many units, by 1F1B.

    Transfers are not counted. None where there are fewer units than stages.
    """
    if not 1 <= stages <= len(way):
        return None
    count, cuts = num_microbatches, equal_runs(len(way), stages)
    runs = [joined(way[start:stop]) for start, stop in itertools.pairwise(cuts)]
    starts = sum(run.seconds for run in runs)
    slowest = (count - 1) * max(run.seconds for run in runs)
    early = itertools.accumulate((run.backward_seconds for run in runs), initial=0.0)
    once = max(run.once_seconds - before for run, before in zip(runs, early, strict=False))
    needed = (
        run.bytes_fixed + run.bytes_working + run.bytes_per_microbatch * min(flight, count)
        for run, flight in zip(runs, range(stages, 0, -1), strict=True)
    )
    return EqualStages(starts + slowest + once, max(needed))


def evenly(total: UnitCost, num_stages: float, num_microbatches: int) -> float:
    """What a step takes at the least where units are shared out evenly among stages, by 1F1B.

    No split among as many stages takes less: each has a whole number of units.

    Args:
      total: all units, one after the other, on the mesh of one stage.
      num_stages: of as many devices.
      num_microbatches: of the step.
    """
    starts = num_microbatches + num_stages - 1
    early = (num_stages - 1) / 2 * total.backward_seconds  # on average, `stage_choice`
    return (starts * total.seconds + max(total.once_seconds - early, 0.0)) / num_stages


def equal_runs(count: int, parts: int) -> list[int]:
    """Where so many runs of about equally many units begin and end; the first and last are short.

    What comes before the first block and after the last is a unit as well, but not a block.

    >>> equal_runs(14, 4)
    [0, 4, 7, 10, 14]
    """
    inner = max(count - 2, parts)
    ends = [math.ceil(inner * part / parts) + (count > inner) for part in range(1, parts)]
    return [0, *ends, count]


def with_halfway(ways: Sequence[tuple[Mesh, Way]]) -> list[tuple[Mesh, Way]]:
    """And those between two on a mesh, next to each other in what they need all the time.

    Within a limit, stages are filled up by layers of the quicker way, as far as they fit.
    """

    def by_bytes(way: Way) -> tuple[int, float]:
        total = joined(way)
        return total.bytes_fixed, total.seconds

    found = [*ways]
    for mesh, casts in dict.fromkeys((mesh, way[0].casts) for mesh, way in ways):
        alike = {way: None for m, way in ways if (m, way[0].casts) == (mesh, casts)}
        for one, other in itertools.pairwise(sorted(alike, key=by_bytes)):
            found.append((mesh, tuple(map(UnitCost.halfway, one, other))))
    return found


def without_memory(ways: Sequence[tuple[Mesh, Way]]) -> list[tuple[Mesh, Way]]:
    """The same as if they needed none: no plan at a price of memory is quicker."""

    def needing_none(unit: UnitCost) -> UnitCost:
        alone = unit._replace(bytes_fixed=0, bytes_per_microbatch=0, bytes_waiting=0)
        return alone._replace(bytes_working=0)

    return [(mesh, tuple(map(needing_none, way))) for mesh, way in ways]


def joined(way: Way) -> UnitCost:
    """Its units, one after the other."""
    return functools.reduce(UnitCost.joined, way, NOTHING)


def least_before(
    ways: Mapping[int, Sequence[Way]], each: Callable[[UnitCost], float]
) -> list[float]:
    """By every unit, what those before it have of something at the least, in any way together."""
    found = [way for some in ways.values() for way in some]
    least = (min(map(each, units)) for units in zip(*found, strict=True))
    return list(itertools.accumulate(least, initial=0.0))


def busy_seconds(ways: Mapping[int, Sequence[Way]]) -> float:
    """Of all devices together, for a microbatch: each unit on the submesh where these are least.

    Args:
      ways: for each size of submesh.
    """
    busy = ([size * x.seconds for x in way] for size, found in ways.items() for way in found)
    return sum(map(min, zip(*busy, strict=True)))
