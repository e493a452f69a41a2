"""The actors of a step, and new ones in their place when some are lost.

With `max_restarts`, what makes arrays is written into a log (`lineage.py`), and now and then the
arrays that are alive are copied to the driver (`snapshots.py`), so that the log stays short. When
an actor is lost, all actors are started anew, get the last snapshot, and do again what is in the
log. The arrays that the caller holds are then those of the new actors.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from autopar.arrays.ray_array import Keeper
from autopar.base.errors import AutoparError, LostActorError
from autopar.runtime.ray.actor.actor_plan import partition_plan
from autopar.runtime.ray.driver.actor_pool import (
    ActorPool,
    cache_folder,
    contents,
    gpus_of,
    has_cache,
    settings,
)
from autopar.runtime.ray.driver.ray_cluster import Connection, NoRoom, await_room, free_actors
from autopar.runtime.ray.driver.ray_pipeline import RayPipeline
from autopar.runtime.ray.driver.running import Running
from autopar.runtime.ray.recovery.lineage import Lineage
from autopar.runtime.ray.recovery.snapshots import Snapshots

T = TypeVar("T")
logger = logging.getLogger("autopar")


@dataclass(frozen=True)
class Recovery:
    """How a step went on after the loss of an actor.

    Args:
      lost: what was lost, and why: the error that would have been raised.
      num_steps: how many steps were run again.
      seconds: from the moment when the loss was noticed until all was as before.
      compile_seconds: what compiling took each new actor; it is part of `seconds`.
    """

    lost: LostActorError
    num_steps: int
    seconds: float
    compile_seconds: tuple[float, ...]


class RestartedActors(Keeper):
    """What runs a plan, on new actors after a loss; a `Keeper` of arrays but for what a step does.

    The shapes are those of all leaves, and the constants are values after them.

    Attributes:
      recoveries: one for each time that actors were started again.
      running: the actors, and what they do.

    Raises:
      AutoparError: as `ActorPool`; the step cannot be sent to another process.
    """

    def __init__(
        self,
        pipeline: RayPipeline,
        shapes: Sequence[jax.ShapeDtypeStruct],
        constants: Sequence[Any],
    ) -> None:
        options = pipeline.options
        self._options, self._name = options, pipeline.name
        self._shapes, self._constants = shapes, constants
        self._prepare(pipeline)
        self._config = settings()  # actors that start later are to be like the first
        self._lock, self._ending = threading.RLock(), threading.RLock()
        self._is_shut = threading.Event()
        self.recoveries: tuple[Recovery, ...] = ()
        self._restarts, self._is_recovering = 0, False
        self._lineage: Lineage | None = None
        self._snapshots: Snapshots | None = None
        self._finalizers: list[weakref.finalize] = []
        self._cache: str | None = None
        if options.max_restarts:
            self._lineage = Lineage()
            self._snapshots = Snapshots(self._lineage, options.snapshot_every)
            # Without a use of its own, Ray would end between the old actors and the new ones.
            gpus = gpus_of(self._plans, options)
            cluster = Connection(options.address, gpus, options.deadline, reserve=False)
            self._finalizers.append(weakref.finalize(self, cluster.close))
        # New actors start quickly with it, and actors with the same pieces compile them once.
        if (options.max_restarts or len(self._plans) > 2) and not has_cache():
            self._cache = cache_folder()
            remove = weakref.finalize(self, shutil.rmtree, self._cache, ignore_errors=True)
            self._finalizers.append(remove)
        try:
            self.running = self._start()
        except BaseException:
            self._release()
            raise

    def _prepare(self, pipeline: RayPipeline) -> None:
        """What the actors of a plan are to be sent."""
        self._pipeline, count = pipeline, len(self._shapes)
        self._plans = partition_plan(
            pipeline.runnable, count, pipeline.num_processes, pipeline.carried
        )
        self._blobs = contents(pipeline, self._plans, count, self._constants)

    def _start(self) -> Running:
        pool = ActorPool(
            self._plans, self._blobs, self._options, self._name, self._config, self._cache
        )
        return Running(self._pipeline, pool, self)

    def attempt(self, do: Callable[[], T]) -> T:
        """What `do` returns; if actors are lost meanwhile, it is done again on new ones.

        It does nothing that lasts before it raises a `LostActorError`.

        Raises:
          LostActorError: they were lost more often than `max_restarts` allows.
        """
        with self._lock:
            if self._is_recovering:
                return do()
            while True:
                running = self.running
                try:
                    return do()
                except LostActorError as error:
                    if running.pool.closed is None:
                        raise  # it is another step that lost an actor
                    if running is self.running:  # else that was done meanwhile
                        self._is_recovering = True
                        try:
                            self._recover(error)
                        finally:
                            self._is_recovering = False

    def _recover(self, error: LostActorError) -> None:
        """Start new actors that have what the old ones had.

        Raises:
          LostActorError: no restart is left.
          StageError: a step that is run again fails.
        """
        log, lost = self._lineage, error
        if log is None or self._is_shut.is_set() or not self.running.pool.is_connected:
            raise error
        assert self._snapshots is not None
        begin = time.perf_counter()
        self.running.pool.close(error.what)
        self._snapshots.forget()
        log.drop_called_off(self.running)
        while True:
            if self._restarts == self._options.max_restarts:
                count = "once" if self._restarts == 1 else f"{self._restarts} times"
                raise LostActorError(
                    lost.what,
                    where=lost.where,
                    why=f"{lost.why or ''}\nThe actors were started again {count} before, and "
                    f"max_restarts={self._options.max_restarts}.",
                    hint="compile the step again, and start from a saved state.",
                    spot=lost.spot,
                ) from None
            self._restarts += 1
            try:
                await_room(gpus_of(self._plans, self._options), self._options.deadline)
                running = self._start()
                try:
                    failure = log.replay(running)
                except BaseException as ended:
                    running.pool.close(f"{type(ended).__name__} ended a recovery.")
                    raise
                break
            except LostActorError as again:
                lost = again
            except NoRoom as refused:
                try:
                    self._plan_again(refused)
                except AutoparError as final:
                    final.add_note(f"This was met after the loss of an actor:\n{lost}")
                    raise
                self._restarts -= 1  # none was started
        with self._ending:
            if self._is_shut.is_set():  # by another thread, which knew the old ones
                running.pool.close()
                raise error
            self.running = running
        num_steps = sum(entry.serial is not None for entry in log.entries)
        seconds = time.perf_counter() - begin
        # They would keep alive whatever the caller's functions hold.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        found = Recovery(error, num_steps, seconds, running.pool.compile_seconds)
        self.recoveries += (found,)
        num_actors = len(self._plans)
        logger.warning(
            "%s (%s): %s started again, and %s run again, in %.1f seconds; restart %d of %d.",
            error.what.rstrip("."),
            (error.why or "").rstrip("."),
            "1 actor was" if num_actors == 1 else f"{num_actors} actors were",
            "1 step was" if num_steps == 1 else f"{num_steps} steps were",
            seconds,
            self._restarts,
            self._options.max_restarts,
        )
        if failure is not None:
            raise failure

    def _plan_again(self, refused: NoRoom) -> None:
        """Plan for the actors that the cluster can have, if that is asked for.

        Raises:
          AutoparError: it is not asked for, or there is no such plan.
        """
        if self._pipeline.replan is None:
            raise refused
        count = len(self._plans)
        found = free_actors(gpus_of(self._plans, self._options), self._options.deadline)
        if not 0 < found < count:
            raise refused
        self._prepare(self._pipeline.replan(found))
        if len(self._plans) > found:
            raise refused
        logger.warning(
            "%s is planned again: it has %d actors, and the Ray cluster has room for %d. "
            "The new plan has %d.",
            self._name,
            count,
            found,
            len(self._plans),
        )

    def close(self) -> None:
        """End all actors, also while another thread calls what has to do with them."""
        with self._ending:  # not `_lock`: who ends a step that hangs is not to wait for it
            self._is_shut.set()
            running = self.running
        running.steps.rest()
        running.pool.close()
        self._release()

    def _release(self) -> None:
        for finalizer in self._finalizers:
            finalizer()
