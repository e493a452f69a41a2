"""Arrays of actors in the driver's memory, put together of what each process holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray

from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.actor.store import KEYS
from autopar.runtime.ray.transport.routes import Box, slices


class Wanted(NamedTuple):
    """An array that is read: its key, its parts, each as (actor, box), its shape and its dtype."""

    key: int
    sources: tuple[tuple[int, Box | None], ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def wanted(plan: ActorPlan, key: int) -> Wanted:
    """How an array is read; `plan` is one of its mesh."""
    value = key % KEYS
    return Wanted(key, plan.sources(value), plan.shape_of(value), plan.dtype_of(value))


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
        return None if None in given.values() else joined(self.arrays, given)
