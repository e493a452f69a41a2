"""Values that the backward pass of a step on one mesh computes again instead of keeping them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn
from sharding.steps import graph_of

import autopar
from autopar.arrays.typed_keys import is_key
from autopar.passes import microbatch
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import variables
from autopar.passes.graph.microbatched import Microbatched
from autopar.passes.planner import recomputed_steps
from autopar.passes.primitives.populate import populate
from autopar.passes.recompute.choice import KeptValues
from autopar.passes.recompute.run_again import recomputed

DEPTH, WIDTH, HEADS, ROWS, LENGTH = 3, 16, 2, 16, 8


def init(dtype: Any = jnp.float32) -> Any:
    keys = jax.random.split(jax.random.key(0), DEPTH)
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "up": (WIDTH, 8 * WIDTH), "down": (8 * WIDTH, WIDTH)}
    return [
        {n: jax.random.normal(k, shape, dtype) / shape[0] ** 0.5 for n, shape in shapes.items()}
        for k in keys
    ]


def step_of(checkpoint: bool = False) -> Any:
    def block(w: Any, x: Any, key: Any) -> Any:
        q, k, v = jnp.split((x @ w["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        kept = jax.random.bernoulli(key, 0.9, weights.shape)
        y = jnp.einsum("bhqk,bkhd->bqhd", jnp.where(kept, weights / 0.9, 0), v)
        x = x + y.reshape(x.shape)
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    def train_step(params: Any, x: Any, key: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            y = x
            for number, w in enumerate(params):
                layer = jax.checkpoint(block) if checkpoint else block
                y = layer(w, y, jax.random.fold_in(key, number))
            return jnp.mean(jnp.square(y).astype(jnp.float32))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return train_step


def arguments(dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    x = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, WIDTH), dtype)
    return init(dtype), x, jax.random.key(2)


ASKED: dict[str, Any] = {"method": "data", "batch_argnums": (1,), "microbatches": 1}


def compiled(checkpoint: bool = False, dtype: Any = jnp.float32, **options: Any) -> Any:
    return autopar.compile(step_of(checkpoint), *arguments(dtype), **{**ASKED, **options})


def planned(**options: Any) -> autopar.Plan:
    dtype = options.pop("dtype", jnp.float32)
    return autopar.plan(step_of(), *arguments(dtype), **{**ASKED, **options})


def assert_trees_close(found: Any, expected: Any, tolerance: float) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("count", "dtype", "tolerance"),
    [(1, jnp.float32, 1e-4), (2, jnp.float32, 1e-4), (1, jnp.bfloat16, 2e-2)],
)
def test_all_of_every_layer_is_computed_again(count: int, dtype: Any, tolerance: float) -> None:
    step = compiled(dtype=dtype, microbatches=count, remat="full")
    again = step.plan.recomputation
    assert again is not None and again.layers > 1
    assert {"dot_general", "tanh"} <= {name for name, _ in again.operations}
    assert count > 1 or "random_bits" in dict(again.operations)
    assert "recomputed" in str(step.plan)
    kept = planned(dtype=dtype, microbatches=count, remat="none")
    peaks = [p.estimates.peak_bytes_per_device for p in (step.plan, kept)]
    assert peaks[0] < 0.9 * peaks[1]
    assert step.plan.estimates.step_seconds > kept.estimates.step_seconds
    expected = jax.jit(step_of())(*arguments(dtype))
    assert_trees_close(step(*arguments(dtype)), expected, tolerance)


@pytest.mark.usefixtures("no_remedies")
def test_a_step_that_does_not_fit_keeps_less(tmp_path: Path) -> None:
    kept, least = (planned(remat=remat) for remat in ("none", "full"))
    assert kept.recomputation is None
    sizes = [plan.estimates.peak_bytes_per_device for plan in (kept, least)]
    limit = (3 * sizes[0] + sizes[1]) // 4
    step = compiled(memory_limit=limit)
    assert step.plan.estimates.peak_bytes_per_device <= limit
    again = step.plan.recomputation
    assert again.saved_bytes > 0 and again.price > 0
    assert_trees_close(step(*arguments()), jax.jit(step_of())(*arguments()), 1e-4)
    step.plan.save(tmp_path / "plan.json")
    followed = compiled(memory_limit=limit, plan=str(tmp_path / "plan.json"))
    assert followed.plan == step.plan
    assert_trees_close(followed(*arguments()), step(*arguments()), 1e-5)
    with pytest.raises(autopar.AutoparError, match="No plan keeps within"):
        planned(memory_limit=sizes[1] // 4)
    with pytest.raises(autopar.AutoparError, match="No plan keeps within"):
        planned(memory_limit=limit, remat="none")


def test_choices_are_nested_and_layers_alike() -> None:
    graph = graph_of(step_of(), *arguments())
    step = microbatch.in_one_microbatch(graph, populate(graph.jaxpr))
    rules = populate(step.graph.jaxpr)
    values = KeptValues.of(step, rules, lambda eqn: sum(v.aval.size for v in eqn.outvars) * 1e-9)
    family = values.family
    assert len(family) > 2
    for one, other in itertools.pairwise(family):
        assert one.saved_bytes < other.saved_bytes and one.again < other.again
    eqns = values.parts.body.eqns
    for choice in family:
        products = [n for _, n in choice.again if eqns[n].primitive.name == "tanh"]
        assert len(products) in (0, DEPTH - 1), "the last one's backward pass comes at once"


@pytest.mark.parametrize("slower", [1e3, 1e9, 1e12])
def test_choices_are_the_same_however_large_the_batch(slower: float) -> None:
    """Prices of a cut are integers: of batches of a million tokens they were cut off at a largest.

    So what a product of a third of a second makes was kept at any price.
    """
    graph = graph_of(step_of(), *arguments())
    step = microbatch.in_one_microbatch(graph, populate(graph.jaxpr))
    rules = populate(step.graph.jaxpr)

    def family(factor: float) -> list[tuple[int, int]]:
        def seconds(eqn: JaxprEqn) -> float:
            return factor * sum(v.aval.size for v in eqn.outvars)

        values = KeptValues.of(step, rules, seconds)
        return [(kept.saved_bytes, len(kept.again)) for kept in values.family]

    assert family(slower * 1e-9) == family(1e-9)


def microbatch_body(step: Microbatched) -> list[JaxprEqn]:
    assert step.loop is not None
    return list(step.loop.body.eqns)


def test_all_of_a_layer_that_runs_again_is_read_after_its_barrier() -> None:
    """Else XLA keeps what it is made of, and random bits whose keys are the same."""
    graph = graph_of(step_of(), *arguments())
    step = microbatch.in_one_microbatch(graph, populate(graph.jaxpr))
    rules = populate(step.graph.jaxpr)
    values = KeptValues.of(step, rules, lambda eqn: sum(v.aval.size for v in eqn.outvars) * 1e-9)
    eqns = values.parts.body.eqns
    forward = {id(eqn) for number, eqn in enumerate(eqns) if number not in values.late}
    counts = []
    for choice in values.family:
        layers = {layer for layer, _ in choice.again}
        kept = choice.values & {v for layer in layers for v in values.wanted[layer]}
        body = microbatch_body(recomputed(values, choice))
        readers = [eqn for eqn in body if kept & {*variables(eqn.invars)}]
        assert all(is_barrier(eqn) or id(eqn) in forward for eqn in readers)
        bits = [eqn for eqn in body if eqn.primitive.name == "random_bits"]
        passed = [v for eqn in body if is_barrier(eqn) for v in eqn.outvars if is_key(v.aval.dtype)]
        first, again = bits[:DEPTH], bits[DEPTH:]
        assert {eqn.invars[0] for eqn in again} == {*passed}
        assert not {eqn.invars[0] for eqn in first} & {*passed}
        counts.append((sum(map(is_barrier, readers)), len(again)))
    assert max(counts)[0] > 0 and max(again for _, again in counts) > 0


def test_what_is_compared_with_a_maximum_is_not_computed_again() -> None:
    """It may be rounded otherwise: then no element would equal the maximum."""

    def step(w: Any, x: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            y = x
            for part in w:
                y = jax.nn.silu(y @ part)
                y = y + jnp.max(y, axis=-1, keepdims=True)
            return jnp.mean(jnp.max(y, axis=-1) ** 2)

        return jax.value_and_grad(loss_fn)(w)

    graph = graph_of(step, jnp.ones((3, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH)))
    whole = microbatch.in_one_microbatch(graph, populate(graph.jaxpr))
    rules = populate(whole.graph.jaxpr)
    values = KeptValues.of(whole, rules, lambda eqn: sum(v.aval.size for v in eqn.outvars) * 1e-9)
    eqns = values.parts.body.eqns
    assert any(eqn.primitive.name == "eq" for eqn in eqns)
    again = {eqns[n].primitive.name for choice in values.family for _, n in choice.again}
    assert "logistic" in again and "eq" not in again


@pytest.mark.parametrize("stages", [1, 2])
def test_checkpoints_save_memory_on_cpus(stages: int) -> None:
    """XLA:CPU by itself takes their barriers away, and what runs again for the first run's."""

    def step_with(wrapped: Any) -> Any:
        def layer(y: Any, w: Any) -> Any:
            return jnp.sin(jnp.tanh(jnp.sin(y @ w)) * 2) + y

        def loss_fn(weights: Any, x: Any) -> Any:
            for w in weights:
                x = wrapped(layer)(x, w)
            return jnp.mean(x**2)

        return jax.grad(loss_fn)

    shapes = (
        [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8,
        jax.ShapeDtypeStruct((8192, 64), jnp.float32),
    )
    asked = {**ASKED, "stages": stages, "schedule": "1f1b"} if stages > 1 else ASKED

    def temporaries(wrapped: Any) -> int:
        step = autopar.compile(step_with(wrapped), *shapes, **asked)
        return max(piece.temporaries for piece in step.memory().values())

    assert temporaries(jax.checkpoint) < 0.7 * temporaries(lambda layer: layer)


def looped(w: Any, x: Any) -> Any:
    rows, _ = jax.lax.scan(jax.checkpoint(lambda c, v: (jnp.tanh(c * v), None)), x, w)
    return jnp.mean(rows**2)


def alone(w: Any, x: Any) -> Any:
    def layer(w: Any, x: Any) -> Any:
        y = jnp.tanh(x @ w)
        return jnp.mean(y + jnp.mean(y, axis=-1, keepdims=True))

    return jax.checkpoint(layer)(w, x)


@pytest.mark.parametrize(("loss_fn", "count"), [(looped, 1), (alone, 4)])
def test_small_loops_with_checkpoints(loss_fn: Any, count: int) -> None:
    """XLA:CPU makes one kernel of a small loop, and ends the process where it has a barrier."""

    def step(w: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(w, x)
        return w - 0.1 * grads, loss

    w = jax.random.normal(jax.random.key(0), (4, 4))
    x = jax.random.normal(jax.random.key(1), (32, 4))
    expected = jax.jit(step)(w, x)
    compiled_step = autopar.compile(step, w, x, **{**ASKED, "microbatches": count})
    assert_trees_close(compiled_step(w, x), expected, 1e-6)


def measured(params: Any, x: Any, with_metrics: bool = True) -> Any:
    """A step that returns a number of every layer."""

    def loss_fn(params: Any) -> Any:
        y, metrics = x, []
        for first, second in params:
            inner = jnp.tanh(y @ first)
            if with_metrics:
                metrics.append(jnp.mean(inner**2))
            y = y + jnp.sin(jnp.tanh(jnp.sin(inner))) @ second
        return jnp.mean(y**2), metrics

    (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss, metrics


def measured_arguments(rows: int) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 9)
    weights = [jax.random.normal(key, (32, 32)) / 6 for key in keys]
    return list(zip(weights[:4], weights[4:8], strict=True)), jax.random.normal(
        keys[-1], (rows, 32)
    )


@pytest.mark.parametrize("options", [{}, {"stages": 2, "schedule": "1f1b"}])
def test_metrics_of_layers_that_run_again(options: dict[str, Any]) -> None:
    """They are added up in the forward pass, before what a layer keeps is all there."""
    params, x = measured_arguments(512)
    expected = jax.jit(measured)(params, x)
    asked = {"method": "data", "batch_argnums": (1,), "microbatches": 2, **options}
    whole = autopar.plan(measured, params, x, **asked)
    limit = int(0.8 * max(stage.peak_bytes_per_device for stage in whole.stages))
    step = autopar.compile(measured, params, x, **asked, memory_limit=limit)
    again = [step.plan.recomputation, *(stage.recomputation for stage in step.plan.stages)]
    assert any(again)
    assert_trees_close(step(params, x), expected, 1e-5)


def test_metrics_of_layers_do_not_keep_them() -> None:
    shapes = jax.eval_shape(lambda: measured_arguments(8192))

    def temporaries(with_metrics: bool, remat: str) -> int:
        def step(params: Any, x: Any) -> Any:
            return measured(params, x, with_metrics)

        asked = {**ASKED, "microbatches": 2, "remat": remat}
        return int(autopar.compile(step, *shapes, **asked).memory_analysis().temp_size_in_bytes)

    frugal = temporaries(True, "full")
    assert frugal < 0.8 * temporaries(True, "none")
    assert frugal < 1.1 * temporaries(False, "full")


def critic_and_actor(params: Any, x: Any) -> Any:
    """Two losses, one after the other: the second forward pass follows the first backward pass."""
    critic, actor = params
    critic, *others = measured(critic, x)
    actor, *more = measured(actor, x)
    return (critic, actor), others, more


@pytest.mark.parametrize("count", [1, 2])
def test_metrics_of_a_second_loss(count: int) -> None:
    params, x = measured_arguments(512)
    both = (params, jax.tree.map(jnp.copy, params))
    expected = jax.jit(critic_and_actor)(both, x)
    asked = {**ASKED, "microbatches": count}
    whole = autopar.plan(critic_and_actor, both, x, **asked)
    limit = int(0.85 * whole.estimates.peak_bytes_per_device)
    step = autopar.compile(critic_and_actor, both, x, **asked, memory_limit=limit)
    assert step.plan.recomputation
    assert_trees_close(step(both, x), expected, 1e-5)


def test_what_computes_all_again_needs_least() -> None:
    """Also of layers with metrics, which are joined when all is over."""
    params, x = measured_arguments(4096)
    peaks = [
        autopar.plan(measured, params, x, **ASKED, remat=remat).estimates.peak_bytes_per_device
        for remat in ("none", "full")
    ]
    plan = autopar.plan(measured, params, x, **ASKED, memory_limit=int(1.001 * peaks[1]))
    assert plan.estimates.peak_bytes_per_device <= 1.001 * peaks[1] < 0.8 * peaks[0]


def test_what_a_plan_computes_again_is_not_edited(tmp_path: Path) -> None:
    params, x = measured_arguments(512)
    plan = autopar.plan(measured, params, x, **ASKED, remat="full")
    plain = json.loads(plan.to_json())
    plain["recomputation"] = None
    (tmp_path / "plan.json").write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(autopar.errors.PlanMismatchError, match="its recomputation was edited"):
        autopar.compile(measured, params, x, **ASKED, remat="full", plan=tmp_path / "plan.json")


def with_dots_kept(params: Any, x: Any) -> Any:
    """Blocks in `jax.checkpoint`, whose barriers read several layers each."""

    def block(x: Any, w: Any) -> Any:
        x = x + jnp.tanh(x @ w["qkv"]) @ w["qkv"].T
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    def loss_fn(params: Any) -> Any:
        y = x
        for w in params:
            y = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)(y, w)
        return jnp.mean(y**2)

    return jax.grad(loss_fn)(params)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("step", [step_of(), with_dots_kept])
def test_layers_that_run_again_wait_for_a_gradient(
    step: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else XLA runs them again as early as it likes, and keeps what they make."""
    made = []

    def noted(values: KeptValues, kept: Any) -> Microbatched:
        made.append((values, recomputed(values, kept)))
        return made[-1][1]

    monkeypatch.setattr(recomputed_steps, "recomputed", noted)
    args = arguments(jnp.bfloat16)[: 2 if step is with_dots_kept else 3]
    asked = {**ASKED, "microbatches": count, "cluster": "8xh100"}
    autopar.plan(step, *args, **asked, remat="full")
    for values, changed in made:
        late = {v for number in values.late for v in values.parts.body.eqns[number].outvars}
        body = microbatch_body(changed)
        read = {v for eqn in body for v in variables(eqn.invars)}
        there = set[Any]()
        waiting = []
        for eqn in filter(is_barrier, body):
            pairs = list(zip(eqn.invars, eqn.outvars, strict=True))
            waiting.append(any(a in late | there and v in read for a, v in pairs))
            there.update(v for a, v in pairs if a in late | there)
        assert len(waiting) >= DEPTH and all(waiting[1:])
    assert made


def test_views_of_numbers_in_layers_that_run_again() -> None:
    def step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            y = x
            for first, second in params:
                half = jnp.reshape(jnp.float32(0.5), (1, 1))
                y = y + jnp.tanh(y @ first) * half @ second
            return jnp.mean(y**2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params, x = measured_arguments(64)
    expected = jax.jit(step)(params, x)
    asked = {**ASKED, "microbatches": 2, "remat": "full"}
    assert_trees_close(autopar.compile(step, params, x, **asked)(params, x), expected, 1e-5)


def test_the_programs_own_checkpoints() -> None:
    """They are respected, or undone on request."""

    def products(**options: Any) -> int:
        text = compiled(checkpoint=True, **options).as_text()
        return sum(" dot(" in line for line in text.splitlines())

    assert products(remat="override") < products()
    step = compiled(checkpoint=True, remat="override")
    assert_trees_close(step(*arguments()), jax.jit(step_of())(*arguments()), 1e-4)
