"""The steps that actors were told of and have not done, and those that were given up.

The driver is at most `AHEAD` steps in front of the actors, so the next batch travels while the last
step runs, and it looks at the outcome of every step before it asks for one that is further on. An
error is raised by whatever looks first: a later call, or reading a result.

After an error in a stage all actors call the step off and can go on: what the failed step and those
after it would have made is lost, with what they consumed. After the loss of an actor all are
ended.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from autopar.base.errors import LostActorError, StageError
from autopar.runtime.ray.actor.actor_arrays import KEYS
from autopar.runtime.ray.actor.messages import Message, Spot
from autopar.runtime.ray.driver.actor_pool import ActorPool
from autopar.runtime.ray.driver.outcomes import (
    Outcome,
    Silent,
    Watch,
    ended_well,
    first_error,
    is_exit_of_ray,
    is_over,
    outcome_of,
    overdue,
    reason_of,
)
from autopar.runtime.ray.driver.telling import Teller, Told, tell

AHEAD = 2
"""Steps that the driver may be ahead of the actors."""
GRACE_SECONDS = 10.0
"""How long actors may take to call a step off before they are ended."""
TELLING_SECONDS = 60.0
"""How long it may take to hand a step to Ray for all actors."""
LOOK_SECONDS = 0.05
"""A wait for some calls looks that often whether a step has failed meanwhile."""


class StepQueue:
    """What a pool of actors was told to do, up to the step with the number `serial`.

    Any thread can call it, one at a time works.
    """

    def __init__(self, pool: ActorPool) -> None:
        self._pool = pool
        self._lock = threading.RLock()
        self.serial = 0
        self._running: deque[Told] = deque()
        self._teller = Teller()
        self._telling: Future[None] | None = None
        self._lost: list[tuple[int, int]] = []
        self._has_given_up = False  # an interruption ended the actors

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """One thread at a time; an interruption leaves no actor waiting for another."""
        with self._lock:
            try:
                self.check_open()
                self._have_told()
                yield
            except StageError:
                raise  # looked into already
            except BaseException as error:
                is_fault = isinstance(error, Exception) or is_exit_of_ray(error)
                gone = self._gone() if is_fault else None
                if gone is not None and not self._has_given_up:
                    raise gone from None  # another thread ended them, or Ray, meanwhile
                if not isinstance(error, (TypeError, RuntimeError)):  # else nothing was sent
                    self._interrupted(error)
                raise
            finally:
                if self._pool.closed is not None:
                    self._running.clear()

    def check_open(self) -> None:
        """See that the actors have not been ended.

        Raises:
          LostActorError: they have.
        """
        gone = self._gone()
        if gone is not None:
            raise gone

    def _gone(self) -> LostActorError | None:
        """The error that says that the actors have been ended; None: they have not."""
        pool = self._pool
        if pool.closed is None and not pool.is_connected:
            pool.close("Ray was shut down in this process, and they with it.")
        if pool.closed is None:
            return None
        error = pool.error
        return LostActorError(
            f"The actors of {pool.name} are gone.",
            where=None if error is None else error.where,
            why=pool.closed,
            hint="compile the step again, and start from a saved state.",
            spot=None if error is None else error.spot,
        )

    # What is asked for

    def make_room(self) -> None:
        """Wait until one more step may be told.

        Raises:
          StageError: a step failed.
        """
        while len(self._running) >= AHEAD:
            self.wait(self._running[0].refs)

    def tell(self, messages: Sequence[Message | bytes], undo: Callable[[], None]) -> None:
        """Tell every actor of the next step; a thread does so, and whoever asks next waits for it.

        Actors that wake up take cores: where they share them with the driver, to tell dozens took
        many times as long as what is done for it here. If it fails, `undo` is called, and the error
        is raised by whatever looks first.
        """
        self.serial += 1
        told = Told(self.serial, [])
        self._running.append(told)
        self._telling = over = Future[None]()
        handles = list(self._pool.handles)
        self._teller.give(over, functools.partial(tell, handles, messages, told, undo))
        if not all(isinstance(message, bytes) for message in messages):
            self._have_told()  # else the caller might write to arrays that are still to be sent

    def rest(self, seconds: float = TELLING_SECONDS) -> bool:
        """Wait until nobody is told of anything any more, however that ends; whether it is so."""
        telling = self._telling
        return telling is None or not wait_for_futures([telling], seconds).not_done

    def _have_told(self) -> None:
        """See that all actors have been told.

        Raises:
          Exception: one could not be.
        """
        if self._telling is not None:
            if not self.rest(TELLING_SECONDS):
                late = (
                    f"Ray did not take step {self.serial} for all actors in {TELLING_SECONDS:g} s."
                )
                self._interrupted(RuntimeError(late))
                raise RuntimeError(late)
            error, self._telling = self._telling.exception(), None
            if error is not None:  # else those that have it would wait for the others
                self._interrupted(error)
                raise error

    def ask(
        self, method: str, arguments: Sequence[tuple[Any, ...]] | None, doing: str
    ) -> list[Any]:
        """See `ActorPool.call`; and raises if a step has failed."""
        with self.busy():
            self._look()
            return self._pool.call(method, arguments, doing)

    def result(self, actor: int, ref: Any, what: str = "An array of {} cannot be read") -> Any:
        """What a call of one actor gives; `what` fails if it fails.

        Raises:
          StageError: a step failed, or the call.
          LostActorError: the actor is gone.
        """
        self.wait([ref])
        try:
            return ray.get(ref)
        except RayActorError as error:
            raise self._pool.lost(actor, "between steps", reason_of(error)) from None
        except RayTaskError as error:
            raise StageError(
                f"{what.format(self._pool.name)}: {error.cause}",
                where=f"actor {actor}, {self._pool.plans[actor].label}",
            ) from None

    def results(self, refs: Mapping[int, Any], what: str) -> list[Any]:
        """What a call of several actors gives; the first that fails ends the others' wait.

        Raises:
          StageError, LostActorError: see `result`.
        """
        found: dict[int, Any] = {}
        while len(found) < len(refs):
            left = {actor: ref for actor, ref in refs.items() if actor not in found}
            self.wait([*left.values()], for_all=False)
            done, _ = ray.wait([*left.values()], num_returns=len(left), timeout=0)
            found |= {
                actor: self.result(actor, ref, what) for actor, ref in left.items() if ref in done
            }
        return [found[actor] for actor in refs]

    def finish(self) -> None:
        """Wait until all steps are done.

        Raises:
          StageError: one failed.
        """
        with self.busy():
            while self._running:
                self.wait(self._running[0].refs)

    def wait_for_step(self, serial: int, actors: Sequence[int]) -> None:
        """Wait until some actors have done a step."""
        for told in self._running:  # without it: it ended well, else it is lost
            if told.serial == serial:
                self.wait([told.refs[actor] for actor in actors])
                return

    def wait(self, wanted: Sequence[Any], *, for_all: bool = True) -> None:
        """Wait for some calls, or any of them, and meanwhile see what becomes of the steps.

        Raises:
          StageError: a step failed.
        """
        pool = self._pool
        watch = Watch(pool.handles, pool.plans, pool.deadline, of_instructions=True)
        left = list(wanted)
        while True:
            self._look()
            # For all at once: to wake up for each actor takes it a part of its core.
            count = len(left) if for_all else 1
            done, left = ray.wait(left, num_returns=count, timeout=LOOK_SECONDS)
            if not left or (done and not for_all):
                self._look()
                return
            late = watch.late()
            if late is not None:
                self._look()
                self._fail(late)

    def ping(self) -> None:
        """Notice a lost actor, or one that is at one instruction for too long.

        Raises:
          StageError: one is, or a step failed.
        """
        with self.busy():
            answers = self.ask("where", None, "telling where it is")
            late = overdue(answers, self._pool.deadline)
            if late is not None:
                self._look()
                self._fail(late)

    # What was given up

    def is_lost(self, key: int) -> bool:
        """Whether an array will not come, by its key."""
        return any(first <= key < last for first, last in self._lost)

    def called_off(self, serial: int) -> bool:
        """Whether a step was given up, so that its results will not come."""
        return self.is_lost(serial * KEYS)

    def _look(self) -> None:
        """Take steps that are done off the list.

        Raises:
          StageError: one failed.
        """
        while self._running:
            told = self._running[0]
            done, told.left = ray.wait(told.left, num_returns=len(told.left), timeout=0)
            if not ended_well(done):
                self._fail(None)
            if told.left:
                return
            self._running.popleft()

    def _fail(self, late: Spot | None) -> None:
        """Call everything off, and raise what came first.

        Raises:
          StageError: always.
        """
        pool = self._pool
        first = self._running[0].serial if self._running else self.serial + 1
        outcomes = self._call_off()
        error = first_error(pool.name, pool.deadline, pool.plans, outcomes, late)
        if late is not None or any(map(is_over, outcomes)):
            if not isinstance(error, LostActorError):  # new actors would fail at this step again
                self._give_up(first)
                error.hint = (
                    "other actors could not call the step off, so all of them were ended: compile "
                    "the step again, and start from a saved state. With autopar.Ray("
                    "max_restarts=...) the actors are started again."
                )
            pool.lose(error)
        else:
            self._begin_anew(first, error)
        raise error

    def _call_off(self) -> list[Outcome]:
        """Abort all steps; what becomes of them on each actor."""
        pool = self._pool
        steps = [told.refs for told in self._running]
        aborts = [actor.abort.remote() for actor in pool.handles]
        calls = [*aborts, *itertools.chain.from_iterable(steps)]
        # Also for the aborts: one that came after the reset would call the next step off.
        ray.wait(calls, num_returns=len(calls), timeout=min(GRACE_SECONDS, pool.deadline))
        found: list[Outcome] = []
        for actor, abort in enumerate(aborts):
            outcomes = [outcome_of(refs[actor]) for refs in steps if actor < len(refs)]
            outcome = next((x for x in outcomes if x is not None), None)
            if isinstance(outcome, Silent) and not ray.wait([abort], timeout=0)[0]:
                outcome = Silent(hears=False)
            found.append(outcome)
        return found

    def _give_up(self, first: int) -> tuple[int, int]:
        """Steps from `first` to the last will not be done: the keys that are lost."""
        lost = (first * KEYS, (self.serial + 1) * KEYS)
        self._lost.append(lost)
        return lost

    def _begin_anew(self, first: int, error: StageError) -> None:
        """The actors go on with the next step, without what the failed ones would have made."""
        self._running.clear()
        lost = self._give_up(first)
        # The traceback of the other keeps alive what callers hold.
        self._pool.error = copy.copy(error)
        for actor in self._pool.handles:
            actor.reset.remote(self.serial + 1, lost)

    def _interrupted(self, error: BaseException) -> None:
        """Call off what runs, after Ctrl-C or an error that nobody expected."""
        pool, name = self._pool, type(error).__name__
        if pool.closed is not None or not pool.is_connected or not self._running:
            return
        with contextlib.suppress(BaseException):
            is_told = self.rest(GRACE_SECONDS)
            self._running[-1].is_off = True
            self._telling = None
            first = self._running[0].serial
            # One that is told later would begin a step that the others have given up.
            if is_told and not any(map(is_over, self._call_off())):
                told = StageError(
                    f"{pool.name} was interrupted by {name}.",
                    hint="go on from a state that is alive.",
                )
                self._begin_anew(first, told)
                return
        self._has_given_up = True
        pool.close(f"{name} interrupted a step.")
