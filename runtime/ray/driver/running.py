"""A pipeline on its actors: leaves in, leaves out. What is done here is written down elsewhere."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from autopar.arrays.ray_array import Keeper, LeafPlace, RayArray, Resident
from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.actor.messages import Message, packed
from autopar.runtime.ray.actor.store import KEYS
from autopar.runtime.ray.driver.actor_pool import ActorPool
from autopar.runtime.ray.driver.ray_pipeline import RayPipeline
from autopar.runtime.ray.driver.resident_arrays import ResidentArrays
from autopar.runtime.ray.driver.save import Saving
from autopar.runtime.ray.driver.step_queue import StepQueue

_IS_DELETED, _KEY, _OWNER = map(operator.attrgetter, ("is_deleted", "key", "owner"))


class CarriedArrays(NamedTuple):
    """All that a step returned for the next one to take over: its number, and the arrays."""

    serial: int
    residents: list[Resident]


class Running:
    """What runs a step.

    Args:
      pipeline: the plan.
      pool: its processes.

    Attributes:
      steps: what they were told.
      arrays: what they have.
    """

    def __init__(self, pipeline: RayPipeline, pool: ActorPool) -> None:
        self.pipeline, self.pool = pipeline, pool
        self.steps = StepQueue(pool)
        self.arrays = ResidentArrays(pool, self.steps)
        self._values = list(dict.fromkeys(v for values, _ in pipeline.results for v in values))
        self._meshes = list(map(pipeline.runnable.program.mesh_of, self._values))
        place = {value: place for place, value in enumerate(self._values)}
        self._places = [tuple(place[value] for value in values) for values, _ in pipeline.results]
        self._kinds = [kind for _, kind in pipeline.results]
        self._carried = tuple(
            value for result in pipeline.carried.values() for value in pipeline.results[result][0]
        )
        # Whether every result is one array of its own.
        self._is_plain = self._places == [(place,) for place in range(len(self._values))]

    def step(
        self,
        leaves: Sequence[Any],
        donated: Collection[int],
        keeper: Keeper,
        record: Callable[[ActorPlan], Any] | None = None,
    ) -> list[RayArray]:
        """One step; returns when the actors have been told.

        Args:
          leaves: of the arguments; any kind of array.
          donated: positions of those that the step takes over, if they live on these actors.
          keeper: of the results.
          record: what each actor shall note of its instructions' times (`Message.record`).

        Raises:
          StageError: an earlier step failed.
        """
        consumed = [
            resident
            for position in donated
            if isinstance(leaves[position], RayArray)
            for resident in leaves[position].residents
            if resident.owner is self.arrays
        ]
        return self._step(dict(enumerate(leaves)), consumed, keeper, record=record)

    def carried(self, arrays: Sequence[Any]) -> CarriedArrays | None:
        """What all these arrays are, if one step returned them for the next one to take over.

        Args:
          arrays: for every leaf of `RayPipeline.carried`.

        Returns:
          None: they are something else, or one of them is gone.
        """
        if set(map(type, arrays)) != {RayArray} or self.pool.closed is not None:
            return None
        residents = [resident for array in arrays for resident in array.residents]
        serial = residents[0].key // KEYS
        keys = map((serial * KEYS).__add__, self._carried)
        if (
            list(map(_KEY, residents)) != list(keys)
            or set(map(_OWNER, residents)) != {self.arrays}
            or any(map(_IS_DELETED, residents))
            or self.steps.called_off(serial)
        ):
            return None
        return CarriedArrays(serial, residents)

    def carry(
        self, carried: CarriedArrays, fresh: Mapping[int, Any], keeper: Keeper
    ) -> list[RayArray]:
        """One step that takes over what an earlier one returned for it; the usual step, and quick.

        Args:
          carried: what it takes over.
          fresh: the other leaves, by number.
          keeper: of the results.

        Raises:
          StageError: an earlier step failed.
        """
        return self._step(fresh, carried.residents, keeper, carried.serial)

    def _step(
        self,
        leaves: Mapping[int, Any],
        consumed: Sequence[Resident],
        keeper: Keeper,
        carried: int | None = None,
        record: Callable[[ActorPlan], Any] | None = None,
    ) -> list[RayArray]:
        """Tell all actors to run a step.

        Args:
          leaves: by number; none of those that are carried.
          consumed: what the step takes over.
          keeper: of the results.
          carried: the number of the step of which all that can be carried is consumed.
          record: as of `step`.
        """
        steps, arrays, plans = self.steps, self.arrays, self.pool.plans
        shardings = self.pipeline.in_shardings
        given = {i: arrays.given(leaf, shardings[i]) for i, leaf in leaves.items()}
        with steps.busy():
            steps.make_room()
            serial = steps.serial + 1
            gone: dict[int, list[int]] = {plan.mesh: [] for plan in plans}
            for resident in consumed if carried is None else ():
                gone[resident.mesh].append(resident.key)
            entries = [arrays.entries(plan, given, carried) for plan in plans]
            forgotten = arrays.take_forgotten()
            try:
                messages = [
                    packed(
                        Message(
                            step=serial,
                            given=own,
                            consumed=tuple(gone[plan.mesh]),
                            forgotten=tuple(forgotten[plan.mesh]),
                            carried=carried,
                            record=None if record is None else record(plan),
                        )
                    )
                    for plan, own in zip(plans, entries, strict=True)
                ]
            except BaseException:
                arrays.forget_later(forgotten)
                raise
            results = self._results(serial, keeper)
            arrays.consume(consumed)
            try:
                steps.tell(messages)  # last of all: actors that wake up take cores
            except Exception:
                arrays.forget_later(forgotten)
                for resident in consumed:
                    arrays.forget(resident)
                raise
            return results

    def _results(self, serial: int, keeper: Keeper) -> list[RayArray]:
        """What a step gives."""
        keys = map((serial * KEYS).__add__, self._values)
        residents = list(map(Resident, repeat(self.arrays), self._meshes, keys))
        parts: Iterable[tuple[Resident, ...]] = zip(residents)
        if not self._is_plain:
            parts = (tuple(residents[i] for i in places) for places in self._places)
        return list(map(RayArray, parts, self._kinds, repeat(keeper)))

    def place(self, leaf: Any, place: LeafPlace, weak: bool, keeper: Keeper) -> RayArray:
        """A leaf, copied to a place on the actors.

        Args:
          leaf: any kind of array.
          place: where.
          weak: whether JAX promotes it as it does a Python number.
          keeper: of the result.
        """
        return self.arrays.place(leaf, *self.pipeline.at(place, weak), keeper)

    def make(
        self, function: bytes, places: Sequence[LeafPlace], weak: Sequence[bool], keeper: Keeper
    ) -> list[RayArray]:
        """What a function gives that runs on the actors.

        Args:
          function: a closed jaxpr and its arguments, pickled.
          places: of its results.
          weak: whether JAX promotes them as it does Python numbers.
          keeper: of the results.

        Raises:
          StageError: it fails.
        """
        homes = [self.pipeline.at(*pair) for pair in zip(places, weak, strict=True)]
        return self.arrays.make(function, homes, keeper)

    def save(self, saving: Saving, arrays: Sequence[RayArray]) -> None:
        """Let the actors write arrays; see `Saving.send`."""
        saving.send(self.arrays, arrays, len(self.pool.plans))
