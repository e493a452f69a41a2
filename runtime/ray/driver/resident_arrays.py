"""The arrays that actors have, as the driver knows them: by key, and where their numbers are."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray

from autopar.arrays.ray_array import Keeper, LeafPlace, RayArray, RaySharding, Resident
from autopar.arrays.sourced_leaf import SourcedLeaf
from autopar.arrays.typed_keys import is_key
from autopar.base.errors import StageError
from autopar.runtime.on_meshes import Cut
from autopar.runtime.ray.actor.actor_arrays import FIRST_OTHER, KEYS
from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.driver.actor_pool import ActorPool
from autopar.runtime.ray.driver.followed_stages import GivenArray, StageFunction
from autopar.runtime.ray.driver.ray_pipeline import RayPipeline
from autopar.runtime.ray.driver.step_queue import StepQueue
from autopar.runtime.ray.transport.host_tiles import cut, host_numbers
from autopar.runtime.ray.transport.routes import Box, slices
from autopar.runtime.ray.transport.sourced import SourcedTiles


class Wanted(NamedTuple):
    """An array that is read: its key, its parts, each as (actor, box), its shape and its dtype."""

    key: int
    sources: tuple[tuple[int, Box | None], ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def by_actor(arrays: Sequence[Wanted]) -> dict[int, list[tuple[int, Box | None]]]:
    """What each actor gives of some arrays: (key, box)."""
    items: dict[int, list[tuple[int, Box | None]]] = {}
    for array in arrays:
        for actor, box in array.sources:
            items.setdefault(actor, []).append((array.key, box))
    return items


def joined(arrays: Sequence[Wanted], given: Mapping[int, Sequence[np.ndarray]]) -> list[np.ndarray]:
    """The arrays, in memory of their own, from what each actor gives (`by_actor`)."""
    left = {actor: iter(parts) for actor, parts in given.items()}
    found = []
    for array in arrays:
        whole = np.empty(array.shape, array.dtype)
        for actor, box in array.sources:
            whole[... if box is None else slices(box)] = next(left[actor])
        found.append(whole)
    return found


@dataclass(frozen=True)
class Copies:
    """Copies of arrays that are on their way.

    `refs` are, of each actor that sends any, what gives its parts in the order of the arrays.
    """

    arrays: tuple[Wanted, ...]
    refs: dict[int, Any]

    def is_there(self) -> bool:
        """Whether all have arrived, or will not come; does not wait."""
        refs = list(self.refs.values())
        return not refs or not ray.wait(refs, num_returns=len(refs), timeout=0)[1]

    def get(self) -> list[np.ndarray] | None:
        """The arrays; None: a step before failed.

        Raises:
          RayError: an actor is lost.
        """
        given = dict(zip(self.refs, ray.get(list(self.refs.values())), strict=True))
        return None if None in given.values() else joined(self.arrays, given)


class ResidentArrays:
    """The arrays of a pool of actors; it is the `Owner` of their residents.

    Their keeper is not kept alive.
    """

    def __init__(
        self, pipeline: RayPipeline, pool: ActorPool, steps: StepQueue, keeper: Keeper
    ) -> None:
        self._pipeline, self._pool, self._steps = pipeline, pool, steps
        self._keeper = weakref.ref(keeper)
        self._others = FIRST_OTHER
        self._firsts = {plan.mesh: plan for plan in pool.plans if plan.process == 0}
        self._held: dict[tuple[int, int], dict[Box, list[int]]] = {}
        self._fetches: dict[tuple[int, int], dict[int, Any]] = {}
        self._forgotten: deque[tuple[int, int]] = deque()
        self._told: set[tuple[int, int]] = set()

    @property
    def keeper(self) -> Keeper:
        """That of the arrays."""
        keeper = self._keeper()
        assert keeper is not None, "it makes the call"
        return keeper

    # What a step is given, and what it takes

    def given(self, leaf: Any, sharding: RaySharding) -> Sequence[Any]:
        """For every part of a leaf: its resident if it lives at home, else its numbers.

        Raises:
          StageError: it was lost in a failure.
        """
        if isinstance(leaf, RayArray):
            leaf.check()
            for resident in leaf.residents:
                resident.owner.check(resident)
            if leaf.sharding == sharding and all(x.owner is self for x in leaf.residents):
                return leaf.residents
            return sharding.pieces(leaf.numbers())
        if isinstance(leaf, SourcedLeaf) and len(sharding.indices()) == 1:
            return [leaf]
        return sharding.pieces(host_numbers(leaf))

    def entries(
        self, plan: ActorPlan, given: Mapping[int, Sequence[Any]], carried: int | None
    ) -> tuple[Any, ...]:
        """What `Message.given` says of an actor's slots."""
        entries: list[Any] = []
        for value, leaf, rows, is_home, _ in plan.slots if carried is None else plan.fresh_slots:
            part = given[leaf][rows]
            if type(part) is not Resident:
                entries.append(self._cut(plan, value, part))
            else:  # away from its home, it arrives by itself
                entries.append(part.key if is_home else None)
        return tuple(entries)

    def _cut(
        self, plan: ActorPlan, value: int, numbers: np.ndarray | SourcedLeaf
    ) -> tuple[np.ndarray, ...] | SourcedTiles:
        """What a process holds of an array that lies where a value does."""
        key = plan.actor, value
        if key not in self._held:
            self._held[key] = plan.held(value)
        if isinstance(numbers, SourcedLeaf):
            return SourcedTiles.of(numbers, tuple(self._held[key]))
        return cut(numbers, self._held[key])

    def consume(self, residents: Sequence[Resident]) -> None:
        """A step takes these over."""
        for resident in residents:
            if self._fetches:
                self._fetches.pop((resident.mesh, resident.key), None)
            resident.is_deleted = True

    def forget(self, resident: Resident) -> None:
        """See `Owner`."""
        self._forgotten.append((resident.mesh, resident.key))

    def take_forgotten(self) -> list[list[int]]:
        """By mesh, the keys that nobody holds any more, to be told to its actors."""
        forgotten: list[list[int]] = [[] for _ in self._firsts]
        while self._forgotten:
            mesh, key = self._forgotten.popleft()
            self._fetches.pop((mesh, key), None)
            forgotten[mesh].append(key)
        return forgotten

    def forget_later(self, forgotten: Sequence[Sequence[int]]) -> None:
        """Undo `take_forgotten`: the actors could not be told."""
        for mesh, keys in enumerate(forgotten):
            self._forgotten.extend((mesh, key) for key in keys)

    # Reading

    def fetch(self, resident: Resident) -> np.ndarray:
        """See `Owner`."""
        with self._steps.busy():
            self.start_fetch(resident)
            refs = self._fetches.pop((resident.mesh, resident.key))
            given = {actor: self._steps.result(actor, ref) for actor, ref in refs.items()}
            return joined([self._wanted(resident)], given)[0]

    def start_fetch(self, resident: Resident) -> None:
        """See `Owner`."""
        with self._steps.busy():
            self.check(resident)
            place = (resident.mesh, resident.key)
            if place not in self._fetches:
                self._fetches[place] = {
                    actor: self._on(actor, "aside", "fetch", items)
                    for actor, items in by_actor([self._wanted(resident)]).items()
                }

    def wait_ready(self, resident: Resident) -> None:
        """See `Owner`."""
        steps = self._steps
        with steps.busy():
            self.check(resident)
            if resident.is_ready:
                return
            siblings = self._firsts[resident.mesh].siblings
            serial = resident.key // KEYS
            if serial < FIRST_OTHER:  # a step ends when all that it gives is computed
                steps.wait_for_step(serial, siblings)
            else:
                asked = [self._on(actor, "aside", "ready", resident.key) for actor in siblings]
                for actor, ref in zip(siblings, asked, strict=True):
                    steps.result(actor, ref)
            self.check(resident)  # another thread may have ended the actors
            resident.is_ready = True

    def copies(self, residents: Sequence[Resident]) -> Copies:
        """Ask for the numbers of arrays as they are after the steps so far."""
        with self._steps.busy():
            arrays = tuple(map(self._wanted, residents))
            asked = by_actor(arrays).items()
            return Copies(arrays, {actor: self._on(actor, None, "copies", x) for actor, x in asked})

    def sources(self, resident: Resident) -> tuple[tuple[int, Box | None], ...]:
        """See `ActorPlan.sources`."""
        return self._wanted(resident).sources

    def _wanted(self, resident: Resident) -> Wanted:
        plan, value = self._firsts[resident.mesh], resident.key % KEYS
        return Wanted(resident.key, plan.sources(value), *plan.numbers_of(value))

    # What a failure took

    def is_lost(self, resident: Resident) -> bool:
        """See `Owner`."""
        return self._pool.closed is not None or self._steps.is_lost(resident.key)

    def check(self, resident: Resident) -> None:
        """See `Owner`."""
        if self.is_lost(resident):
            self._steps.check_open()
            raise self.lost_array()

    def lost_array(self) -> StageError:
        """The error for an array of a step that was given up."""
        error = self._pool.error
        return StageError(
            f"An array of {self._pool.name} is lost: the step that was to make it failed.",
            where=None if error is None else error.where,
            why=None if error is None else error.what,
            hint="go on from a state that is alive.",
            spot=None if error is None else error.spot,
        )

    # Arrays that no step makes

    def save(
        self, folders: Sequence[str], items: Sequence[Sequence[tuple[str, int, Box | None]]]
    ) -> list[Any]:
        """Let each actor write (name, key, box) into its folder, as it is after the steps so far.

        Returns:
          What says when those that write anything have done so.
        """
        with self._steps.busy():
            refs = []
            for actor, folder, own in zip(self._pool.handles, folders, items, strict=True):
                if own:
                    actor.save.remote(folder, own)
                    refs.append(actor.saved.remote(folder))
            return refs

    def place(self, leaf: Any, place: LeafPlace, weak: bool) -> RayArray:
        """A leaf, any kind of array, copied to a place on the actors.

        `weak` says whether JAX promotes it as it does a Python number.
        """
        values, kind = self._pipeline.at(place, weak)
        with self._steps.busy():
            self._others += 1
            residents = self._new(kind.sharding, values)
            given = self.given(leaf, kind.sharding)
            for resident, value, rows in zip(residents, values, given, strict=True):
                for actor in self._firsts[resident.mesh].siblings:
                    if isinstance(rows, Resident):
                        self._on(actor, None, "duplicate", rows.key, resident.key)
                    else:
                        tiles = self._cut(self._pool.plans[actor], value, rows)
                        self._on(actor, None, "keep", resident.key, value, tiles)
            return RayArray(residents, kind, self.keeper)

    def make(
        self, function: bytes, places: Sequence[LeafPlace], weak: Sequence[bool]
    ) -> list[RayArray]:
        """What a traced function gives that runs on the actors.

        The function is a closed jaxpr and its arguments, pickled; each result has a place, and is
        weak if JAX promotes it as it does a Python number.

        Raises:
          StageError: it fails on an actor.
        """
        homes = [self._pipeline.at(*pair) for pair in zip(places, weak, strict=True)]
        with self._steps.busy():
            items: list[list[tuple[int, int, int, Any]]] = [[] for _ in self._firsts]
            made = []
            self._others += 1
            for number, (values, kind) in enumerate(homes):
                residents, indices = self._new(kind.sharding, values), kind.sharding.indices()
                for resident, value, rows in zip(residents, values, indices, strict=True):
                    items[resident.mesh].append((resident.key, value, number, rows))
                made.append(RayArray(residents, kind, self.keeper))
            arguments = [(function, items[plan.mesh]) for plan in self._pool.plans]
            self._steps.ask("make", arguments, "initialize")
            for array in made:
                for resident in array.residents:
                    resident.is_ready = True
            return made

    def evaluate(self, function: StageFunction, given: Sequence[GivenArray]) -> list[np.ndarray]:
        """What a function gives that runs where a stage is, after the steps so far.

        Its arguments are any kind of array; those on actors of its mesh stay there.

        Raises:
          StageError: it fails, or an argument is lost.
        """
        schedule = self._pipeline.runnable.program.schedule
        mesh = schedule.mesh_of_stage[function.stage]
        entries = [self._argument(x, mesh) for x in given]
        with self._steps.busy():
            refs = {}
            for actor in self._firsts[mesh].siblings:
                is_known = (actor, function.number) in self._told
                data = None if is_known else function.data
                refs[actor] = self._on(
                    actor, None, "evaluate", function.number, data, function.stage, entries
                )
            failed = f"What follows {{}} fails on stage {function.stage}"
            results = self._steps.results(refs, failed)
        if None in results:
            raise self.lost_array()
        self._told.update((actor, function.number) for actor in refs)
        return list(results[0])

    def _argument(self, given: GivenArray, mesh: int) -> int | tuple[np.ndarray, Cut | None]:
        array, part, cut = given
        if not isinstance(array, RayArray):
            return host_numbers(array), cut
        array.check()
        resident = array.residents[part or 0]
        is_one = part is not None or len(array.residents) == 1
        if is_one and not is_key(array.dtype):
            resident.owner.check(resident)
            if resident.owner is self and resident.mesh == mesh:
                return resident.key
        whole = array.numbers()
        return (whole if part is None else array.sharding.pieces(whole)[part]), cut

    def _on(self, actor: int, group: str | None, method: str, *arguments: Any) -> Any:
        """Ask an actor for what a method of its `ActorArrays` gives.

        What may come before the array does is asked "aside", in threads for which no step waits.
        """
        call = self._pool.handles[actor].on_arrays
        call = call if group is None else call.options(concurrency_group=group)
        return call.remote(method, *arguments)

    def _new(self, sharding: RaySharding, values: Sequence[int]) -> tuple[Resident, ...]:
        """Residents for the parts of an array that no step makes."""
        return tuple(
            Resident(self, part.mesh_number, self._others * KEYS + value)
            for part, value in zip(sharding.parts, values, strict=True)
        )
