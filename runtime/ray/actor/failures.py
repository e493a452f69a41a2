"""What becomes of a step on each actor, and the one error that says what came first."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Literal

from autopar.runtime.ray.actor.store import Missing

Kind = Literal["error", "late", "lost", "group", "aborted"]


@dataclass(frozen=True)
class Spot:
    """Where in a step something happened.

    Args:
      actor: its number.
      stage: the stage of the instruction ("stage 0"), or those of the actor.
      index: of the instruction; None: none of the list.
      instruction: what is done, for people.
      microbatch: its microbatch, if it has one.
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
      spot: where.
      step: the number of the step.
      what: the error's type and message.
      traceback: where it was raised.
      peer: the actor that was waited for.
      tag: of the message that was waited for.
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
