"""What made the arrays on actors since the last snapshot, so that it can be done again.

Everything on the actors is deterministic: the same calls, with the same numbers from the driver,
make the same arrays. The log speaks of leaves and not of actors, so it can be run on another plan.
What nobody needs any more is not made again, or dropped as soon as it was read for the last time.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from autopar.arrays.ray_array import Keeper, LeafPlace, RayArray, Resident
from autopar.arrays.sourced_leaf import SourcedLeaf
from autopar.base.errors import LostActorError, StageError
from autopar.runtime.ray.transport.host_tiles import host_numbers


class Coming(Protocol):
    """Copies of arrays that are on their way; see `driver.resident_arrays.Copies`."""

    def is_there(self) -> bool: ...
    def get(self) -> list[np.ndarray] | None: ...


class Unfinished(Protocol):
    """Arrays that are being written to files; see `driver.save.Saving`."""

    is_done: bool

    def is_settled(self) -> bool: ...


class ToldSteps(Protocol):
    """The steps that the actors were told of; see `driver.step_queue.StepQueue`."""

    serial: int

    def finish(self) -> None: ...
    def called_off(self, serial: int) -> bool: ...


class HeldArrays(Protocol):
    """The arrays that the actors have; see `driver.resident_arrays.ResidentArrays`."""

    def copies(self, residents: Sequence[Resident]) -> Coming: ...
    def lost_array(self) -> StageError: ...
    def place(self, leaf: Any, place: LeafPlace, weak: bool) -> RayArray: ...


class Runner(Protocol):
    """What runs a step; see `driver.running.Running`."""

    @property
    def steps(self) -> ToldSteps: ...
    @property
    def arrays(self) -> HeldArrays: ...
    def step(self, leaves: Sequence[Any], donated: Collection[int]) -> list[RayArray]: ...


@dataclass(frozen=True)
class Made:
    """An array that the log says how to make, by its number."""

    number: int


Given = Made | np.ndarray | SourcedLeaf
"""A leaf in the log: made by an earlier entry, or the numbers that the driver gave."""


Again = Callable[[list[Any], Any], list[RayArray]]
"""Makes arrays of leaves on a `Runner`; it holds no actors, but is given them."""


@dataclass(eq=False)
class LogEntry:
    """Something that was done with leaves; one without anything is the place of a snapshot.

    Its results are the numbers of the arrays that it makes. A step has a number on the actors that
    ran it last (`serial`); what writes arrays to files is done again unless it was done (`saving`).
    """

    leaves: tuple[Given, ...] = ()
    again: Again = lambda leaves, runner: []
    results: tuple[int, ...] = ()
    serial: int | None = None
    saving: Unfinished | None = None

    @property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the arrays that it needs."""
        return tuple(leaf.number for leaf in self.leaves if isinstance(leaf, Made))

    def is_called_off(self, runner: Runner) -> bool:
        """Whether it is a step that was given up."""
        return self.serial is not None and runner.steps.called_off(self.serial)


class Saved(NamedTuple):
    """An array in host memory (of PRNG keys, what they wrap), its place on the actors, its type.

    It is weak if JAX promotes it as it does a Python number.
    """

    numbers: np.ndarray
    place: LeafPlace
    weak: bool


