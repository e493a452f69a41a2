"""A compiled step on actors, called with leaves; it starts lost actors again where that is asked.

With `max_restarts`, what makes arrays is written into a log (`lineage.py`), and now and then the
arrays that are alive are copied to the driver (`snapshots.py`), so that the log stays short. When
an actor is lost, all actors are started anew, get the last snapshot, and do again what is in the
log. The arrays that the caller holds are then those of the new actors.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import ray

from autopar.arrays.ray_array import LeafPlace, RayArray
from autopar.arrays.split_array import SplitArray
from autopar.base.errors import AutoparError, CheckpointError, LostActorError
from autopar.runtime.checkpoint_files import LostItem
from autopar.runtime.ray.actor.partition import partition_plan
from autopar.runtime.ray.driver import launch
from autopar.runtime.ray.driver.actors import Actors, gpus_of
from autopar.runtime.ray.driver.profiling import Measured, profiled
from autopar.runtime.ray.driver.ray_cluster import Connection, NoRoom, await_room, free_actors
from autopar.runtime.ray.driver.running import Running
from autopar.runtime.ray.driver.save import Saving
from autopar.runtime.ray.recovery.lineage import (
    Lineage,
    MakeEntry,
    PlaceEntry,
    SaveEntry,
    StepEntry,
)
from autopar.runtime.ray.recovery.snapshots import Snapshots
from autopar.runtime.ray.transport import pickling

if TYPE_CHECKING:
    from autopar.runtime.ray.driver.ray_pipeline import RayPipeline

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


class RayStep:
    """A compiled step on actors: (donated leaves, kept leaves, constants) -> all output leaves.

    Its methods can be called by any thread, one at a time works.

    Args:
      pipeline: the plan.
      donated: numbers of the leaves that the step may take over.
      kept: numbers of the others.
      shapes: of all leaves.
      constants: values behind them.
      replan: a plan for so many actors, for `on_loss="replan"`.

    Attributes:
      recoveries: one for each time that actors were started again.

    Raises:
      AutoparError: as `Actors`; the step cannot be sent to another process.
    """

    def __init__(
        self,
        pipeline: RayPipeline,
        donated: Sequence[int],
        kept: Sequence[int],
        shapes: Sequence[jax.ShapeDtypeStruct],
        constants: Sequence[Any],
        replan: Callable[[int], RayPipeline] | None = None,
    ) -> None:
        options = pipeline.options
        self._options, self._name = options, pipeline.name
        self._shapes, self._constants = shapes, constants
        self._replan = replan
        self.order(donated, kept)
        self._prepare(pipeline)
        self._config = launch.settings()  # actors that start later are to be like the first
        self._lock = threading.RLock()
        self._is_shut = False
        self._savings: list[Saving] = []
        self.recoveries: tuple[Recovery, ...] = ()
        self._restarts, self._is_recovering = 0, False
        self._lineage: Lineage | None = None
        self._snapshots: Snapshots | None = None
        self._cluster: Connection | None = None
        self._cache: str | None = None
        if options.max_restarts:
            self._lineage = Lineage()
            self._snapshots = Snapshots(self._lineage, options.snapshot_every)
            # Without a use of its own, Ray would end between the old actors and the new ones.
            gpus = gpus_of(self._parts, options)
            self._cluster = Connection(options.address, gpus, options.deadline, reserve=False)
            weakref.finalize(self, self._cluster.close)
            if not launch.has_cache():
                self._cache = launch.cache_folder()
                weakref.finalize(self, shutil.rmtree, self._cache, ignore_errors=True)
        try:
            self._running = self._start()
        except BaseException:
            self._release()
            raise

    def order(self, donated: Sequence[int], kept: Sequence[int]) -> None:
        """Say in which order calls give leaves."""
        self._order, self._num_donated = [*donated, *kept], len(donated)

    def _prepare(self, pipeline: RayPipeline) -> None:
        """What the actors of a plan are to be sent."""
        self._pipeline, count = pipeline, len(self._shapes)
        self._parts = partition_plan(
            pipeline.runnable, count, pipeline.num_processes, pipeline.carried
        )
        self._blobs = launch.contents(
            pipeline.runnable,
            self._parts,
            pipeline.in_shardings,
            count,
            self._constants,
            self._name,
        )

    def _start(self) -> Running:
        actors = Actors(
            self._parts, self._blobs, self._options, self._name, self._config, self._cache
        )
        return Running(self._pipeline, actors)

    @property
    def pipeline(self) -> RayPipeline:
        """The plan that runs now."""
        return self._running.pipeline

    @property
    def actors(self) -> Actors:
        """The processes that run it now."""
        return self._running.actors

    # -- what is done, and written down ----------------------------------------------------------

    def __call__(
        self, donated: Sequence[Any], kept: Sequence[Any], constants: Sequence[Any]
    ) -> list[Any]:
        """One step; returns when the actors have been told.

        Raises:
          StageError: an earlier step failed.
          TypeError: a leaf has another shape or dtype than the program was compiled for.
        """
        del constants  # the actors have them
        with self._lock:
            results = self.attempt(lambda: self._step(donated, kept))
            if self._snapshots is not None:
                with contextlib.suppress(LostActorError):  # whoever looks next is told
                    self._snapshots.stepped(self.actors)
        return results

    def _step(self, donated: Sequence[Any], kept: Sequence[Any]) -> list[RayArray]:
        taken = tuple(self._order[: self._num_donated])
        carried = None
        if taken == tuple(self.pipeline.carried):
            carried = self._running.carried(donated)
        fresh = dict(zip(self._order[self._num_donated :], kept, strict=True))
        leaves = self._ordered(donated, kept)
        for number in range(len(leaves)) if carried is None else fresh:
            self._check(number, leaves[number])
        log = self._lineage
        given = () if log is None else tuple(log.given(leaf, self) for leaf in leaves)
        if carried is None:
            results = self._running.step(leaves, taken, self)
        else:
            results = self._running.carry(carried, fresh, self)
        if log is not None:
            log.write(StepEntry(given, taken, log.name(results), self.actors.serial))
        if carried is None:  # else the actors have taken over all of them
            kept_arrays = {id(leaf) for leaf in kept}
            for leaf in donated:
                is_array = isinstance(leaf, (RayArray, SplitArray, jax.Array))
                if is_array and id(leaf) not in kept_arrays:
                    leaf.delete()
        return results

    def profile(self, donated: Sequence[Any], kept: Sequence[Any]) -> Measured:
        """Times of steps with these leaves, none of which is consumed.

        Raises:
          StageError: a step fails.
        """
        leaves = self._ordered(donated, kept)
        for number, leaf in enumerate(leaves):
            self._check(number, leaf)
        return self.attempt(lambda: profiled(self._running, leaves, self))

    def _ordered(self, donated: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        leaves: list[Any] = [None] * len(self._order)
        for number, leaf in zip(self._order, (*donated, *kept), strict=True):
            leaves[number] = leaf
        return leaves

    def _check(self, number: int, leaf: Any) -> None:
        aval = leaf if isinstance(leaf, (RayArray, SplitArray)) else jax.typeof(leaf)
        wanted = self._shapes[number]
        if aval.shape != wanted.shape or aval.dtype != wanted.dtype:
            raise TypeError(
                f"compiled for {wanted.dtype}{list(wanted.shape)}, called with "
                f"{aval.dtype}{list(aval.shape)}"
            )

    def place(self, leaf: Any, place: LeafPlace, weak: bool | None = None) -> RayArray:
        """A leaf, copied to a place on the actors.

        Args:
          leaf: any kind of array; one that is there already is copied. Of PRNG keys also the
            numbers that they wrap.
          place: where.
          weak: whether JAX promotes it as it does a Python number; None: as the leaf.
        """
        is_weak = bool(getattr(leaf, "weak_type", False)) if weak is None else weak

        def do() -> RayArray:
            log = self._lineage
            if log is None:
                return self._running.place(leaf, place, is_weak, self)
            given = log.given(leaf, self)
            made = self._running.place(leaf, place, is_weak, self)
            log.write(PlaceEntry(given, place, is_weak, log.name([made])))
            return made

        return self.attempt(do)

    def make(self, closed: Any, arguments: Sequence[Any], indices: Sequence[int]) -> list[RayArray]:
        """Let the actors run a traced function, whose results stay there.

        Args:
          closed: the function, a closed jaxpr.
          arguments: its arguments.
          indices: the leaves of the step's arguments that its results are.

        Raises:
          StageError: it fails on an actor.
          TraceError: it cannot be sent to another process.
        """
        function = pickling.dumps((closed, arguments), "The init function")
        places = tuple(LeafPlace("argument", index) for index in indices)
        weak = tuple(bool(aval.weak_type) for aval in closed.out_avals)

        def do() -> list[RayArray]:
            made = self._running.make(function, places, weak, self)
            if self._lineage is not None:
                self._lineage.write(MakeEntry(function, places, weak, self._lineage.name(made)))
            return made

        return self.attempt(do)

    def save(self, arrays: Sequence[RayArray], folder: Path, label: str) -> Saving:
        """Let the actors write arrays of theirs into items of a folder while later steps run.

        Raises:
          StageError: an array is lost.
        """
        saving = Saving(folder, label, len(arrays))

        def do() -> None:
            for array in arrays:
                array.check()
            saving.send(self.actors, arrays)
            if self._lineage is not None:
                numbers = tuple(x.number for x in arrays if x.number is not None)
                self._lineage.write(SaveEntry(numbers, saving))

        self._savings = [other for other in self._savings if not other.is_done]
        self.attempt(do)
        self._savings.append(saving)
        return saving

    # -- recovery --------------------------------------------------------------------------------

    def attempt(self, do: Callable[[], T]) -> T:
        """What `do` returns; if actors are lost meanwhile, it is done again on new ones.

        Args:
          do: does nothing that lasts before it raises a `LostActorError`.

        Raises:
          LostActorError: they were lost more often than `max_restarts` allows.
        """
        with self._lock:
            if self._is_recovering:
                return do()
            while True:
                actors = self.actors
                try:
                    return do()
                except LostActorError as error:
                    if not actors.is_closed:
                        raise  # it is another step that lost an actor
                    if actors is self.actors:  # else that was done meanwhile
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
        if log is None or self._is_shut or not ray.is_initialized():
            raise error
        assert self._snapshots is not None
        begin = time.perf_counter()
        old = self.actors
        old.close(error.what)
        self._snapshots.forget()
        log.drop(
            lambda entry: isinstance(entry, StepEntry) and old.called_off(entry.serial),
            old.lost_array(),
        )
        is_other_plan = False
        while True:
            if not is_other_plan:
                if self._restarts == self._options.max_restarts:
                    raise self._no_more(lost) from None
                self._restarts += 1
            is_other_plan = False
            try:
                await_room(gpus_of(self._parts, self._options), self._options.deadline)
                running = self._start()
                with _closed_on_error(running.actors):
                    failure = log.replay(running, self)
                break
            except LostActorError as again:
                lost = again
            except NoRoom as refused:
                try:
                    self._plan_again(refused)
                except AutoparError as final:
                    final.add_note(f"This was met after the loss of an actor:\n{lost}")
                    raise
                is_other_plan = True
        self._running = running
        num_steps = sum(isinstance(entry, StepEntry) for entry in log.entries)
        seconds = time.perf_counter() - begin
        # They would keep alive whatever the caller's functions hold.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        found = Recovery(error, num_steps, seconds, running.actors.compile_seconds)
        self.recoveries += (found,)
        count = len(self._parts)
        logger.warning(
            "%s (%s): %s started again, and %s run again, in %.1f seconds; restart %d of %d.",
            error.what.rstrip("."),
            (error.why or "").rstrip("."),
            "1 actor was" if count == 1 else f"{count} actors were",
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
        if self._replan is None:
            raise refused
        count = len(self._parts)
        found = free_actors(gpus_of(self._parts, self._options), self._options.deadline)
        if not 0 < found < count:
            raise refused
        self._prepare(self._replan(found))
        if len(self._parts) > found:
            raise refused
        logger.warning(
            "%s is planned again: it has %d actors, and the Ray cluster has room for %d. "
            "The new plan has %d.",
            self._name,
            count,
            found,
            len(self._parts),
        )

    def _no_more(self, error: LostActorError) -> LostActorError:
        count = "once" if self._restarts == 1 else f"{self._restarts} times"
        why = error.why or ""
        return LostActorError(
            error.what,
            where=error.where,
            why=f"{why}\nThe actors were started again {count} before, and "
            f"max_restarts={self._options.max_restarts}.",
            hint="compile the step again, and start from a saved state.",
            spot=error.spot,
        )

    # -- the actors ------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until all steps are done.

        Raises:
          StageError: one failed.
        """
        self.attempt(lambda: self.actors.finish())

    def ping(self) -> None:
        """Notice a lost actor, or one that is at one instruction for too long.

        Raises:
          StageError: a step failed.
          LostActorError: an actor is lost for good.
        """
        self.attempt(lambda: self.actors.ping())

    def describe(self, what: str) -> list[Any]:
        """See `StageActor.describe`, of each actor."""
        return self.attempt(lambda: self.actors.describe(what))

    def close(self) -> None:
        """End all actors, when they have written what they were told to write."""
        if not self.actors.is_closed:
            for saving in self._savings:
                with contextlib.suppress(LostItem, CheckpointError):  # who asked for it is told
                    saving.wait(self._options.deadline)
        self._savings.clear()
        self._is_shut = True
        self.actors.close()
        self._release()

    def _release(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
        if self._cache is not None:
            shutil.rmtree(self._cache, ignore_errors=True)

    def as_text(self) -> str:
        """The compiled pieces, as XLA's text (HLO), one behind the other."""
        texts = self._by_piece("text")
        return "\n".join(f"// piece {name}\n{text}" for name, text in texts.items())

    def memory_analysis(self) -> dict[str, Any]:
        """XLA's account of one device's memory, for every piece, as a dictionary."""
        return self._by_piece("memory")

    def cost_analysis(self) -> dict[str, Any]:
        """XLA's count of operations, for every piece."""
        return self._by_piece("cost")

    def _by_piece(self, what: str) -> dict[str, Any]:
        return {k: v for found in self.describe(what) for k, v in found.items()}


@contextlib.contextmanager
def _closed_on_error(actors: Actors) -> Any:
    try:
        yield
    except BaseException as error:
        actors.close(f"{type(error).__name__} ended a recovery.")
        raise
