"""The flags that a run wants follow from its plan, and are set or told."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.base.run_flags import (
    LATENCY_HIDING,
    MEASURED_TABLES,
    MEMORY_FRACTION,
    MEMORY_SCHEDULER,
    missing_flags,
    ordered_options,
)
from autopar.errors import AutoparError, AutoparWarning
from autopar.passes.sharding.spmd_program import Block, Loop, SpmdProgram
from autopar.requests import warn_of_flags
from autopar.runtime.ahead import compile_with
from autopar.runtime.stage_programs import StagePrograms
from autopar.runtime.verification.targets import target_named

WEIGHTS = jax.ShapeDtypeStruct((256, 256), jnp.float32)
ROWS = jax.ShapeDtypeStruct((64, 256), jnp.float32)


def step(weights: Any, rows: Any) -> Any:
    return weights - jax.grad(lambda w: (jnp.tanh(rows @ w) ** 2).mean())(weights)


def planned(cluster: str = "8xh100", **changes: Any) -> autopar.Plan:
    on = dataclasses.replace(autopar.Cluster.named(cluster), **changes)
    return autopar.plan(step, WEIGHTS, ROWS, cluster=on, method="data")


def test_a_small_plan_wants_none() -> None:
    assert planned().flags == ()
    assert "Flags of a run" not in str(planned())
    assert [(x.name, x.is_set) for x in planned("8xtpu-v5e").flags] == [(MEMORY_SCHEDULER, True)]
    halves = autopar.plan(step, WEIGHTS, ROWS, cluster="8xtpu-v5e", method="data", microbatches=2)
    assert halves.flags == (), "a loop is not told an order"


def test_planned_overlap_is_what_xla_is_told() -> None:
    plan = planned(overlap=0.5)
    flag, *others = plan.flags
    assert (flag.name, flag.value, flag.is_set) == (LATENCY_HIDING, "true", True)
    assert flag.source in " ".join(str(plan).split()) and LATENCY_HIDING in str(plan)
    assert {x.name: x.value for x in others} == {
        "xla_gpu_all_reduce_combine_threshold_bytes": "31457287",
        "xla_gpu_all_gather_combine_threshold_bytes": "31457287",
        "xla_gpu_reduce_scatter_combine_threshold_bytes": "31457287",
        "xla_gpu_threshold_for_windowed_einsum_mib": "100000",
    }
    assert all(x.is_set and x.why and x.source.startswith("XLA") for x in others)
    text = "".join(str(plan).split())
    assert all("".join(x.source.split())[:40] in text for x in others)
    assert autopar.Plan.from_json(plan.to_json()).flags == plan.flags

    nothing = Block((), (), ())
    loop = Loop(jax.make_jaxpr(jnp.sin)(1.0).eqns[0], (), (), nothing)

    def options(
        platform: str,
        is_overlapped: bool,
        is_whole: bool,
        has_loops: bool = False,
        is_absent: bool = False,
        kind: str = "NVIDIA A100-SXM4-80GB",
    ) -> Any:
        device = SimpleNamespace(flat=[SimpleNamespace(platform=platform, device_kind=kind)])
        block = dataclasses.replace(nothing, instructions=(loop,) if has_loops else ())
        programs = [SpmdProgram((8,), ("x",), block, overlapped=is_overlapped)]
        own: Any = SimpleNamespace(
            stage_meshes=[SimpleNamespace(devices=device)],
            pieces=SimpleNamespace(programs=programs),
            are_absent=is_absent,
        )
        return StagePrograms.compiler_options(own, 0, is_whole)

    told = options("gpu", True, True)
    assert told == options("gpu", True, False)
    assert {name: str(value).lower() for name, value in told.items()} == {
        x.name: x.value for x in plan.flags
    }
    assert options("gpu", False, True) == {}
    # XLA has no table of an A100's collectives, and would look for one.
    assert options("gpu", False, True, is_absent=True) == {MEASURED_TABLES: False}
    assert options("gpu", False, True, is_absent=True, kind="NVIDIA H100 80GB HBM3") == {}
    assert options("tpu", True, True) == options("tpu", False, False) == ordered_options()
    assert options("tpu", True, True, has_loops=True) == {}
    assert options("cpu", True, True) != options("cpu", True, False)


def test_a_compiler_need_not_know_of_orders() -> None:
    lowered = jax.jit(step).lower(WEIGHTS, ROWS)  # as a CPU's does not
    more: dict[str, str | bool] = {"xla_cpu_enable_fast_math": False}
    with pytest.warns(AutoparWarning, match="has no xla_memory_scheduler"):
        compiled, taken = compile_with(lowered, {**ordered_options(), **more})
        assert compiled.as_text() and taken == more
        assert compile_with(lowered, ordered_options())[1] is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_unknown"):
        compile_with(lowered, {"xla_unknown": True, **more})


def test_tpus_are_told_in_their_environment() -> None:
    _, flag = planned("8xtpu-v5e", overlap=0.5).flags
    assert (flag.name, flag.is_set) == ("LIBTPU_INIT_ARGS", False)
    assert "--xla_tpu_enable_async_collective_fusion=true" in flag.value.split()
    assert "50% of the collectives" in flag.why and "maxtext" in flag.source


@pytest.mark.parametrize(
    ("cluster", "target"), [("8xh100", "gpu:h100"), ("8xtpu-v5e", "tpu:v5e:2x4")]
)
def test_compilers_know_the_flags(
    cluster: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        target_named(target).require(8)
    except AutoparError:
        pytest.skip("its compiler is not installed")
    plan = planned(cluster, overlap=0.5)
    for flag in plan.flags:
        if not flag.is_set:
            monkeypatch.setenv(flag.name, flag.value)
    made = plan.verify(target, cache=False, processes=1)
    assert not made.failures


def test_memory_that_jax_would_not_take_is_told() -> None:
    plan = planned()
    device = plan.cluster["device"]
    peak = int(0.9 * device["memory_bytes"])
    estimates = dataclasses.replace(plan.estimates, peak_bytes_per_device=peak)
    plan = dataclasses.replace(plan, estimates=estimates)
    (flag,) = plan.flags
    assert (flag.name, flag.value, flag.is_set) == (MEMORY_FRACTION, "0.95", False)
    assert missing_flags(plan, {}) == missing_flags(plan, {MEMORY_FRACTION: "0.8"}) == (flag,)
    assert missing_flags(plan, {MEMORY_FRACTION: "0.95"}) == ()
    gpus: Any = [SimpleNamespace(platform="gpu")]
    with pytest.warns(AutoparWarning, match="MEM_FRACTION=0.95"):
        warn_of_flags(plan, gpus)
    warn_of_flags(plan, None)  # on CPUs nothing is said
