"""A compiled step on actors, called with leaves; what makes arrays is written into the log."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from autopar.arrays.ray_array import Keeper, LeafPlace, RayArray
from autopar.arrays.split_array import SplitArray
from autopar.base.errors import CheckpointError, LostActorError
from autopar.runtime.checkpoint_files import LostItem
from autopar.runtime.ray.driver.profiling import Measured, profiled
from autopar.runtime.ray.driver.ray_pipeline import RayPipeline
from autopar.runtime.ray.driver.restarts import RestartedActors
from autopar.runtime.ray.driver.save import Saving
from autopar.runtime.ray.recovery.lineage import Again, step_again
from autopar.runtime.ray.recovery.runner import Runner
from autopar.runtime.ray.transport import pickling


class RayStep(RestartedActors):
    """A compiled step on actors: (donated leaves, kept leaves, constants) -> all output leaves.

    Its methods can be called by any thread, one at a time works.

    Args:
      pipeline: the plan.
      donated: numbers of the leaves that the step may take over.
      kept: numbers of the others.
      shapes: of all leaves.
      constants: values after them.
      replan: as of `RestartedActors`.

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
        replan: Callable[[int], RayPipeline] | None = None,
    ) -> None:
        self.order(donated, kept)
        self._savings: list[Saving] = []
        super().__init__(pipeline, shapes, constants, replan)

    def order(self, donated: Sequence[int], kept: Sequence[int]) -> None:
        """Say in which order calls give leaves."""
        self._order, self._num_donated = [*donated, *kept], len(donated)

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
            results = self.running.step(leaves, taken, self)
        else:
            results = self.running.carry(carried, fresh, self)
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
        return self.attempt(lambda: profiled(self.running, leaves, self))

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
        return self._noted(
            [leaf],
            lambda leaves, runner, keeper: [runner.place(leaves[0], place, is_weak, keeper)],
        )[0]

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

        return self._noted(
            [], lambda leaves, runner, keeper: runner.make(function, places, weak, keeper)
        )

    def save(self, arrays: Sequence[RayArray], folder: Path, label: str) -> Saving:
        """Let the actors write arrays of theirs into items of a folder while later steps run.

        Raises:
          StageError: an array is lost.
        """
        saving = Saving(folder, label, len(arrays))

        def send(leaves: list[Any], runner: Runner, keeper: Keeper) -> list[RayArray]:
            for array in leaves:
                array.check()
            runner.save(saving, leaves)
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
            made = again(list(leaves), self.running, self)
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

        def ask() -> list[Any]:
            arguments = [(what,)] * len(self.running.pool.plans)
            return self.running.steps.ask("describe", arguments, f"describing {what}")

        return self.attempt(ask)

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
        return "\n".join(f"// piece {name}\n{text}" for name, text in texts.items())

    def memory_analysis(self) -> dict[str, Any]:
        """XLA's account of one device's memory, for every piece, as a dictionary."""
        return self._by_piece("memory")

    def cost_analysis(self) -> dict[str, Any]:
        """XLA's count of operations, for every piece."""
        return self._by_piece("cost")

    def _by_piece(self, what: str) -> dict[str, Any]:
        return {k: v for found in self.describe(what) for k, v in found.items()}


class RayProgram(RayPipeline):
    """A plan for Ray actors that can be started.

    Args:
      *args: as of `RayPipeline`.
      replan: a plan for so many actors, where less hardware is no error.
    """

    def __init__(self, *args: Any, replan: Callable[[int], RayPipeline] | None = None) -> None:
        super().__init__(*args)
        self._replan = replan

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
        return RayStep(self, donated, kept, shapes, constants, self._replan)
