"""A pipeline on its actors: leaves in, leaves out. What is done here is written down elsewhere."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

from autopar.arrays.ray_array import Keeper, RayArray, Resident
from autopar.runtime.ray.actor.actor_arrays import KEYS
from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.actor.messages import Message, packed
from autopar.runtime.ray.driver.actor_pool import ActorPool
from autopar.runtime.ray.driver.ray_pipeline import RayPipeline
from autopar.runtime.ray.driver.resident_arrays import ResidentArrays
from autopar.runtime.ray.driver.step_queue import StepQueue

_IS_DELETED, _KEY, _OWNER = map(operator.attrgetter, ("is_deleted", "key", "owner"))


def _undo(
    arrays: ResidentArrays, forgotten: Sequence[Sequence[int]], consumed: Sequence[Resident]
) -> None:
    """The actors could not be told of a step, at least not all."""
    arrays.forget_later(forgotten)
    for resident in consumed:
        arrays.forget(resident)


class Running:
    """What runs a step; it does not keep the keeper of the results alive.

    Attributes:
      steps: what its processes were told.
      arrays: what they have.
    """

    def __init__(self, pipeline: RayPipeline, pool: ActorPool, keeper: Keeper) -> None:
        self.pipeline, self.pool = pipeline, pool
        self.steps = StepQueue(pool)
        self.arrays = ResidentArrays(pipeline, pool, self.steps, keeper)
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
        record: Callable[[ActorPlan], Any] | None = None,
    ) -> list[RayArray]:
        """One step with leaves of any kind of array; returns while the actors are told.

        It takes over the leaves at donated positions, if they live on these actors. `record` says
        what each actor shall note of its instructions' times (`Message.record`).

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
        return self.tell(dict(enumerate(leaves)), consumed, record=record)

    def carried(self, arrays: Sequence[Any]) -> tuple[int, list[Resident]] | None:
        """What arrays are, for every leaf of `RayPipeline.carried`, if one step returned them.

        All that it returned for the next one to take over: its number, and the arrays. None: they
        are something else, or one of them is gone.
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
        return serial, residents

    def tell(
        self,
        leaves: Mapping[int, Any],
        consumed: Sequence[Resident],
        carried: int | None = None,
        record: Callable[[ActorPlan], Any] | None = None,
    ) -> list[RayArray]:
        """Tell all actors to run a step that takes over what is consumed; leaves are by number.

        Where all that can be carried of an earlier step is consumed, `carried` is that step's
        number, and its arrays are none of the leaves: the usual step, and quick.

        Raises:
          StageError: an earlier step failed.
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
            results = self._results(serial)
            arrays.consume(consumed)
            steps.tell(messages, functools.partial(_undo, arrays, forgotten, consumed))
            return results

    def _results(self, serial: int) -> list[RayArray]:
        """What a step gives."""
        keys = map((serial * KEYS).__add__, self._values)
        residents = list(map(Resident, repeat(self.arrays), self._meshes, keys))
        parts: Iterable[tuple[Resident, ...]] = zip(residents)
        if not self._is_plain:
            parts = (tuple(residents[i] for i in places) for places in self._places)
        return list(map(RayArray, parts, self._kinds, repeat(self.arrays.keeper)))
