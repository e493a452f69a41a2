"""A refusal names what would fit, and that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_steps import perceptron as step

import autopar
from autopar.base.errors import AutoparError, MemoryLimitError

CLUSTER = autopar.Cluster.preset("p3.16xlarge", devices_per_node=2)
WIDTH, ROWS = 16, 8
STATE = {f"w{i}": jnp.ones((WIDTH, WIDTH)) for i in range(2)}


def planned(cluster: autopar.Cluster = CLUSTER, **options: Any) -> autopar.Plan:
    return autopar.plan(step, STATE, jnp.ones((ROWS, WIDTH)), cluster=cluster, **options)


def refused(**options: Any) -> MemoryLimitError:
    with pytest.raises(MemoryLimitError) as caught:
        planned(**options)
    error = caught.value
    assert error.would_fit and all(words in _joined(error) for words in error.would_fit)
    assert error.least_plan in _joined(error) and ".)" not in error.what
    return error


def _joined(error: MemoryLimitError) -> str:
    """Its text without line breaks."""
    return " ".join(str(error).split())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"method": "data", "memory_limit": 4000}, "method='auto'"),
        ({"method": "data", "memory_limit": 4000, "microbatches": 1}, "'auto'"),
        ({"memory_limit": 2200}, "2 nodes (4 devices) instead of 1"),
        # Not even the state of one layer fits.
        ({"memory_limit": 100, "stages": "auto"}, "memory_limit="),
    ],
)
def test_all_that_is_named_fits(options: dict[str, Any], named: str) -> None:
    options = {"stages": 1, **options}
    error = refused(**options)
    assert any(named in words for words in error.would_fit)
    for words in error.would_fit:
        nodes, of, _ = words.rpartition(" nodes ")
        if of:
            plan = planned(replace(CLUSTER, num_nodes=int(nodes)), **options)
        else:
            changed = eval(f"dict({words.removeprefix('all of ')})")
            plan = planned(**{**options, **changed})
        assert plan.estimates.peak_bytes_per_device


def test_what_cannot_fit_is_not_named_and_no_time_is_spent_that_planning_has_not() -> None:
    error = refused(stages=1, memory_limit=8)
    assert error.would_fit == ("memory_limit='3KiB'",)
    assert refused(memory_limit=8).would_fit == error.would_fit  # no stage's state fits either
    error = refused(stages=1, memory_limit=2200, planning_time_limit=1e-9)
    assert error.would_fit == ("memory_limit='3KiB'",)


def test_a_pipeline_is_told_that_one_mesh_would_do() -> None:
    error = refused(stages=2, memory_limit=3500, microbatches=8, schedule="gpipe", remat="none")
    assert "stages=1" in error.would_fit
    planned(stages=1, memory_limit=3500, microbatches=8, remat="none")


def test_ordered_effects_on_several_devices() -> None:
    def step(w: Any, x: Any) -> Any:
        jax.debug.print("{}", x.sum(), ordered=True)
        return w + x.mean(0)

    with pytest.raises(AutoparError, match="ordered effect") as caught:
        autopar.plan(step, jnp.ones(16), np.ones((32, 16)), cluster="1x2 h100", stages=1)
    assert "test_refusals.py" in str(caught.value.where)