class Lineage:
    """The log of a step's arrays.

    Attributes:
      entries: since the last snapshot.
      saved: the snapshot, by the numbers of arrays.
    """

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.saved: dict[int, Saved] = {}
        self._numbers = itertools.count()
        self._handles: dict[int, weakref.ref[RayArray]] = {}
        # Of JAX's arrays, which do not change: one that is given to every step is copied once.
        self._copies: dict[int, tuple[weakref.ref[jax.Array], np.ndarray]] = {}

    def given(self, leaf: Any, keeper: Keeper) -> Given:
        """A leaf as the log holds it: the caller may change or delete it afterwards."""
        if isinstance(leaf, RayArray):
            if leaf.keeper is keeper and leaf.number is not None:
                return Made(leaf.number)
            return leaf.numbers()
        if isinstance(leaf, SourcedLeaf):
            return leaf  # it is read again
        if not isinstance(leaf, jax.Array):
            return np.array(host_numbers(leaf))
        known = self._copies.get(id(leaf))
        if known is None or known[0]() is not leaf:
            known = weakref.ref(leaf), np.array(host_numbers(leaf))
            self._copies[id(leaf)] = known
        return known[1]

    def write(
        self,
        leaves: tuple[Given, ...],
        again: Again,
        made: Sequence[RayArray],
        serial: int | None = None,
        saving: Unfinished | None = None,
    ) -> None:
        """Something was done, and made arrays; the other arguments are those of `LogEntry`."""
        for array in made:
            array.number = next(self._numbers)
            self._handles[array.number] = weakref.ref(array)
        results = tuple(array.number for array in made if array.number is not None)
        self.entries.append(LogEntry(leaves, again, results, serial, saving))

    def live(self) -> dict[int, RayArray]:
        """The arrays that the user still holds, but for those that a failure took, by number."""
        found = {}
        for number, handle in list(self._handles.items()):
            array = handle()
            if array is None or array.is_deleted():
                del self._handles[number]
            elif array.error is None:
                found[number] = array
        return found

    def drop(self, is_dead: Callable[[LogEntry], bool], error: StageError) -> None:
        """Take out the entries that failed, and those that need what they made.

        Those who hold what they were to make are told of the error.
        """
        dead: set[int] = set()
        kept: list[LogEntry] = []
        for entry in self.entries:
            if is_dead(entry) or not dead.isdisjoint(entry.inputs):
                dead.update(entry.results)
            else:
                kept.append(entry)
        self.entries = kept
        for number, array in self.live().items():
            if number in dead:
                array.lose(error)

    def drop_called_off(self, runner: Runner) -> None:
        """Take out the steps that were given up, and what needs what they made."""
        self.drop(lambda entry: entry.is_called_off(runner), runner.arrays.lost_array())

    def mark(self) -> LogEntry:
        """Remember this place of the log."""
        mark = LogEntry()
        self.entries.append(mark)
        return mark

    def is_saving(self, mark: LogEntry) -> bool:
        """Whether an entry before a place has arrays that are still being written."""
        return any(
            entry.saving is not None and not entry.saving.is_settled()
            for entry in self.entries[: self.entries.index(mark)]
        )

    def snapshot(self, mark: LogEntry, found: Mapping[int, Saved]) -> None:
        """Go on from a snapshot, taken at a mark.

        It has every array that was alive then, unless an earlier snapshot has it.
        """
        self.entries = self.entries[self.entries.index(mark) + 1 :]
        self._copies = {key: pair for key, pair in self._copies.items() if _is_alive(pair[0]())}
        needed = {n for entry in self.entries for n in entry.inputs} | set(self.live())
        both = {**self.saved, **found}
        self.saved = {number: saved for number, saved in both.items() if number in needed}

    def _prune(self, live: set[int]) -> None:
        """Take out what nobody needs: neither who holds an array nor an entry that stays."""
        needed, kept = set(live), []
        for entry in reversed(self.entries):
            is_save = entry.saving is not None and not entry.saving.is_done
            if is_save or not needed.isdisjoint(entry.results):
                kept.append(entry)
                needed.update(entry.inputs)
        self.entries = kept[::-1]
        self.saved = {number: saved for number, saved in self.saved.items() if number in needed}

    def replay(self, runner: Runner) -> StageError | None:
        """Make all that is needed once more, on new actors, and hand it to those who hold it.

        Returns:
          What a step of the user's raised, if one did: it and what needs it are out of the log.

        Raises:
          LostActorError: an actor was lost.
        """
        live = self.live()
        self._prune(set(live))
        last = {n: index for index, entry in enumerate(self.entries) for n in entry.inputs}
        arrays = {n: runner.arrays.place(*saved) for n, saved in self.saved.items()}
        failure: StageError | None = None
        failed: set[int] = set()
        for index, entry in enumerate(self.entries):
            if not failed.isdisjoint(entry.inputs):
                failed.update(entry.results)
                continue
            try:
                leaves = [arrays[x.number] if isinstance(x, Made) else x for x in entry.leaves]
                made = entry.again(leaves, runner)
            except LostActorError:
                raise
            except StageError as error:
                failure = failure or error
                failed.update(entry.results)
                continue
            arrays.update(zip(entry.results, made, strict=True))
            if entry.serial is not None:
                entry.serial = runner.steps.serial
            for number in (*entry.inputs, *entry.results):
                if number not in live and last.get(number, index) <= index:
                    arrays.pop(number, None)
            del leaves, made
        try:
            runner.steps.finish()
        except LostActorError:
            raise
        except StageError as error:
            failure = failure or error
        for number, array in live.items():
            if number in arrays:
                array.rebind(arrays[number])
        if failure is not None:
            self.drop(
                lambda entry: not failed.isdisjoint(entry.results) or entry.is_called_off(runner),
                failure,
            )
        return failure


def _is_alive(array: jax.Array | None) -> bool:
    return array is not None and not array.is_deleted()


def step_again(leaves: list[Any], runner: Runner, donated: Sequence[int]) -> list[RayArray]:
    """An `Again` of a step that takes over the leaves at some positions."""
    taken = set(donated)
    own = apart(
        {position: leaves[position] for position in donated},
        [leaf for position, leaf in enumerate(leaves) if position not in taken],
        lambda leaf, place: runner.arrays.place(leaf, place, leaf.weak_type),
    )
    return runner.step([own.get(position, leaf) for position, leaf in enumerate(leaves)], donated)


def apart(
    donated: Mapping[int, Any],
    kept: Sequence[Any],
    place: Callable[[RayArray, LeafPlace], RayArray],
) -> dict[int, Any]:
    """The donated leaves, with a copy of each whose memory another leaf has too.

    Where two leaves of a result are one array depends on the plan.
    """
    seen = {id(x) for leaf in kept if isinstance(leaf, RayArray) for x in leaf.residents}
    found = dict(donated)
    for number, leaf in donated.items():
        if isinstance(leaf, RayArray):
            residents = {id(x) for x in leaf.residents}
            if not seen.isdisjoint(residents):
                found[number] = place(leaf, LeafPlace("argument", number))
            seen |= residents
    return found
