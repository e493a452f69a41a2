"""Calls of actors: waits that do not hang, what became of them, and the error that came first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ray
from ray.exceptions import RayActorError, RayError

from autopar.base.errors import LostActorError, StageError
from autopar.passes.pipeline.instructions import Recv, Run, Send
from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.actor.messages import Failure, Spot

POLL_SECONDS = 1.0
"""A wait for actors looks around that often."""


class Watch:
    """Notices an actor that does not answer, or one that is at one instruction, for too long.

    The deadline is in seconds; an instruction may take longer unless `of_instructions` (compiling).
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


def ended_well(refs: Sequence[Any]) -> bool:
    """Whether nothing went wrong in steps that are over."""
    try:
        return all(outcome is None for outcome in ray.get(list(refs)))
    except RayError:
        return False


def is_exit_of_ray(error: BaseException) -> bool:
    """Whether Ray ends this thread, which waited for it while another one shut it down.

    A `SystemExit` of the user's own, of a signal's handler say, comes from elsewhere.
    """
    trace = error.__traceback__ if isinstance(error, SystemExit) else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.endswith("_raylet.pyx")


def reason_of(error: RayActorError) -> str:
    """Why an actor died, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [x for x in lines if "exit" in x.lower() or "killed" in x.lower()]
    reason = (telling or lines or ["no reason is known"])[0]
    return f"its process ended: {reason.partition(' Some common causes')[0]}"


@dataclass(frozen=True)
class Gone:
    """The actor is dead."""

    reason: str


@dataclass(frozen=True)
class Silent:
    """The actor neither finished nor gave up.

    Args:
      hears: whether it has answered at all; else it is stopped or out of reach. One that waits for
        another process of its mesh inside a compiled program answers.
    """

    hears: bool = True


Outcome: TypeAlias = Failure | Gone | Silent | None
"""What became of a step, or several, on one actor; None: all went well."""


def is_over(outcome: Outcome) -> bool:
    """Whether an actor cannot go on, or cannot reach another."""
    if isinstance(outcome, Failure):
        return outcome.kind in ("lost", "group")
    return outcome is not None


def first_error(
    name: str,
    deadline: float,
    plans: Sequence[ActorPlan],
    outcomes: Sequence[Outcome],
    late: Spot | None,
) -> StageError:
    """The error of a step for what the other outcomes follow from.

    The outcomes are those of each actor after everything was called off; `late` is where the driver
    saw nothing happen for the deadline's seconds, if that is why.
    """
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    for plan, outcome in zip(plans, outcomes, strict=True):
        if isinstance(outcome, Gone):
            return lost_error(name, last_spot(plan, failures), outcome.reason)
    by_kind = {failure.kind: failure for failure in reversed(failures)}
    if "error" in by_kind:
        return stage_error(by_kind["error"], name)
    pairs = [
        (x.hears, plan) for plan, x in zip(plans, outcomes, strict=True) if isinstance(x, Silent)
    ]
    silent = [plan for _, plan in sorted(pairs, key=lambda pair: pair[0])]
    if "group" in by_kind:
        failure = by_kind["group"]
        siblings = plans[failure.spot.actor].siblings
        gone = [plan for plan in silent if plan.actor in siblings]
        others = [plans[actor] for actor in siblings if actor != failure.spot.actor]
        spot = last_spot((gone or others)[0], failures)
        return lost_error(name, spot, f"{failure.spot} computes with it and says: {failure.what}")
    if "late" in by_kind:
        failure = by_kind["late"]
        waited = f"{failure.spot} waited for it longer than {deadline:g} seconds."
        if silent:
            spot = last_spot(silent[0], failures)
            return lost_error(name, spot, f"it does not answer; {waited}")
        return StageError(
            f"{name}: {failure.spot.stage} waited longer than {deadline:g} seconds.",
            where=f"{failure.spot} (call {failure.step})",
            why=f"nothing came from actor {failure.peer}.",
            hint="say a longer deadline (autopar.Ray(deadline=...)) if a stage may take that long.",
            spot=failure.spot,
        )
    if late is not None:
        return lost_error(name, late, f"nothing has happened there for {deadline:g} seconds.")
    if "lost" in by_kind:
        peer = by_kind["lost"].peer
        assert peer is not None
        return lost_error(name, last_spot(plans[peer], failures), "its connections were closed.")
    plan = (silent or plans)[0]
    return lost_error(name, last_spot(plan, failures), "the step was called off.")


def stage_error(failure: Failure, name: str) -> StageError:
    """The error for something that was raised on an actor."""
    spot = failure.spot
    error = StageError(
        f"{name} failed in {spot.stage}: {failure.what}",
        where=f"{spot} (call {failure.step})" if failure.step else str(spot),
        hint="the state that this call and those behind it consumed is gone; the actors go on with "
        "a state that is alive."
        if failure.step
        else None,
        spot=spot,
    )
    if failure.traceback:
        error.add_note(f"On the actor:\n{failure.traceback}")
    return error


def lost_error(name: str, spot: Spot, why: str) -> LostActorError:
    """The error that says which actor is gone."""
    return LostActorError(
        f"{name} lost actor {spot.actor} ({spot.stage}).",
        where=str(spot),
        why=why,
        hint="the arrays on the actors are gone with it: compile the step again, and start from a "
        "saved state. With autopar.Ray(max_restarts=...) lost actors are started again.",
        spot=spot,
    )


def last_spot(plan: ActorPlan, failures: Sequence[Failure]) -> Spot:
    """Where a lost actor was at the latest, from what the others still waited for."""
    waited = {x.tag for x in failures if x.peer == plan.actor and x.tag is not None}
    last = None
    for index, x in enumerate(plan.instructions):
        if isinstance(x, Run):
            last = Spot(plan.actor, f"stage {x.stage}", index, x.label, x.microbatch)
        elif isinstance(x, (Send, Recv)) and x.tag in waited:
            if last is None:
                return Spot(plan.actor, plan.label, index, f"before {x.label}")
            text = f"{last.instruction} or before it (what others waited for comes from there)"
            return Spot(last.actor, last.stage, last.index, text, last.microbatch)
    return Spot(plan.actor, plan.label, None, "at an unknown instruction (nobody waited for it)")
