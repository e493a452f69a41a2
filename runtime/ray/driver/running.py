"""A pipeline on its actors: leaves in, leaves out. What is done here is written down elsewhere."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from autopar.arrays.ray_array import Keeper, LeafPlace, RayArray, Resident
from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.actor.store import KEYS
from autopar.runtime.ray.driver.actors import Actors, Outputs

if TYPE_CHECKING:
    from autopar.runtime.ray.driver.ray_pipeline import RayPipeline


_IS_DELETED, _KEY, _OWNER = map(operator.attrgetter, ("is_deleted", "key", "owner"))


class CarriedArrays(NamedTuple):
    """All that a step returned for the next one to take over: its number, and the arrays."""

    serial: int
    residents: list[Resident]


class Running:
    """What runs a step.

    Args:
      pipeline: the plan.
      actors: its processes.
    """

    def __init__(self, pipeline: RayPipeline, actors: Actors) -> None:
        self.pipeline, self.actors = pipeline, actors
        mesh_of = pipeline.runnable.program.mesh_of
        numbers = dict.fromkeys(value for values, _ in pipeline.results for value in values)
        self._outputs = Outputs(tuple(numbers), tuple(map(mesh_of, numbers)))
        place = {value: place for place, value in enumerate(numbers)}
        self._places = [tuple(place[value] for value in values) for values, _ in pipeline.results]
        self._kinds = [kind for _, kind in pipeline.results]
        self._carried = tuple(
            value for result in pipeline.carried.values() for value in pipeline.results[result][0]
        )
        # Whether every result is one array of its own.
        self._is_plain = self._places == [(place,) for place in range(len(numbers))]

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
        actors, shardings = self.actors, self.pipeline.in_shardings
        given = {i: actors.given(leaf, shardings[i]) for i, leaf in enumerate(leaves)}
        consumed = [
            resident
            for position in donated
            if isinstance(leaves[position], RayArray)
            for resident in leaves[position].residents
            if resident.owner is actors
        ]
        return actors.step(given, consumed, self._outputs, self._arranged(keeper), record)

    def carried(self, arrays: Sequence[Any]) -> CarriedArrays | None:
        """What all these arrays are, if one step returned them for the next one to take over.

        Args:
          arrays: for every leaf of `RayPipeline.carried`.

        Returns:
          None: they are something else, or one of them is gone.
        """
        actors = self.actors
        if set(map(type, arrays)) != {RayArray} or actors.is_closed:
            return None
        residents = [resident for array in arrays for resident in array.residents]
        serial = residents[0].key // KEYS
        keys = map((serial * KEYS).__add__, self._carried)
        if (
            list(map(_KEY, residents)) != list(keys)
            or set(map(_OWNER, residents)) != {actors}
            or any(map(_IS_DELETED, residents))
            or actors.called_off(serial)
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
        actors, shardings = self.actors, self.pipeline.in_shardings
        given = {i: actors.given(leaf, shardings[i]) for i, leaf in fresh.items()}
        arranged = self._arranged(keeper)
        return actors.step(
            given, carried.residents, self._outputs, arranged, carried=carried.serial
        )

    def _arranged(self, keeper: Keeper) -> Callable[[list[Resident]], list[RayArray]]:
        def arrange(residents: list[Resident]) -> list[RayArray]:
            parts: Iterable[tuple[Resident, ...]] = zip(residents)
            if not self._is_plain:
                parts = (tuple(residents[i] for i in places) for places in self._places)
            return list(map(RayArray, parts, self._kinds, repeat(keeper)))

        return arrange

    def place(self, leaf: Any, place: LeafPlace, weak: bool, keeper: Keeper) -> RayArray:
        """A leaf, copied to a place on the actors.

        Args:
          leaf: any kind of array.
          place: where.
          weak: whether JAX promotes it as it does a Python number.
          keeper: of the result.
        """
        values, kind = self.pipeline.at(place, weak)
        residents = self.actors.place(leaf, kind.sharding, values)
        return RayArray(tuple(residents), kind, keeper)

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
        made = self.actors.make(function, [(kind.sharding, values) for values, kind in homes])
        return [
            RayArray(tuple(residents), kind, keeper)
            for residents, (_, kind) in zip(made, homes, strict=True)
        ]
