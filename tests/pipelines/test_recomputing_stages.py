"""Stages that compute some of their forward pass again: quicker than all of it, and the same."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from stages.stage_programs import SplitProgram, assert_equal_to_whole, microbatched_step

import autopar
from autopar.base.plan_records import StagePlan
from autopar.passes.graph.casts_again import casts_again
from autopar.passes.graph.graph import check, variables
from autopar.passes.planner import fitting_plan, stage_shardings
from autopar.passes.planner.layouts import submesh
from autopar.passes.planner.recomputed_steps import RecomputedSteps
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_shardings import MeshSearch
from autopar.passes.primitives.populate import populate
from autopar.passes.slicing.slice_stages import slice_stages
from autopar.passes.slicing.stage_graphs import StageGraph

WIDTH, HEADS, LAYERS, LENGTH, ROWS = 16, 4, 6, 64, 16
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def block(params: Any, x: Any, key: Any) -> Any:
    """Attention that makes its scores, with dropout, and a perceptron."""
    q, k, v = jnp.split((x @ params["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
    kept = jax.random.bernoulli(key, 0.9, scores.shape)
    scores = jnp.where(kept, scores / 0.9, 0.0)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ params["out"]
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


def train_step(state: Any, batch: Any, key: Any) -> Any:
    params, moments = state

    def loss(params: Any) -> Any:
        x = batch
        for number, layer in enumerate(params):
            x = block(layer, x, jax.random.fold_in(key, number))
        return jnp.mean((x - batch[:, ::-1]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def arguments() -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(0), 4 * LAYERS + 1))

    def weights(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) * 0.3 * shape[0] ** -0.5

    params = [
        {
            "qkv": weights(WIDTH, 3 * WIDTH),
            "out": weights(WIDTH, WIDTH),
            "up": weights(WIDTH, 4 * WIDTH),
            "down": weights(4 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    batch = jax.random.normal(next(keys), (ROWS, LENGTH, WIDTH))
    return (params, OPTIMIZER.init(params)), batch, jax.random.key(3)


def planned_anew(**options: Any) -> autopar.Plan:
    known: dict[str, Any] = {"stages": 3, "microbatches": 4, "schedule": "1f1b"}
    cluster = "3xh100"
    return autopar.plan(train_step, *arguments(), cluster=cluster, **known | options)


planned = functools.cache(planned_anew)


@functools.cache
def peaks() -> tuple[int, int]:
    """Bytes that the first stage needs when it keeps all, and when it computes all again."""
    kept, full = planned(remat="none"), planned(remat="full")
    return kept.stages[0].peak_bytes_per_device, full.stages[0].peak_bytes_per_device


def limit(share: float) -> int:
    """With 1 all can be kept, with 0 all is computed again."""
    most, least = peaks()
    return int(least + share * (most - least))


def again(plan: autopar.Plan) -> list[StagePlan]:
    return [stage for stage in plan.stages if stage.recomputation is not None]


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
def test_a_stage_computes_some_values_again_where_that_is_quicker(share: float) -> None:
    plan, full = planned(memory_limit=limit(share)), planned(remat="full")
    assert again(plan)[0] is plan.stages[0]
    assert all(stage.remat == "none" for stage in again(plan))
    assert plan.estimates.peak_bytes_per_device <= limit(share)
    assert plan.estimates.step_seconds < full.estimates.step_seconds


def test_a_large_stage_does_so_before_it_is_solved_within_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []

    def noting(name: str) -> None:
        real = getattr(MeshSearch, name)

        def noted(*asked: Any, **more: Any) -> Any:
            tried.append(name)
            return real(*asked, **more)

        monkeypatch.setattr(MeshSearch, name, noted)

    for name in ("at_least_price", "rematerialized", "tightened"):
        noting(name)
    monkeypatch.setattr(stage_shardings, "LARGE_PROBLEM", 0)
    monkeypatch.setattr(fitting_plan, "ENOUGH_OF_LARGE", 1.5)
    plan = planned_anew(memory_limit=limit(0.6))
    assert set(tried) == {"at_least_price"}
    assert again(plan)[0] is plan.stages[0]
    assert plan.estimates.peak_bytes_per_device <= limit(0.6)
    assert plan.estimates.step_seconds <= planned(memory_limit=limit(0.6)).estimates.step_seconds


def test_less_memory_takes_no_less_time() -> None:
    seconds = [
        planned(memory_limit=limit(share)).estimates.step_seconds for share in (0.3, 0.9, 1.0)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_nothing_is_computed_again_that_fits() -> None:
    assert not again(planned(memory_limit=limit(1.2)))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_what_is_asked_for_holds(remat: str) -> None:
    try:
        plan = planned(memory_limit=limit(0.5), remat=remat)
    except autopar.errors.MemoryLimitError:
        assert remat == "none"
        return
    assert not again(plan)


def test_it_is_told() -> None:
    plan = planned(memory_limit=limit(0.6))
    assert "recomputed" in str(plan) and "the stage takes" in str(plan)
    assert "recomputed" in "\n".join(plan.diff(planned()))
    assert any("computed again on" in candidate.note for candidate in plan.candidates)


def numbers(step: Any, steps: int = 2) -> Any:
    state, batch, key = arguments()
    losses = []
    for number in range(steps):
        state, loss = step(state, batch, jax.random.fold_in(key, number))
        losses.append(loss)
    return jax.device_get((state, losses))


def assert_equal(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@functools.cache
def plain() -> Any:
    return numbers(jax.jit(train_step))


def parallel(schedule: str = "1f1b", plan: Any = None, limit: int | None = None) -> Any:
    """On three devices of this machine, with memory for some of what stages would keep."""
    asked: dict[str, Any] = {"cluster": autopar.Cluster.local(jax.devices()[:3])}
    asked |= {"stages": 3, "microbatches": 4, "schedule": schedule}
    if limit is None:
        kept, full = (
            autopar.plan(train_step, *arguments(), remat=remat, **asked).stages[0]
            for remat in ("none", "full")
        )
        least = full.peak_bytes_per_device
        limit = least + (kept.peak_bytes_per_device - least) * 6 // 10
    return autopar.parallelize(train_step, plan=plan, memory_limit=limit, **asked)


@functools.cache
def planned_step() -> tuple[Any, Any]:
    """In the usual schedule, with its numbers."""
    step = parallel()
    return step, numbers(step)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager_1f1b", "zb_h1"])
def test_the_numbers_are_those_of_the_plain_function(schedule: str) -> None:
    step = planned_step()[0] if schedule == "1f1b" else parallel(schedule=schedule)
    found = planned_step()[1] if schedule == "1f1b" else numbers(step)
    assert_equal(found, plain())
    assert again(step.plan) or schedule == "zb_h1"


def test_a_saved_plan_is_followed(tmp_path: Path) -> None:
    step, found = planned_step()
    step.plan.save(tmp_path / "plan.json")
    known = autopar.Plan.load(tmp_path / "plan.json")
    assert known == step.plan
    followed = parallel(plan=known, limit=step.plan.options["memory_limit"])
    assert_equal(numbers(followed), found)
    assert followed.plan.decisions_hash == step.plan.decisions_hash


def test_a_plan_is_the_same_every_time() -> None:
    plans = [planned_anew(memory_limit=limit(0.6)), planned(memory_limit=limit(0.6))]
    a, b = (dataclasses.replace(plan).to_dict() for plan in plans)
    assert a == b


@functools.cache
def whole_in(dtype: Any) -> SplitProgram:
    """Two layers in each of two stages."""
    (params, _), *others = arguments()
    return microbatched_step(step_in(dtype), (params[:4], *others))


def step_in(dtype: Any) -> Any:
    """A step that computes in a narrower precision; then stages can cast in every microbatch."""

    def step(params: Any, batch: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch.astype(dtype)
            for number, layer in enumerate(jax.tree.map(lambda w: w.astype(dtype), params)):
                x = block(layer, x, jax.random.fold_in(key, number))
            return jnp.mean(x.astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.01 * g, params, gradients), value

    return step


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("casting", [False, True])
def test_every_choice_computes_the_same(split_backward: bool, casting: bool) -> None:
    dtype, relative = (jnp.bfloat16, 0.03) if casting else (jnp.float32, 1e-4)
    whole = whole_in(dtype)
    stages = slice_stages(whole.step, whole.rules, 2, split_backward=split_backward)
    part, sizes = submesh(autopar.Cluster.preset("h100"), 2), list[int]()

    def ways(stage: StageGraph) -> RecomputedSteps:
        again = casts_again(stage.step) if casting else None
        step = stage.step if again is None else again.step
        return RecomputedSteps.of(SplitStep(step, populate(step.graph.jaxpr)), part)

    of_stage = [ways(stage) for stage in stages.graphs]
    for place in (0, *(len(steps) - 1 for steps in of_stage[:1])):
        found = [steps[min(place, len(steps) - 1)].step for steps in of_stage]
        pairs = zip(stages.graphs, found, strict=True)
        graphs = tuple(dataclasses.replace(stage, step=step) for stage, step in pairs)
        for step, stage in zip(found, graphs, strict=True):
            check(stage.graph)
            loop = step.loop
            assert loop is not None and len(loop.tasks) == len(loop.body.eqns)
            assert list(loop.tasks) == sorted(loop.tasks, key="FBW".index)
        sizes.append(sum(kept_bytes(graph) for graph in graphs))
        assert_equal_to_whole(whole, dataclasses.replace(stages, graphs=graphs), relative=relative)
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0]


def kept_bytes(stage: StageGraph) -> int:
    """Of what forward passes make and later tasks read, in a microbatch."""
    loop = stage.loop
    assert loop is not None
    made = {
        v: math.prod(v.aval.shape) * getattr(v.aval.dtype, "itemsize", 0)
        for eqn, task in zip(loop.body.eqns, loop.tasks, strict=True)
        for v in eqn.outvars
        if task == "F"
    }
    read = {
        v: None
        for eqn, task in zip(loop.body.eqns, loop.tasks, strict=True)
        for v in variables(eqn.invars)
        if task != "F" and v in made
    }
    return sum(made[v] for v in read)
