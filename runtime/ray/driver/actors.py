"""All actors of a pipeline: every message to them, what becomes of it, and their arrays.

The driver is at most `AHEAD` steps in front of the actors, so the next batch travels while the last
step runs, and it looks at the outcome of every step before it asks for one that is further on. An
error is raised by whatever looks first: a later call, or reading a result.

After an error in a stage all actors call the step off and can go on: what the failed step and those
behind it would have made is lost, with what they consumed. After the loss of an actor all are
ended.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError

from autopar.arrays.ray_array import RayArray, RaySharding, Resident
from autopar.base.errors import LostActorError, StageError
from autopar.base.ray_options import Ray
from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.actor.failures import (
    Failure,
    Outcome,
    Silent,
    Spot,
    array_error,
    first_error,
    is_over,
    lost_error,
    stage_error,
)
from autopar.runtime.ray.actor.messages import Message, packed
from autopar.runtime.ray.actor.store import FIRST_OTHER, KEYS
from autopar.runtime.ray.driver import launch
from autopar.runtime.ray.driver.fetch import Copies, Wanted, wanted
from autopar.runtime.ray.driver.ray_cluster import Connection
from autopar.runtime.ray.driver.rpc import (
    POLL_SECONDS,
    Watch,
    outcome_of,
    overdue,
    reason_of,
    results_of,
)
from autopar.runtime.ray.transport.host_tiles import cut, host_numbers
from autopar.runtime.ray.transport.routes import Box

T = TypeVar("T")

AHEAD = 2
"""Steps that the driver may be ahead of the actors."""
GRACE_SECONDS = 10.0
"""How long actors may take to call a step off before they are ended."""
_CLOCK_TRIES = 9
"""The quickest of so many questions for the time is taken."""


class Outputs(NamedTuple):
    """Values that a step gives, and the mesh of each."""

    values: tuple[int, ...]
    meshes: tuple[int, ...]


class Actors:
    """The processes of a pipeline. Its methods can be called by any thread, one at a time works.

    Args:
      parts: what the actors run, by actor.
      blobs: what each of them is sent once (`launch.contents`).
      options: the cluster and the deadline.
      name: of the step.
      config: values of `jax.config` for the actors.
      cache: a folder for what the actors compile; None: as JAX is configured.

    Attributes:
      parts: what they run, by actor.
      is_local: whether all are on this machine.
      serial: the number of the last step.
      pids: the actors' process ids.
      compile_seconds: what compiling took each.

    Raises:
      ClusterError: Ray cannot be reached or has too few CPUs, or an actor runs other versions.
      StageError: a piece cannot be compiled.
      LostActorError: an actor died.
    """

    def __init__(
        self,
        parts: Sequence[ActorPlan],
        blobs: Sequence[bytes],
        options: Ray,
        name: str,
        config: Mapping[str, Any],
        cache: str | None = None,
    ) -> None:
        self._name, self._deadline = name, options.deadline
        self.parts = parts
        self._lock = threading.RLock()
        self.serial, self._others = 0, FIRST_OTHER
        self._running: deque[tuple[int, list[Any]]] = deque()
        self._firsts = {part.mesh: part for part in parts if part.process == 0}
        self._held: dict[tuple[int, int], dict[Box, list[int]]] = {}
        self._fetches: dict[tuple[int, int], dict[int, Any]] = {}
        self._forgotten: deque[tuple[int, int]] = deque()
        self._lost: list[tuple[int, int]] = []
        self._error: StageError | None = None
        self._closed: str | None = None
        self._handles: list[Any] = []
        self._connection = Connection(options.address, gpus_of(parts, options), self._deadline)
        self._finalizer = weakref.finalize(self, launch.end, self._handles, self._connection)
        try:
            self._handles += launch.start(
                self._connection, parts, name, config, cache, options.devices
            )
            self.is_local = self._connection.is_local
            self._addresses, self.pids, self.compile_seconds = launch.load(
                self._handles, parts, blobs, name, self._deadline
            )
        except BaseException:
            self.close("they could not be started.")
            raise

    # -- steps -----------------------------------------------------------------------------------

    def step(
        self,
        given: Mapping[int, Sequence[Any]],
        consumed: Sequence[Resident],
        outputs: Outputs,
        arrange: Callable[[list[Resident]], T],
        record: Callable[[ActorPlan], Any] | None = None,
        carried: int | None = None,
    ) -> T:
        """Tell all actors to run a step.

        Args:
          given: by leaf, what `given` returns; nothing of leaves that are carried.
          consumed: residents that the step takes over.
          outputs: the values that it gives.
          arrange: makes of their residents what is returned.
          record: what each actor shall note of its instructions' times.
          carried: the number of the step of which all that can be carried is consumed.

        Raises:
          StageError: an earlier step failed.
        """
        with self._busy():
            while len(self._running) >= AHEAD:
                self._wait(self._running[0][1])
            serial = self.serial + 1
            gone: list[list[int]] = [[] for _ in self._firsts]
            for resident in consumed if carried is None else ():
                gone[resident.mesh].append(resident.key)
            entries = [self._entries(part, given, carried) for part in self.parts]
            forgotten = self._drain()
            try:
                messages = [
                    packed(
                        Message(
                            step=serial,
                            given=own,
                            consumed=tuple(gone[part.mesh]),
                            forgotten=tuple(forgotten[part.mesh]),
                            carried=carried,
                            record=None if record is None else record(part),
                        )
                    )
                    for part, own in zip(self.parts, entries, strict=True)
                ]
            except BaseException:
                self._forget_later(forgotten)
                raise
            keys = map((serial * KEYS).__add__, outputs.values)
            result = arrange(list(map(Resident, repeat(self), outputs.meshes, keys)))
            for resident in consumed:
                if self._fetches:
                    self._fetches.pop((resident.mesh, resident.key), None)
                resident.is_deleted = True
            self.serial = serial
            refs: list[Any] = []
            self._running.append((serial, refs))
            # Last of all: actors that wake up take cores, where there are few.
            try:
                for actor, message in zip(self._handles, messages, strict=True):
                    refs.append(actor.step.remote(message))
            except Exception as error:  # else those that have it would wait for the others
                self._interrupted(error)
                self._forget_later(forgotten)
                self._forgotten.extend((x.mesh, x.key) for x in consumed)
                raise
            return result

    def _entries(
        self, part: ActorPlan, given: Mapping[int, Sequence[Any]], carried: int | None
    ) -> tuple[Any, ...]:
        """What `Message.given` says of its slots."""
        entries: list[Any] = []
        for value, leaf, rows, is_home, _ in part.slots if carried is None else part.fresh_slots:
            found = given[leaf][rows]
            if type(found) is not Resident:
                entries.append(self._cut(part, value, found))
            else:  # away from its home, it arrives by itself
                entries.append(found.key if is_home else None)
        return tuple(entries)

    def _cut(self, part: ActorPlan, value: int, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        """What a process holds of an array that lies where a value does."""
        key = part.actor, value
        if key not in self._held:
            self._held[key] = part.held(value)
        return cut(numbers, self._held[key])

    def finish(self) -> None:
        """Wait until all steps are done.

        Raises:
          StageError: one failed.
        """
        with self._busy():
            while self._running:
                self._wait(self._running[0][1])

    def _wait(self, wanted: Sequence[Any]) -> None:
        """Wait for some calls, and meanwhile see what becomes of the steps.

        Raises:
          StageError: a step failed.
        """
        watch = Watch(self._handles, self.parts, self._deadline, of_instructions=True)
        while True:
            self._look()
            _, left = ray.wait(list(wanted), num_returns=len(wanted), timeout=0)
            if not left:
                self._look()
                return
            pending = [ref for _, refs in self._running for ref in refs]
            if pending:
                _, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
            either = list(dict.fromkeys([*left, *pending]))
            ray.wait(either, num_returns=1, timeout=POLL_SECONDS)
            late = watch.late()
            if late is not None:
                self._look()
                self._fail(late)

    def _look(self) -> None:
        """Take steps that are done off the list.

        Raises:
          StageError: one failed.
        """
        while self._running:
            outcomes = [outcome_of(ref) for ref in self._running[0][1]]
            if any(x is not None and not isinstance(x, Silent) for x in outcomes):
                self._fail(None)
            if any(outcomes):
                return
            self._running.popleft()

    # -- failures --------------------------------------------------------------------------------

    def _fail(self, late: Spot | None) -> None:
        """Call everything off, and raise what came first.

        Raises:
          StageError: always.
        """
        first = self._running[0][0] if self._running else self.serial + 1
        outcomes = self._call_off()
        error = first_error(self._name, self._deadline, self.parts, outcomes, late)
        if late is not None or any(map(is_over, outcomes)):
            if not isinstance(error, LostActorError):  # new actors would fail at this step again
                self._lost.append((first * KEYS, (self.serial + 1) * KEYS))
                error.hint = (
                    "other actors could not call the step off, so all of them were ended: compile "
                    "the step again, and start from a saved state. With autopar.Ray("
                    "max_restarts=...) the actors are started again."
                )
            self._error = error
            self.close(error.what)
        else:
            self._begin_anew(first, error)
        raise error

    def _call_off(self) -> list[Outcome]:
        """Abort all steps; what becomes of them on each actor."""
        steps = [refs for _, refs in self._running]
        aborts = [actor.abort.remote() for actor in self._handles]
        calls = [*aborts, *itertools.chain.from_iterable(steps)]
        # Also for the aborts: one that came after the reset would call the next step off.
        ray.wait(calls, num_returns=len(calls), timeout=min(GRACE_SECONDS, self._deadline))
        found: list[Outcome] = []
        for actor in range(len(self.parts)):
            outcomes = [outcome_of(refs[actor]) for refs in steps if actor < len(refs)]
            outcome = next((x for x in outcomes if x is not None), None)
            if isinstance(outcome, Silent) and not ray.wait([aborts[actor]], timeout=0)[0]:
                outcome = Silent(hears=False)
            found.append(outcome)
        return found

    def _begin_anew(self, first: int, error: StageError) -> None:
        """The actors go on with the next step, without what the failed ones would have made."""
        self._running.clear()
        lost = (first * KEYS, (self.serial + 1) * KEYS)
        self._lost.append(lost)
        self._error = copy.copy(error)  # the traceback of the other keeps alive what callers hold
        for actor in self._handles:
            actor.reset.remote(self.serial + 1, lost)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """One thread at a time; an interruption leaves no actor waiting for another."""
        with self._lock:
            self._check_open()
            try:
                yield
            except (StageError, TypeError, RuntimeError):
                raise  # looked into already, or raised before anything was sent
            except BaseException as error:
                self._interrupted(error)
                raise

    def _interrupted(self, error: BaseException) -> None:
        """Call off what runs, after Ctrl-C or an error that nobody expected."""
        name = type(error).__name__
        if self._closed is not None or not self._running:
            return
        try:
            first = self._running[0][0]
            outcomes = self._call_off()
            if any(map(is_over, outcomes)):
                self.close(f"{name} interrupted a step.")
                return
            told = StageError(
                f"{self._name} was interrupted by {name}.", hint="go on from a state that is alive."
            )
            self._begin_anew(first, told)
        except BaseException:
            self.close(f"{name} interrupted a step.")

    def _check_open(self) -> None:
        if self._closed is None and not ray.is_initialized():  # a call would start another Ray
            self.close("Ray was shut down in this process, and they with it.")
        if self._closed is not None:
            error = self._error
            raise LostActorError(
                f"The actors of {self._name} are gone.",
                where=None if error is None else error.where,
                why=self._closed,
                hint="compile the step again, and start from a saved state.",
                spot=None if error is None else error.spot,
            )

    # -- arrays ----------------------------------------------------------------------------------

    def given(self, leaf: Any, sharding: RaySharding) -> Sequence[Any]:
        """For every part of a leaf: its resident if it lives at home, else its numbers.

        Raises:
          StageError: it was lost in a failure.
        """
        if isinstance(leaf, RayArray):
            leaf.check()
            own = True
            for resident in leaf.residents:
                resident.owner.check(resident)
                own = own and resident.owner is self
            if own and leaf.sharding == sharding:
                return leaf.residents
            return sharding.pieces(leaf.numbers())
        return sharding.pieces(host_numbers(leaf))

    def fetch(self, resident: Resident) -> np.ndarray:
        """See `Owner`."""
        with self._busy():
            self.start_fetch(resident)
            refs = self._fetches.pop((resident.mesh, resident.key))
            given = {actor: self._read(actor, ref) for actor, ref in refs.items()}
            return self._wanted(resident).joined(given)

    def start_fetch(self, resident: Resident) -> None:
        """See `Owner`."""
        with self._busy():
            self.check(resident)
            place = (resident.mesh, resident.key)
            if place not in self._fetches:
                self._fetches[place] = {
                    actor: self._handles[actor].fetch.remote(resident.key, boxes)
                    for actor, boxes in self._wanted(resident).by_actor().items()
                }

    def wait_ready(self, resident: Resident) -> None:
        """See `Owner`."""
        with self._busy():
            self.check(resident)
            if resident.is_ready:
                return
            siblings = self._firsts[resident.mesh].siblings
            serial = resident.key // KEYS
            if serial < FIRST_OTHER:  # a step ends when all that it gives is computed
                running = dict(self._running)  # without it: it ended well, else it is lost
                if serial in running:
                    self._wait([running[serial][actor] for actor in siblings])
            else:
                asked = {a: self._handles[a].ready.remote(resident.key) for a in siblings}
                for actor, ref in asked.items():
                    self._read(actor, ref)
            self.check(resident)  # another thread may have ended the actors
            resident.is_ready = True

    def _wanted(self, resident: Resident) -> Wanted:
        return wanted(self._firsts[resident.mesh], resident.key % KEYS)

    def _read(self, actor: int, ref: Any) -> Any:
        self._wait([ref])
        try:
            return ray.get(ref)
        except RayActorError as error:
            part = self.parts[actor]
            spot = Spot(part.actor, part.label, None, "between steps")
            self._error = lost_error(self._name, spot, reason_of(error))
            self.close(self._error.what)
            raise self._error from None
        except RayTaskError as error:
            raise StageError(
                f"An array of {self._name} cannot be read: {error.cause}",
                where=f"actor {actor}, {self.parts[actor].label}",
            ) from None

    def forget(self, resident: Resident) -> None:
        """See `Owner`."""
        self._forgotten.append((resident.mesh, resident.key))

    def _drain(self) -> list[list[int]]:
        forgotten: list[list[int]] = [[] for _ in self._firsts]
        while self._forgotten:
            mesh, key = self._forgotten.popleft()
            self._fetches.pop((mesh, key), None)
            forgotten[mesh].append(key)
        return forgotten

    def _forget_later(self, forgotten: Sequence[Sequence[int]]) -> None:
        """Undo `_drain`."""
        for mesh, keys in enumerate(forgotten):
            self._forgotten.extend((mesh, key) for key in keys)

    def is_lost(self, resident: Resident) -> bool:
        """See `Owner`."""
        if self._closed is not None:
            return True
        return any(a <= resident.key < b for a, b in self._lost)

    def check(self, resident: Resident) -> None:
        """See `Owner`."""
        if self._closed is None and not self._lost:
            return
        self._check_open()
        if self.is_lost(resident):
            raise self.lost_array()

    def lost_array(self) -> StageError:
        """The error for an array of a step that was given up."""
        return array_error(self._name, self._error)

    def called_off(self, serial: int) -> bool:
        """Whether a step was given up, so that its results will not come."""
        return any(first <= serial * KEYS < last for first, last in self._lost)

    def copies(self, residents: Sequence[Resident]) -> Copies:
        """Ask for the numbers of arrays as they are behind the steps so far."""
        with self._busy():
            arrays = tuple(map(self._wanted, residents))
            items: dict[int, list[tuple[int, Box | None]]] = {}
            for resident, array in zip(residents, arrays, strict=True):
                for actor, box in array.sources:
                    items.setdefault(actor, []).append((resident.key, box))
            return Copies(
                arrays,
                {actor: self._handles[actor].copies.remote(own) for actor, own in items.items()},
            )

    def sources(self, resident: Resident) -> tuple[tuple[int, Box | None], ...]:
        """See `ActorPlan.sources`."""
        return self._wanted(resident).sources

    def save(
        self, folders: Sequence[str], items: Sequence[Sequence[tuple[str, int, Box | None]]]
    ) -> list[Any]:
        """Let actors write arrays as they are behind the steps so far.

        Args:
          folders: of each actor.
          items: of each actor, (name, key, box) of what it writes.

        Returns:
          What says when those that write anything have done so.
        """
        with self._busy():
            refs = []
            for actor, folder, own in zip(self._handles, folders, items, strict=True):
                if own:
                    actor.save.remote(folder, own)
                    refs.append(actor.saved.remote(folder))
            return refs

    def place(self, leaf: Any, sharding: RaySharding, values: Sequence[int]) -> list[Resident]:
        """Put an array on the actors; where it lives there already, a copy of it."""
        with self._busy():
            self._others += 1
            found = []
            given = self.given(leaf, sharding)
            for part, value, rows in zip(sharding.parts, values, given, strict=True):
                key = self._others * KEYS + value
                for number in self._firsts[part.mesh_number].siblings:
                    actor = self._handles[number]
                    if isinstance(rows, Resident):
                        actor.duplicate.remote(rows.key, key)
                    else:
                        tiles = self._cut(self.parts[number], value, rows)
                        actor.keep.remote(key, value, tiles)
                found.append(Resident(self, part.mesh_number, key))
            return found

    def make(
        self,
        function: bytes,
        wanted: Sequence[tuple[RaySharding, Sequence[int]]],
    ) -> list[list[Resident]]:
        """Let the actors run a traced function; the residents of each of its results.

        Args:
          function: a closed jaxpr and its arguments, pickled.
          wanted: where each result shall be, and the values that take its parts.

        Raises:
          StageError: it fails on an actor.
        """
        with self._busy():
            self._others += 1
            items: list[list[tuple[int, int, int, Any]]] = [[] for _ in self._firsts]
            found = []
            for number, (sharding, values) in enumerate(wanted):
                residents = []
                for part, value, rows in zip(
                    sharding.parts, values, sharding.indices(), strict=True
                ):
                    key = self._others * KEYS + value
                    items[part.mesh_number].append((key, value, number, rows))
                    residents.append(Resident(self, part.mesh_number, key))
                found.append(residents)
            arguments = [(function, items[part.mesh]) for part in self.parts]
            self._call("make", arguments, "initialize")
            for resident in itertools.chain.from_iterable(found):
                resident.is_ready = True
            return found

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], doing: str) -> list[Any]:
        """One call of every actor, which is no step."""
        refs = [
            getattr(actor, method).remote(*given)
            for actor, given in zip(self._handles, arguments, strict=True)
        ]
        self._wait(refs[:0])  # a step may have failed
        try:
            results = results_of(refs, self._handles, self.parts, self._name, doing, self._deadline)
        except LostActorError as error:
            self._error = error
            self.close(error.what)
            raise
        for found in results:
            if isinstance(found, Failure):
                raise stage_error(found, self._name)
        return results

    # -- the actors ------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether they are gone."""
        return self._closed is not None

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.parts)

    def reach(self, others: Sequence[Collection[int]]) -> None:
        """Let each actor connect to some others.

        Raises:
          StageError: one does not answer another.
        """
        with self._busy():
            arguments = [
                ({other: self._addresses[other] for other in own}, self._deadline) for own in others
            ]
            self._call("reach", arguments, "connecting")

    def times(self) -> list[Any]:
        """What each actor noted of the last step."""
        with self._busy():
            return self._call("times", [()] * len(self._handles), "reading times")

    def clocks(self) -> list[float]:
        """How far each actor's clock is ahead of this process's, in seconds; 0 on one machine."""
        if self.is_local:
            return [0.0] * self.count
        with self._busy():
            found = []
            for number in range(self.count):
                tries = []
                for _ in range(_CLOCK_TRIES):
                    before = time.perf_counter()
                    there = self._read(number, self._handles[number].clock.remote())
                    after = time.perf_counter()
                    tries.append((after - before, there - (before + after) / 2))
                found.append(min(tries)[1])
            return found

    def describe(self, what: str) -> list[Any]:
        """See `StageActor.describe`, of each actor."""
        with self._busy():
            return self._call("describe", [(what,)] * len(self._handles), f"describing {what}")

    def ping(self) -> None:
        """Notice a lost actor, or one that is at one instruction for too long.

        Raises:
          StageError: one is, or a step failed.
        """
        with self._busy():
            answers = self._call("where", [()] * len(self._handles), "telling where it is")
            late = overdue(answers, self._deadline)
            if late is not None:
                self._look()
                self._fail(late)

    def close(
        self, why: str = "they were shut down: by shutdown(), or at the end of a with block."
    ) -> None:
        """End all actors."""
        if self._closed is None:
            self._closed = why
        self._running.clear()
        self._finalizer()


def gpus_of(parts: Sequence[ActorPlan], options: Ray) -> list[int]:
    """How many GPUs each actor wants."""
    return [len(part.own) if options.devices == "gpu" else 0 for part in parts]
