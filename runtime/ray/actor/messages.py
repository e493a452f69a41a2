"""What an actor is told of one step."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any, Literal

from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.actor.store import KEYS
from autopar.runtime.ray.actor.timing import Turns

LARGE = 1 << 20
"""From so many bytes on, copying them takes longer than what Ray does to avoid that."""


@dataclass(frozen=True, slots=True)
class Message:
    """What an actor is told of one step.

    Args:
      step: its number.
      given: for every slot, but for those that `carried` speaks of: the key of an array in the
        store, the numbers of the leaf (or its rows) that this process's devices hold (`tiles.cut`),
        or None: its home hands it on.
      consumed: keys that the store gives up when the step begins.
      forgotten: keys that nobody holds any more.
      carried: the number of the step whose results take the slots that are carried
        (`Slot.carried`) and are consumed; of them nothing more is said. None: of no step.
      record: "together", or whose turn it is when: what is noted of the instructions' times.
    """

    step: int
    given: tuple[Any, ...]
    consumed: tuple[int, ...]
    forgotten: tuple[int, ...]
    carried: int | None = None
    record: Literal["together"] | Turns | None = None


def spelled_out(message: Message, plan: ActorPlan) -> Message:
    """The message with all slots."""
    if message.carried is None:
        return message
    first, given = message.carried * KEYS, iter(message.given)
    entries: list[Any] = []
    for slot in plan.slots:
        if slot.carried is None:
            entries.append(next(given))
        else:
            entries.append(first + slot.carried if slot.is_home else None)
    taken = [first + value for value in plan.carried]
    return replace(
        message, given=tuple(entries), consumed=(*message.consumed, *taken), carried=None
    )


def packed(message: Message) -> Message | bytes:
    """What Ray should be given: of bytes it makes little ado."""
    arrays = (x for tiles in message.given if isinstance(tiles, tuple) for x in tiles)
    if sum(array.nbytes for array in arrays) >= LARGE:
        return message
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def unpacked(found: Message | bytes) -> Message:
    """The message again."""
    if isinstance(found, bytes):
        message: Message = pickle.loads(found)
        return message
    return found
