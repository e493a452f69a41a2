"""Stages that share a mesh keep within its memory together."""

from __future__ import annotations

import jax.numpy as jnp
from small_steps import perceptron as step

import autopar

CLUSTER = autopar.Cluster.preset("p3.16xlarge", devices_per_node=4)
WIDTH = 64


def planned(memory_limit: int | None) -> autopar.Plan:
    return autopar.plan(
        step,
        {f"w{i}": jnp.ones((WIDTH, WIDTH)) for i in range(4)},
        jnp.ones((16, WIDTH)),
        cluster=CLUSTER,
        memory_limit=memory_limit,
        microbatches=4,
        remat="none",
        stages=2,
        num_chunks=2,
        schedule="interleaved_1f1b",
    )


def test_chunks_of_a_mesh_share_its_memory() -> None:
    free = planned(None)
    limit = free.estimates.peak_bytes_per_device * 7 // 10
    assert max(stage.peak_bytes_per_device for stage in free.stages) > limit
    bound = planned(limit)
    assert bound.estimates.peak_bytes_per_device <= limit
    assert bound.estimates.step_seconds >= free.estimates.step_seconds
