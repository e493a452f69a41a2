"""Arrays of actors in the driver's memory, put together of what each process holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray

from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.transport.routes import Box, slices


class Wanted(NamedTuple):
    """An array that is read: its parts, each as (actor, box), its shape and its dtype."""

    sources: tuple[tuple[int, Box | None], ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def by_actor(self) -> dict[int, list[Box | None]]:
        """What each actor gives."""
        found: dict[int, list[Box | None]] = {}
        for actor, box in self.sources:
            found.setdefault(actor, []).append(box)
        return found

    def joined(self, given: dict[int, Sequence[np.ndarray]]) -> np.ndarray:
        """The array, in memory of its own, from what each actor gives."""
        left = {actor: iter(arrays) for actor, arrays in given.items()}
        whole = np.empty(self.shape, self.dtype)
        for actor, box in self.sources:
            whole[... if box is None else slices(box)] = next(left[actor])
        return whole


def wanted(part: ActorPlan, value: int) -> Wanted:
    """How an array is read that lies where a value does; `part` is one of its mesh."""
    return Wanted(part.sources(value), part.shape_of(value), part.dtype_of(value))


@dataclass(frozen=True)
class Copies:
    """Copies of arrays that are on their way.

    Args:
      arrays: what they consist of.
      refs: of each actor that sends any, what gives its parts in the order of the arrays.
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
        if None in given.values():
            return None
        left = {actor: iter(arrays) for actor, arrays in given.items()}
        return [
            array.joined(
                {
                    actor: [next(left[actor]) for _ in boxes]
                    for actor, boxes in array.by_actor().items()
                }
            )
            for array in self.arrays
        ]
