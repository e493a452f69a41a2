"""A compiled step on actors, called with leaves; what makes arrays is written into the log."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax

from autopar.arrays.ray_array import LeafPlace, RayArray
from autopar.arrays.sourced_leaf import SourcedLeaf
from autopar.arrays.split_array import SplitArray
from autopar.base.errors import CheckpointError, LostActorError
from autopar.runtime.checkpoint_files import LostItem
from autopar.runtime.compiled_pieces import PIECE_MARK
from autopar.runtime.ray.driver.followed_stages import GivenArray, StageFunction
from autopar.runtime.ray.driver.profiling import Measured, profiled
from autopar.runtime.ray.driver.ray_pipeline import RayPipeline
from autopar.runtime.ray.driver.restarts import RestartedActors
from autopar.runtime.ray.driver.running import Running
from autopar.runtime.ray.driver.save import Saving
from autopar.runtime.ray.recovery.lineage import Again, step_again
from autopar.runtime.ray.transport import pickling
from autopar.runtime.stage_programs import check_type


class RayStep(RestartedActors):
    """A compiled step on actors: (donated leaves, kept leaves, constants) -> all output leaves.

    Its methods can be called by any thread, one at a time works. The leaves are known by numbers;
    `shapes` are those of all leaves, and the constants are values after them.

    Raises:
      AutoparError: as `RestartedActors`.
    """

    def __init__(
        self,
        pipeline: RayPipeline,
        donated: Sequence[int],
        kept: Sequence[int],
        shapes: Sequence[jax.ShapeDtypeStruct],
        constants: Sequence[Any],
    ) -> None:
        self.order(donated, kept)
        self._savings: list[Saving] = []
        super().__init__(pipeline, shapes, constants)

    def order(self, donated: Sequence[int], kept: Sequence[int]) -> None:
        """Say in which order calls give leaves."""
        self._order, self._num_donated = [*donated, *kept], len(donated)

    def __call__(
        self, donated: Sequence[Any], kept: Sequence[Any], constants: Sequence[Any]
    ) -> list[Any]:
        """One step; returns while the actors are told.

        Raises:
          StageError: an earlier step failed.
          TypeError: a leaf has another shape or dtype than the program was compiled for.
        """
        del constants  # the actors have them
        with self._lock:
            results = self.attempt(lambda: self._step(donated, kept))
            if self._snapshots is not None:
                with contextlib.suppress(LostActorError):  # whoever looks next is told
                    self._snapshots.stepped(self.running)
        return results

    def _step(self, donated: Sequence[Any], kept: Sequence[Any]) -> list[RayArray]:
        taken = tuple(self._order[: self._num_donated])
        carried = None
        if taken == tuple(self.running.pipeline.carried):
            carried = self.running.carried(donated)
        fresh = dict(zip(self._order[self._num_donated :], kept, strict=True))
        leaves = self._ordered(donated, kept)
        for number in range(len(leaves)) if carried is None else fresh:
            self._check(number, leaves[number])
        log = self._lineage
        given = () if log is None else tuple(log.given(leaf, self) for leaf in leaves)
        if carried is None:
            results = self.running.step(leaves, taken)
        else:
            serial, residents = carried
            results = self.running.tell(fresh, residents, serial)
        if log is not None:
            again = functools.partial(step_again, donated=taken)
            log.write(given, again, results, self.running.steps.serial)
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
        return self.attempt(lambda: profiled(self.running, leaves))

    def _ordered(self, donated: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        leaves = dict(zip(self._order, (*donated, *kept), strict=True))
        return [leaves[number] for number in range(len(leaves))]

    def _check(self, number: int, leaf: Any) -> None:
        aval = leaf if isinstance(leaf, (RayArray, SplitArray, SourcedLeaf)) else jax.typeof(leaf)
        check_type(aval, self._shapes[number])

    def place(self, leaf: Any, place: LeafPlace, weak: bool | None = None) -> RayArray:
        """A leaf, copied to a place on the actors.

        It is any kind of array; one that is there already is copied. Of PRNG keys also the numbers
        that they wrap. `weak` says whether JAX promotes it as it does a Python number; None: as the
        leaf.
        """
        is_weak = bool(getattr(leaf, "weak_type", False)) if weak is None else weak
        return self._noted(
            [leaf], lambda leaves, running: [running.arrays.place(leaves[0], place, is_weak)]
        )[0]

    def make(self, closed: Any, arguments: Sequence[Any], indices: Sequence[int]) -> list[RayArray]:
        """Let the actors run a traced function (a closed jaxpr), whose results stay there.

        Its results are leaves of the step's arguments, with these indices.

        Raises:
          StageError: it fails on an actor.
          TraceError: it cannot be sent to another process.
        """
        function = pickling.dumps((closed, arguments), "The init function")
        places = tuple(LeafPlace("argument", index) for index in indices)
        weak = tuple(bool(aval.weak_type) for aval in closed.out_avals)
        return self._noted([], lambda _, running: running.arrays.make(function, places, weak))

    def evaluate(self, function: StageFunction, given: Sequence[GivenArray]) -> list[Any]:
        """See `ResidentArrays.evaluate`."""
        return self.attempt(lambda: self.running.arrays.evaluate(function, given))

    def save(self, arrays: Sequence[RayArray], folder: Any, label: str) -> Saving:
        """Let the actors write arrays of theirs into items of a folder while later steps run.

        Raises:
          StageError: an array is lost.
        """
        for array in arrays:  # before the log takes them up
            array.check()
        saving = Saving(folder, label, len(arrays))

        def send(leaves: list[Any], running: Running) -> list[RayArray]:
            for array in leaves:
                array.check()
            saving.send(running.arrays, leaves, len(running.pool.plans))
            return []

        self._savings = [other for other in self._savings if not other.is_done]
        self._noted(arrays, send, saving)
        self._savings.append(saving)
        return saving

    def _noted(
        self, leaves: Sequence[Any], again: Again, saving: Saving | None = None
    ) -> list[RayArray]:
        """What `again` makes of leaves, which is written into the log."""

        def do() -> list[RayArray]:
            log = self._lineage
            given = () if log is None else tuple(log.given(leaf, self) for leaf in leaves)
            made = again(list(leaves), self.running)
            if log is not None:
                log.write(given, again, made, saving=saving)
            return made

        return self.attempt(do)

    def finish(self) -> None:
        """Wait until all steps are done.

        Raises:
          StageError: one failed.
        """
        self.attempt(lambda: self.running.steps.finish())

    def ping(self) -> None:
        """Notice a lost actor, or one that is at one instruction for too long.

        Raises:
          StageError: a step failed.
          LostActorError: an actor is lost for good.
        """
        self.attempt(lambda: self.running.steps.ping())

    def describe(self, what: str) -> list[Any]:
        """See `StageActor.describe`, of each actor."""
        doing = f"describing {what}"
        return self.attempt(
            lambda: self.running.steps.ask(
                "describe", [(what,)] * len(self.running.pool.plans), doing
            )
        )

    def close(self) -> None:
        """End all actors, when they have written what they were told to write."""
        if self.running.pool.closed is None:
            for saving in self._savings:
                with contextlib.suppress(LostItem, CheckpointError):  # who asked for it is told
                    saving.wait(self._options.deadline)
        self._savings.clear()
        super().close()

    def as_text(self) -> str:
        """The compiled pieces, as XLA's text (HLO), one after the other."""
        texts = self._by_piece("text")
        return "\n".join(f"{PIECE_MARK}{name}\n{text}" for name, text in texts.items())

    def memory_analysis(self) -> dict[str, Any]:
        """XLA's account of one device's memory, for every piece, as a dictionary."""
        return self._by_piece("memory")

    def cost_analysis(self) -> dict[str, Any]:
        """XLA's count of operations, for every piece."""
        return self._by_piece("cost")

    def _by_piece(self, what: str) -> dict[str, Any]:
        return {k: v for found in self.describe(what) for k, v in found.items()}


class RayProgram(RayPipeline):
    """A plan for Ray actors that can be started."""

    def compile(
        self,
        name: str,
        donated: Sequence[int],
        kept: Sequence[int],
        shapes: Sequence[jax.ShapeDtypeStruct],
        constants: Sequence[Any],
    ) -> RayStep:
        """Start the actors, which compile their pieces; arguments as of `LocalProgram.compile`.

        Raises:
          AutoparError: as `RayStep`.
        """
        del name
        return RayStep(self, donated, kept, shapes, constants)
