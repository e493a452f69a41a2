"""The dtype in which devices add gradients: as computed, widened, or narrowed on request."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.options import Options
from autopar.passes.graph.graph import walk
from autopar.passes.graph.microbatched import in_phases
from autopar.passes.planner.mesh_choice import plan_mesh
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding.collectives import collectives
from autopar.passes.trace.trace import trace
from autopar.runtime.spmd import block_function, partition_spec
from autopar.runtime.stage_programs import mesh_of
from autopar.runtime.verification import hlo_collectives as hlo

WIDTH, HIDDEN, BATCH = 32, 64, 64
CLUSTER = autopar.Cluster.preset("dgx-h100")


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    """A network whose hidden layer is normalized over the batch."""
    h = x @ params["up"]
    h = jax.nn.relu((h - jnp.mean(h, 0)) * params["scale"])
    return jnp.mean(jnp.square(h @ params["down"] - y).astype(jnp.float32))


def step(params: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    params = jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, grads)
    return params, loss, jnp.sum(jnp.square(y.astype(jnp.float32)), 0)


def arguments(dtype: Any) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, dtype)

    params = {"up": normal(WIDTH, HIDDEN), "scale": 1 + normal(HIDDEN), "down": normal(HIDDEN, 8)}
    return params, normal(BATCH, WIDTH), normal(BATCH, 8)


def compiled(dtype: Any, method: str, reduce_dtype: str) -> Any:
    options: dict[str, Any] = {"method": method, "microbatches": 1, "batch_argnums": (1, 2)}
    return autopar.compile(step, *arguments(dtype), reduce_dtype=reduce_dtype, **options)


def reductions(plan: autopar.Plan) -> Counter[tuple[str, str]]:
    """Bytes of sums over devices, by dtype and purpose."""
    found: Counter[tuple[str, str]] = Counter()
    for item in plan.stages[0].collectives:
        if item.kind in ("all-reduce", "reduce-scatter"):
            found[item.dtype, item.purpose] += item.bytes * item.times
    return found


@pytest.mark.parametrize("method", ["data", "zero2", "zero3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_gradients_are_added_in_another_dtype(dtype: str, method: str) -> None:
    other = "bfloat16" if dtype == "float32" else "float32"
    ratio = 0.5 if other == "bfloat16" else 2
    own, changed = (compiled(dtype, method, x) for x in ("as computed", other))
    before, after = reductions(own.plan), reductions(changed.plan)
    gradients = 2 * WIDTH * HIDDEN + HIDDEN + HIDDEN * 8
    assert after[other, "gradient"] >= ratio * jnp.dtype(dtype).itemsize * gradients / 2
    saved = before[dtype, "gradient"] - after[dtype, "gradient"]
    assert after[other, "gradient"] - before[other, "gradient"] == ratio * saved
    if dtype == "float32":  # means over the batch of which activations are made, metrics
        assert after["float32", "gradient"] >= 4 * (HIDDEN + 8)
    shown = " ".join(str(changed.plan).split())
    assert ("not exact" in shown) == (other == "bfloat16")
    loaded = autopar.Plan.from_json(changed.plan.to_json())
    assert loaded == changed.plan and loaded.options["reduce_dtype"] == other


@pytest.mark.parametrize("method", ["data", "zero3"])
def test_widened_sums_are_what_is_compiled(method: str) -> None:
    changed = compiled("bfloat16", method, "float32")
    stage = changed.plan.stages[0]
    found = hlo.collectives(changed.as_text(), stage.logical_mesh, stage.axis_names)
    planned: Counter[Any] = Counter()
    for item in stage.collectives:
        planned[item.kind, item.axes, item.times] += item.bytes

    def sums(counted: Counter[Any]) -> dict[Any, int]:  # the CPU gathers bfloat16 in float32
        return {key: size for key, size in counted.items() if key[0] != "all-gather"}

    assert sums(found) == sums(planned)


@pytest.mark.parametrize("reduce_dtype", ["as computed", "bfloat16"])
@pytest.mark.parametrize("method", ["data", "zero2"])
def test_narrowed_sums_are_what_devices_run(method: str, reduce_dtype: str) -> None:
    """In the program that is given to XLA: on CPUs this adds bfloat16 in float32."""
    graph = trace(step, arguments("float32"), batch_argnums=(1, 2)).graph
    split = SplitStep(in_phases(graph), populate(graph.jaxpr))
    options = Options(method=method, reduce_dtype=reduce_dtype)
    program = plan_mesh(split, (8,), options, CLUSTER).program
    specs = [
        [partition_spec(version.layout, program.axis_names) for version in versions]
        for versions in (program.block.inputs, program.block.outputs)
    ]
    function = jax.shard_map(
        lambda *arrays: block_function(program.mesh, program.axis_names, program.block)(arrays),
        mesh=mesh_of(program, jax.devices()),
        in_specs=tuple(specs[0]),
        out_specs=specs[1],
        check_vma=False,
    )
    traced = jax.make_jaxpr(function)(*[var.aval for var in graph.jaxpr.invars])
    found: Counter[str] = Counter()
    for eqn in walk(traced.jaxpr):
        if eqn.primitive.name in ("psum", "psum_invariant", "reduce_scatter"):
            for var in eqn.invars:
                found[str(var.aval.dtype)] += var.aval.size * var.aval.dtype.itemsize
    planned: Counter[str] = Counter()
    for item in collectives(program):
        if item.kind in ("all-reduce", "reduce-scatter"):
            planned[item.dtype] += item.bytes
    assert found == planned
    assert (found["bfloat16"] > 0) == (reduce_dtype == "bfloat16")


def test_prices_and_memory_follow() -> None:
    def planned(dtype: str, reduce_dtype: str) -> autopar.Plan:
        def shaped(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype)

        params = {"up": shaped(1024, 4096), "scale": shaped(4096), "down": shaped(4096, 1024)}
        return autopar.plan(
            step, params, shaped(64, 1024), shaped(64, 1024), cluster=CLUSTER, method="data",
            microbatches=1, reduce_dtype=reduce_dtype, batch_argnums=(1, 2),
        )  # fmt: skip

    own, narrow = planned("float32", "as computed"), planned("float32", "bfloat16")
    moved = [plan.estimates.communication_seconds for plan in (narrow, own)]
    assert moved[0] < 0.7 * moved[1]
    assert narrow.estimates.step_seconds < own.estimates.step_seconds
    half, wide = planned("bfloat16", "as computed"), planned("bfloat16", "float32")
    assert wide.estimates.communication_seconds > half.estimates.communication_seconds
    sums = 2 * 4 * 1024 * 4096  # a weight's gradient in float32, before and after
    grown = wide.estimates.peak_bytes_per_device - half.estimates.peak_bytes_per_device
    assert 0 < grown <= sums


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_numbers(dtype: str, reduce_dtype: str) -> None:
    args = arguments(dtype)
    changed = compiled(dtype, "zero2", reduce_dtype)
    expected, result = jax.jit(step)(*args), changed(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(result), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2, atol=1e-3
        )


def test_a_gradient_that_is_sent_to_another_stage_is_added_alike() -> None:
    def tied(params: Any, ids: Any) -> Any:
        def loss(params: Any) -> Any:
            x = params["table"][ids]
            for weight in params["layers"]:
                x = x + jnp.tanh(x @ weight)
            logits = x @ params["table"].T
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], -1).mean()

        gradients = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    def shaped(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    params = {"table": shaped(64, 32), "layers": [shaped(32, 32)] * 4}
    plan = autopar.plan(
        tied, params, shaped(64, dtype=jnp.int32), method="data", stages=2, microbatches=4,
        reduce_dtype="bfloat16", cluster=CLUSTER,
    )  # fmt: skip
    sums = [
        (number, item.dtype, item.source)
        for number, stage in enumerate(plan.stages)
        for item in stage.collectives
        if item.kind == "all-reduce" and item.purpose == "gradient"
    ]
    assert {number for number, *_ in sums} == {0, 1}
    assert {dtype for _, dtype, _ in sums} == {"bfloat16"}
    assert not any("rewrite.py" in source for *_, source in sums)
