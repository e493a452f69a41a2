"""What an actor is told of one step, and how it says what went wrong."""

from __future__ import annotations

import operator
import pickle
import traceback
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from autopar.runtime.ray.actor.actor_arrays import KEYS, Missing
from autopar.runtime.ray.actor.actor_plan import ActorPlan
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
        what reads them here (`SourcedTiles`), or None: its home hands it on.
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
    entries = tuple(
        next(given) if slot.carried is None else (first + slot.carried if slot.is_home else None)
        for slot in plan.slots
    )
    consumed = (*message.consumed, *(first + value for value in plan.carried))
    return replace(message, given=entries, consumed=consumed, carried=None)


def packed(message: Message) -> Message | bytes:
    """What Ray should be given: of bytes it makes little ado."""
    arrays = (x for tiles in message.given if isinstance(tiles, tuple) for x in tiles)
    if sum(array.nbytes for array in arrays) >= LARGE:
        return message
    return pickle.dumps(_FIELDS(message), pickle.HIGHEST_PROTOCOL)  # a dataclass takes longer


def unpacked(found: Message | bytes) -> Message:
    """The message again."""
    return Message(*pickle.loads(found)) if isinstance(found, bytes) else found


_FIELDS = operator.attrgetter(*(field.name for field in fields(Message)))


Kind = Literal["error", "late", "lost", "group", "aborted"]


@dataclass(frozen=True)
class Spot:
    """Where in a step something happened.

    The stage is that of the instruction ("stage 0"), or those of the actor; the index is None where
    it is no instruction of the list. The instruction is what is done, for people.
    """

    actor: int
    stage: str
    index: int | None
    instruction: str
    microbatch: int | None = None

    def __str__(self) -> str:
        text = f"actor {self.actor}, {self.stage}, {self.instruction}"
        return text if self.microbatch is None else f"{text}, microbatch {self.microbatch}"


@dataclass(frozen=True)
class Failure:
    """Why a step ended early on one actor, as the actor says it.

    Args:
      kind: "error": something raised; "late": a wait took longer than the deadline; "lost": another
        actor is gone; "group": another process of its mesh is gone or does not answer; "aborted":
        the driver called the step off.
      what: the error's type and message.
      traceback: where it was raised.
      peer, tag: the actor and the message that were waited for.
    """

    kind: Kind
    spot: Spot
    step: int
    what: str = ""
    traceback: str = ""
    peer: int | None = None
    tag: int | None = None


def failure_of(error: BaseException, spot: Spot, step: int = 0) -> Failure:
    """Something that was raised on an actor; must be called where it is handled."""
    if type(error).__name__ == "InternalFloatingPointError":  # not meant for users' eyes
        kind = error.args[-1]
        what = f"FloatingPointError: {kind} in its results, and jax_debug_{kind}s is set."
    elif isinstance(error, Missing):
        what = "an array that it needs is no longer there."
    else:
        what = f"{type(error).__name__}: {error}"
    return Failure("error", spot, step, what, "".join(traceback.format_exception(error)))
