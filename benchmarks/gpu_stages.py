"""Pipelines of two stages that share one device: in this process, and as two Ray actors."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from typing import Any

import jax
from gpu_setting import Setting
from pipeline import language_model

import autopar


def two_stages(setting: Setting) -> dict[str, Any]:
    """Two stages in this process, which share the device."""
    return pipelined(setting, devices=2 * jax.devices()[:1])


def on_ray(setting: Setting, transport: str = "sockets") -> dict[str, Any]:
    """Two stages in two actors, which share the device."""
    # Ray need not be installed.
    from autopar.runtime.ray.driver.ray_cluster import start_local

    platform = jax.default_backend()
    if platform != "cpu":
        # Ray would give an actor a GPU for itself, and hide the others.
        os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    start_local(4, **({} if platform == "cpu" else {"num_gpus": 2}))
    devices = "cpu" if platform == "cpu" else "gpu"
    runtime = autopar.Ray(devices=devices, transport=transport, deadline=120)
    return pipelined(setting, runtime=runtime)


def pipelined(setting: Setting, **place: Any) -> dict[str, Any]:
    """A language model in two stages, placed as these options say, beside plain `jax.jit`."""
    built = language_model(*((2, 32, 16, 8) if setting.tiny else (8, 1024, 512, 16)))
    reference, losses = built.make(), []
    plain = jax.jit(built.step)
    for _ in range(2):
        reference, loss = plain(reference, built.batch)
        losses.append(float(loss))
    alone = []
    for _ in range(setting.repeats):
        begun = time.perf_counter()
        reference, loss = jax.block_until_ready(plain(reference, built.batch))
        alone.append(time.perf_counter() - begun)
    del reference
    cluster = setting.cluster
    start = time.perf_counter()
    step = autopar.compile(
        built.step,
        jax.eval_shape(built.make),
        built.batch,
        cluster=dataclasses.replace(cluster, device=cluster.device.part(2), devices_per_node=2),
        stages=2,
        microbatches=4,
        progress=False,
        **place,
    )
    compiled = time.perf_counter() - start
    with contextlib.ExitStack() as stack:
        stack.callback(getattr(step, "shutdown", lambda: None))
        state, found = step.initialize(built.make), []
        for _ in range(2):
            state, loss = step(state, built.batch)
            found.append(float(loss))
        taken, returned = [], []
        for _ in range(setting.repeats):
            begun = time.perf_counter()
            state, loss = step(state, built.batch)
            returned.append(time.perf_counter() - begun)
            jax.block_until_ready((state, loss))
            taken.append(time.perf_counter() - begun)
        actors = list(getattr(step, "compile_seconds", ()))
    return {
        "planned_seconds": step.plan.estimates.step_seconds,
        "measured_seconds": statistics.median(taken),
        "jit_seconds": statistics.median(alone),
        "call_ms": 1e3 * statistics.median(returned),
        "losses": {"autopar": found[-1], "jit": losses[-1]},
        "compile_seconds": compiled,
        "compile_seconds_of_actors": actors,
    }
