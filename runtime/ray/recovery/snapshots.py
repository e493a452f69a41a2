"""Copies of the arrays on actors in the driver's memory, so that the log of a step stays short.

A snapshot is asked for between two steps and arrives while later ones run. It counts when all of
it is there; until then, or if a part never comes, the one before it does. An array never changes,
so it is copied once, however long it is held.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from ray.exceptions import RayError

from autopar.arrays.ray_array import LeafPlace
from autopar.runtime.ray.recovery.lineage import Coming, Lineage, LogEntry, Runner, Saved


class _Coming(NamedTuple):
    """A snapshot that is on its way: its place in the log, and what the driver has already.

    Of what the actors send, the arrays are (number, parts, the dimension of these, place, weak
    type), with copies of all their parts in this order.
    """

    mark: LogEntry
    known: dict[int, Saved]
    arrays: tuple[tuple[int, int, int, LeafPlace, bool], ...]
    copies: Coming


class Snapshots:
    """Takes a snapshot every so many steps, which the log gets."""

    def __init__(self, log: Lineage, every: int) -> None:
        self._log, self._every = log, every
        self._steps = 0
        self._coming: _Coming | None = None

    def stepped(self, runner: Runner) -> None:
        """A step was asked for."""
        self._steps += 1
        self._receive(runner)
        if self._steps >= self._every and self._coming is None:
            self._take(runner)
            self._steps = 0

    def forget(self) -> None:
        """What is on its way will not come: its actors are lost."""
        if self._coming is not None:
            self._coming, self._steps = None, self._every

    def _take(self, runner: Runner) -> None:
        log = self._log
        log.drop_called_off(runner)
        arrays = {n: array for n, array in log.live().items() if n not in log.saved}
        known = {
            n: Saved(x.fetched, x.place, x.weak_type)
            for n, x in arrays.items()
            if x.fetched is not None
        }
        arrays = {n: array for n, array in arrays.items() if n not in known}
        residents = [resident for array in arrays.values() for resident in array.residents]
        self._coming = _Coming(
            log.mark(),
            known,
            tuple(
                (n, len(x.residents), x.sharding.axis, x.place, x.weak_type)
                for n, x in arrays.items()
            ),
            runner.arrays.copies(residents),
        )

    def _receive(self, runner: Runner) -> None:
        """Take over a snapshot that has arrived."""
        coming = self._coming
        if coming is None or not coming.copies.is_there():
            return
        self._log.drop_called_off(runner)
        if self._log.is_saving(coming.mark):
            return  # the log can still be needed from an earlier place
        self._coming = None
        try:
            given = coming.copies.get()
        except RayError:
            return  # an actor is lost: whoever looks next will say so
        if given is None:
            return  # a step before it failed
        found, left = dict(coming.known), iter(given)
        for number, count, axis, place, weak in coming.arrays:
            pieces = [next(left) for _ in range(count)]
            whole = pieces[0] if count == 1 else np.concatenate(pieces, axis)
            found[number] = Saved(whole, place, weak)
        self._log.snapshot(coming.mark, found)
