"""Starts the processes of actors and ends them: what they are sent, and how they are set up."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import ray

from autopar.arrays.ray_array import RaySharding
from autopar.passes.pieces.pieces import Runnable
from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.actor.stage_actor import GROUPS, StageActor, World
from autopar.runtime.ray.driver.ray_cluster import Connection
from autopar.runtime.ray.transport import pickling
from autopar.runtime.ray.transport.host_tiles import cut, to_host

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


def has_cache() -> bool:
    """Whether the user has configured a folder for what JAX compiles."""
    config: Any = jax.config
    return bool(config.jax_compilation_cache_dir)


def cache_folder() -> str:
    """A new folder for what the actors of one step compile; those of dead processes are removed."""
    parent = Path(tempfile.gettempdir())
    for folder in parent.glob(f"{_CACHE}-*-*"):
        pid = folder.name.split("-")[2]
        with contextlib.suppress(OSError):
            if pid.isdigit() and folder.stat().st_uid == os.getuid() and not _is_running(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{_CACHE}-{os.getpid()}-")


_CACHE = "autopar-compiled"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def contents(
    runnable: Runnable,
    plans: Sequence[ActorPlan],
    shardings: Sequence[RaySharding],
    num_leaves: int,
    constants: Sequence[Any],
    name: str,
) -> list[bytes]:
    """What every actor is sent once: its part of the plan, and the constants that it reads.

    Raises:
      TraceError: something in the step cannot be pickled.
    """
    own: list[list[tuple[int, tuple[np.ndarray, ...]]]] = [[] for _ in plans]
    for leaf, value in enumerate(constants, num_leaves):
        values = shardings[leaf].pieces(to_host(jax.numpy.asarray(value)))
        for rows, numbers in zip(runnable.leaves[leaf], values, strict=True):
            for number in runnable.pieces.inputs[rows.number]:
                for actor in plans[0].processes[runnable.program.mesh_of(number)]:
                    own[actor].append((number, cut(numbers, plans[actor].held(number))))
    return [pickling.dumps(each, name) for each in zip(plans, own, strict=True)]


def settings() -> dict[str, Any]:
    """This process's `jax.config`, as far as actors take it over."""
    return {key: getattr(jax.config, key) for key in CONFIG if hasattr(jax.config, key)}


def start(
    connection: Connection,
    plans: Sequence[ActorPlan],
    name: str,
    config: Mapping[str, Any],
    cache: str | None,
    devices: str,
) -> list[Any]:
    """Actor handles, of processes that are only about to start; arguments as of `ActorPool`."""
    token, tail = secrets.token_bytes(32), secrets.token_hex(3)
    if cache is not None and connection.is_local:
        config = {**config, **CACHE_ALL, "jax_compilation_cache_dir": cache}
    platform = "cuda" if devices == "gpu" else "cpu"
    environment = {"JAX_PLATFORMS": platform, "XLA_FLAGS": _xla_flags()}
    worlds = [
        World(
            label=f"{plan.label} of {name}",
            actor=plan.actor,
            place=(plan.process, len(plan.siblings)),
            num_devices=len(plan.own),
            platform=platform,
            jax_config=config,
            environment=environment,
            token=token,
            is_local=connection.is_local,
        )
        for plan in plans
    ]
    names = [f"autopar {name} {plan.label} {tail}" for plan in plans]
    return connection.actors(StageActor, worlds, names, GROUPS)


def end(handles: list[Any], connection: Connection) -> None:
    """End actors, and give back their CPUs."""
    if ray.is_initialized():
        for actor in handles:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
    handles.clear()
    connection.close()


def _xla_flags() -> str:
    """The driver's, without the number of virtual devices, which each actor has of its own."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(x for x in flags if "xla_force_host_platform_device_count" not in x)
