"""The processes of a pipeline: started, asked, and ended."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from autopar.base.errors import ClusterError, StageError
from autopar.base.ray_options import Ray
from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.actor.failures import Failure, Spot
from autopar.runtime.ray.actor.stage_actor import versions
from autopar.runtime.ray.driver import launch
from autopar.runtime.ray.driver.ray_cluster import Connection
from autopar.runtime.ray.driver.rpc import POLL_SECONDS, Watch, reason_of
from autopar.runtime.ray.driver.step_errors import lost_error, stage_error

START_SECONDS = 120.0
"""How long actors may take to start, at the least: they import JAX."""


class ActorPool:
    """The processes of a pipeline.

    Args:
      plans: what the actors run, by actor.
      blobs: what each of them is sent once (`launch.contents`).
      options: the cluster and the deadline.
      name: of the step.
      config: values of `jax.config` for the actors.
      cache: a folder for what the actors compile; None: as JAX is configured.

    Attributes:
      handles: of the actors.
      is_local: whether all are on this machine.
      addresses: where each listens for the others.
      pids: the actors' process ids.
      compile_seconds: what compiling took each.
      closed: why they were ended; None: they were not.
      error: what the last failure of a step raised.

    Raises:
      ClusterError: Ray cannot be reached or has too few CPUs, or an actor runs other versions.
      StageError: a piece cannot be compiled.
      LostActorError: an actor died.
    """

    def __init__(
        self,
        plans: Sequence[ActorPlan],
        blobs: Sequence[bytes],
        options: Ray,
        name: str,
        config: Mapping[str, Any],
        cache: str | None = None,
    ) -> None:
        self.plans, self.name, self.deadline = plans, name, options.deadline
        self.error: StageError | None = None
        self.closed: str | None = None
        self.handles: list[Any] = []
        connection = Connection(options.address, gpus_of(plans, options), self.deadline)
        self._finalizer = weakref.finalize(self, launch.end, self.handles, connection)
        try:
            self.handles += launch.start(connection, plans, name, config, cache, options.devices)
            self.is_local = connection.is_local
            self._load(blobs)
        except BaseException:
            self.close("they could not be started.")
            raise

    def _load(self, blobs: Sequence[bytes]) -> None:
        """Connect the actors with each other and let them compile."""
        patience = max(self.deadline, START_SECONDS)
        hellos = self.call("start", None, "starting", patience)
        for plan, hello in zip(self.plans, hellos, strict=True):
            if hello.versions != versions():
                raise ClusterError(
                    f"The actor of {plan.label} runs other versions than this process.",
                    why=f"it has {_listed(hello.versions)}; here are {_listed(versions())}.",
                    hint="install the same versions on all nodes.",
                )
        self.addresses = {
            x.actor: hello.address for x, hello in zip(self.plans, hellos, strict=True)
        }
        arguments = [
            (blob, self.addresses, hellos[plan.siblings[0]].coordinator, self.deadline)
            for plan, blob in zip(self.plans, blobs, strict=True)
        ]
        self.pids = tuple(hello.pid for hello in hellos)
        self.compile_seconds = tuple(self.call("load", arguments, "compiling", patience))

    def call(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]] | None,
        doing: str,
        patience: float | None = None,
    ) -> list[Any]:
        """One call of every actor, which is no step.

        Args:
          method: of `StageActor`.
          arguments: of each actor; None: there are none.
          doing: what they do, for messages.
          patience: seconds for which an actor may fail to answer; None: the deadline.

        Raises:
          StageError: it fails on an actor.
          LostActorError: an actor died, or does not answer.
        """
        each = [()] * len(self.handles) if arguments is None else arguments
        refs = [
            getattr(actor, method).remote(*given)
            for actor, given in zip(self.handles, each, strict=True)
        ]
        watch = Watch(self.handles, self.plans, patience or self.deadline, of_instructions=False)
        results: dict[Any, Any] = {}
        left = list(refs)
        while left:
            done, left = ray.wait(left, num_returns=1, timeout=POLL_SECONDS)
            for ref in done:
                try:
                    results[ref] = ray.get(ref)
                except RayActorError as error:
                    raise self.lost(refs.index(ref), doing, reason_of(error)) from None
            late = watch.late()
            if left and late is not None:
                why = f"it does not answer while {doing}."
                raise self.lose(lost_error(self.name, late, why))
        for result in results.values():
            if isinstance(result, Failure):
                raise stage_error(result, self.name)
        return [results[ref] for ref in refs]

    def lost(self, actor: int, doing: str, why: str) -> StageError:
        """End all actors, because one was found dead; the error that says so."""
        spot = Spot(actor, self.plans[actor].label, None, doing)
        return self.lose(lost_error(self.name, spot, why))

    def lose(self, error: StageError) -> StageError:
        """End all actors, because of an error, which is returned."""
        self.error = error
        self.close(error.what)
        return error

    def close(
        self, why: str = "they were shut down: by shutdown(), or at the end of a with block."
    ) -> None:
        """End all actors."""
        if self.closed is None:
            self.closed = why
        self._finalizer()


def gpus_of(plans: Sequence[ActorPlan], options: Ray) -> list[int]:
    """How many GPUs each actor wants."""
    return [len(plan.own) if options.devices == "gpu" else 0 for plan in plans]


def _listed(found: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found)
