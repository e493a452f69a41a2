"""A pipeline on its actors: leaves in, leaves out. What is done here is written down elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.ray_array import Keeper, Place, RayArray, Resident
from autopar.runtime.ray.actors import Actors
from autopar.runtime.ray.parts import ProcessPart

if TYPE_CHECKING:
    from autopar.runtime.ray.pipeline import RayPipeline


@dataclass(frozen=True)
class Running:
    """What runs a step.

    Args:
      pipeline: the plan.
      actors: its processes.
    """

    pipeline: RayPipeline
    actors: Actors

    def step(
        self,
        leaves: Sequence[Any],
        donated: Collection[int],
        keeper: Keeper,
        record: Callable[[ProcessPart], Any] | None = None,
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
        actors, pipeline = self.actors, self.pipeline
        given: list[Sequence[Any]] = []
        for leaf, where in zip(leaves, pipeline.in_shardings, strict=False):
            # Nearly all leaves are what the last step returned; a call should not take long.
            if type(leaf) is RayArray and leaf.sharding is where and actors.have(leaf):
                given.append(leaf.residents)
            else:
                given.append(actors.given(leaf, where))
        consumed = [
            resident
            for position in donated
            if isinstance(leaves[position], RayArray)
            for resident in leaves[position].residents
            if resident.owner is actors
        ]

        def arrange(outputs: Mapping[int, Resident]) -> list[RayArray]:
            return [
                RayArray(
                    tuple(map(outputs.__getitem__, values)),
                    shape,
                    dtype,
                    sharding,
                    place,
                    keeper,
                    weak,
                )
                for values, (shape, dtype, weak), sharding, place in zip(
                    pipeline.returned,
                    pipeline.types,
                    pipeline.out_shardings,
                    pipeline.result_places,
                    strict=True,
                )
            ]

        return actors.step(given, consumed, arrange, record)

    def place(self, leaf: Any, place: Place, weak: bool, keeper: Keeper) -> RayArray:
        """A leaf, copied to a place on the actors.

        Args:
          leaf: any kind of array.
          place: where.
          weak: whether JAX promotes it as it does a Python number.
          keeper: of the result.
        """
        sharding, values, shape, dtype = self.pipeline.at(place)
        residents = self.actors.place(leaf, sharding, values)
        return RayArray(residents, shape, dtype, sharding, place, keeper, weak)

    def make(
        self, function: bytes, places: Sequence[Place], weak: Sequence[bool], keeper: Keeper
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
        homes = [self.pipeline.at(place) for place in places]
        made = self.actors.make(function, [(sharding, values) for sharding, values, *_ in homes])
        return [
            RayArray(residents, shape, dtype, sharding, place, keeper, is_weak)
            for residents, place, (sharding, _, shape, dtype), is_weak in zip(
                made, places, homes, weak, strict=True
            )
        ]
