"""Calls of actors: waiting for them without hanging, and what became of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.actor.failures import Spot
from autopar.runtime.ray.driver.step_errors import Gone, Outcome, Silent

POLL_SECONDS = 1.0
"""A wait for actors looks around that often."""


class Watch:
    """Notices an actor that does not answer, or one that is at one instruction, for too long.

    Args:
      handles: of the actors.
      plans: what they run.
      deadline: seconds.
      of_instructions: whether an instruction may take no longer (compiling may).
    """

    def __init__(
        self,
        handles: Sequence[Any],
        plans: Sequence[ActorPlan],
        deadline: float,
        of_instructions: bool,
    ) -> None:
        self._handles, self._plans = handles, plans
        self._deadline, self._of_instructions = deadline, of_instructions
        self._pause = min(5.0, deadline / 4)
        self._asked: list[Any] = []
        self._since = time.monotonic()

    def late(self) -> Spot | None:
        """Where it is late, if it is; asks the actors now and then."""
        now = time.monotonic()
        if not self._asked:
            if now - self._since > self._pause:
                self._asked = [actor.where.remote() for actor in self._handles]
                self._since = now
            return None
        _, left = ray.wait(self._asked, num_returns=len(self._asked), timeout=0)
        if left:
            if now - self._since <= self._deadline:
                return None
            plan = self._plans[self._asked.index(left[0])]
            return Spot(plan.actor, plan.label, None, "it does not answer")
        asked, self._asked, self._since = self._asked, [], now
        if not self._of_instructions:
            return None
        answers = []
        for ref in asked:
            with contextlib.suppress(RayError):  # the call that somebody waits for says so too
                answers.append(ray.get(ref))
        return overdue(answers, self._deadline)


def overdue(answers: Iterable[tuple[Spot | None, float]], deadline: float) -> Spot | None:
    """Where an actor is too long; arguments: what `StageActor.where` says, and seconds."""
    for spot, seconds in answers:
        # The actor itself gives up at the deadline, and can say more.
        if spot is not None and spot.instruction != "idle" and seconds > 1.5 * deadline:
            return spot
    return None


def outcome_of(ref: Any) -> Outcome:
    """What became of a step on an actor so far."""
    done, _ = ray.wait([ref], timeout=0)
    if not done:
        return Silent()
    try:
        result: Outcome = ray.get(ref)
    except RayActorError as error:
        return Gone(reason_of(error))
    except RayError as error:
        return Gone(f"its call failed: {type(error).__name__}: {error}")
    return result


def reason_of(error: RayActorError) -> str:
    """Why an actor died, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [x for x in lines if "exit" in x.lower() or "killed" in x.lower()]
    reason = (telling or lines or ["no reason is known"])[0]
    return f"its process ended: {reason.partition(' Some common causes')[0]}"
