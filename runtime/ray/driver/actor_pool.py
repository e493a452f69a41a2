"""The processes of a pipeline: what they are sent, how they are started, asked, and ended."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import ray
from ray.exceptions import RayActorError

from autopar.base.errors import ClusterError, StageError
from autopar.base.ray_options import Ray
from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.actor.messages import Failure, Spot
from autopar.runtime.ray.actor.stage_actor import GROUPS, StageActor, World, versions
from autopar.runtime.ray.driver.outcomes import (
    POLL_SECONDS,
    Watch,
    lost_error,
    reason_of,
    stage_error,
)
from autopar.runtime.ray.driver.ray_cluster import Connection
from autopar.runtime.ray.driver.ray_pipeline import RayPipeline
from autopar.runtime.ray.transport import pickling
from autopar.runtime.ray.transport.host_tiles import cut, to_host

START_SECONDS = 120.0
"""How long actors may take to start, at the least: they import JAX."""

CONFIG = (
    "jax_enable_x64",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_default_matmul_precision",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_disable_most_optimizations",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_softmax_custom_jvp",
)
"""What actors take over from the driver's `jax.config`."""


CACHE_ALL = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
"""For a cache folder of a step's own: what was compiled once is never compiled again."""


class ActorPool:
    """The processes of a pipeline.

    The plans say what the actors run, and the blobs are what each of them is sent once
    (`contents`). They compile into a folder (`cache`); None: as JAX is configured by `config`.

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
        self._connection = connection
        self._finalizer = weakref.finalize(self, _end, self.handles, connection)
        try:
            self.is_local = connection.is_local
            if cache is not None and self.is_local:
                config = {**config, **CACHE_ALL, "jax_compilation_cache_dir": cache}
            self.handles += self._started(connection, config, options)
            self._load(blobs)
        except BaseException:
            self.close("they could not be started.")
            raise

    def _started(
        self, connection: Connection, config: Mapping[str, Any], options: Ray
    ) -> list[Any]:
        """Actor handles, of processes that are only about to start."""
        token, tail = secrets.token_bytes(32), secrets.token_hex(3)
        platform = "cuda" if options.devices == "gpu" else "cpu"
        # Each actor has virtual devices of its own.
        flags = os.environ.get("XLA_FLAGS", "").split()
        kept = " ".join(x for x in flags if "xla_force_host_platform_device_count" not in x)
        worlds = [
            World(
                label=f"{plan.label} of {self.name}",
                actor=plan.actor,
                place=(plan.process, len(plan.siblings)),
                num_devices=len(plan.own),
                platform=platform,
                jax_config=config,
                environment={"JAX_PLATFORMS": platform, "XLA_FLAGS": kept},
                token=token,
                transport=options.transport,
                is_local=self.is_local,
            )
            for plan in self.plans
        ]
        names = [f"autopar {self.name} {plan.label} {tail}" for plan in self.plans]
        return connection.actors(StageActor, worlds, names, GROUPS)

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
        """One call of every actor, which is no step; `doing` says in messages what they do.

        An actor may fail to answer for as many seconds as `patience`; None: the deadline.

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

    @property
    def is_connected(self) -> bool:
        """Whether Ray is the one that the actors were started in; a call would start another."""
        return self._connection.is_there

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


def settings() -> dict[str, Any]:
    """This process's `jax.config`, as far as actors take it over."""
    return {key: getattr(jax.config, key) for key in CONFIG if hasattr(jax.config, key)}


def has_cache() -> bool:
    """Whether the user has configured a folder for what JAX compiles."""
    return bool(settings()["jax_compilation_cache_dir"])


def cache_folder() -> str:
    """A new folder for what the actors of one step compile; those of dead processes are removed."""
    parent = Path(tempfile.gettempdir())
    for folder in parent.glob(f"{_CACHE}-*-*"):
        pid = folder.name.split("-")[2]
        with contextlib.suppress(OSError):
            if pid.isdigit() and folder.stat().st_uid == os.getuid():
                try:
                    os.kill(int(pid), 0)
                except ProcessLookupError:
                    shutil.rmtree(folder, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{_CACHE}-{os.getpid()}-")


_CACHE = "autopar-compiled"


def contents(
    pipeline: RayPipeline, plans: Sequence[ActorPlan], num_leaves: int, constants: Sequence[Any]
) -> list[bytes]:
    """What every actor is sent once: its part of the plan, and the constants that it reads.

    Raises:
      TraceError: something in the step cannot be pickled.
    """
    runnable = pipeline.runnable
    own: list[list[tuple[int, tuple[np.ndarray, ...]]]] = [[] for _ in plans]
    for leaf, value in enumerate(constants, num_leaves):
        values = pipeline.in_shardings[leaf].pieces(to_host(jax.numpy.asarray(value)))
        for rows, numbers in zip(runnable.leaves[leaf], values, strict=True):
            for number in runnable.pieces.inputs[rows.number]:
                for actor in plans[0].processes[runnable.program.mesh_of(number)]:
                    own[actor].append((number, cut(numbers, plans[actor].held(number))))
    return [pickling.dumps(each, pipeline.name) for each in zip(plans, own, strict=True)]


def _end(handles: list[Any], connection: Connection) -> None:
    """End actors, and give back their CPUs."""
    if connection.is_there:
        for actor in handles:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
    handles.clear()
    connection.close()
