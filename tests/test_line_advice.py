"""`plan.hot_lines.advice`: what follows from where a step's time goes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from attention_ways import (
    STACK,
    Attention,
    advised,
    at_least_zero,
    biased,
    by_hand,
    by_jax,
    capped,
    dropping,
    gated,
    grouped,
    line_at,
    mixed_by,
    over_queries,
    planned,
    scaled_by_head,
    scanned,
    scores_of,
    shapes_of,
    squared,
    step_with,
    turned_weights,
    with_a_loss,
    with_a_loss_of_sums,
    with_a_sink,
    written_out,
    zeroed,
)

import autopar
from autopar.passes.graph.graph import inner_jaxprs
from autopar.passes.primitives.written_attention import written_attention


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return planned(step_with(by_hand, remat=True), shapes_of())


@pytest.mark.parametrize("attention", [by_hand, written_out, by_jax, scaled_by_head, biased])
def test_attention_that_writes_scores_is_told(attention: Attention) -> None:
    plan = planned(step_with(attention), shapes_of())
    (advice,) = [x for x in plan.hot_lines.advice if x.about == "attention"]
    assert 'implementation="cudnn"' in advice.text and attention.__name__ in advice.text
    line = line_at(plan, advice.source)
    assert line.function == attention.__name__
    # The bound has what products read and write of scores, too; other lines stay as they are.
    least = advice.share * plan.hot_lines.seconds
    functions = attention.__name__, "scores_of", "mixed_by"
    attending = [x for x in plan.hot_lines.lines if x.function in functions]
    assert least < advice.bound_seconds < sum(x.seconds for x in attending)


@pytest.mark.parametrize(
    "attention",
    [
        capped,
        dropping,
        with_a_sink,
        at_least_zero,
        gated,
        zeroed,
        squared,
        over_queries,
        turned_weights,
        with_a_loss,
        with_a_loss_of_sums,
    ],
)
def test_what_kernels_do_not_compute_is_no_attention(attention: Attention) -> None:
    assert "attention" not in advised(planned(step_with(attention), shapes_of()))


def test_weights_that_a_scan_returns_are_no_attention() -> None:
    def step(x: jax.Array, *, returned: bool) -> tuple[jax.Array, Any]:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array | None]:
            weights = jax.nn.softmax(scores_of(x, x))
            return mixed_by(weights, x), weights if returned else None

        def loss(x: jax.Array) -> tuple[jax.Array, Any]:
            x, weights = jax.lax.scan(layer, x, None, length=2)
            return x.sum(), weights

        return jax.value_and_grad(loss, has_aux=True)(x)[::-1]

    x = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.float32)
    found = [
        len([*written_attention(jax.make_jaxpr(functools.partial(step, returned=it))(x).jaxpr)])
        for it in (False, True)
    ]
    assert found == [1, 0]


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (shapes_of(dtype=jnp.float32), {}),  # cuDNN has none
        (shapes_of(), {"cluster": "1xv100"}),
        (shapes_of(64, 4096), {}),  # of a step, little
        (shapes_of(1023), {}),  # JAX trains no odd lengths
    ],
    ids=["float32", "before Ampere", "short rows", "odd rows"],
)
def test_attention_is_not_told_where_nothing_follows(shapes: Any, options: Any) -> None:
    for attention in (by_hand, written_out):
        assert "attention" not in advised(planned(step_with(attention), shapes, **options))


def test_tpus_have_another_kernel() -> None:
    plan = planned(step_with(by_hand), shapes_of(), cluster="4 v5e", microbatches=1)
    (advice,) = [x for x in plan.hot_lines.advice if x.about == "attention"]
    assert "pallas" in advice.text and "cudnn" not in advice.text


@pytest.mark.parametrize(
    ("attention", "depth", "told"),
    [(by_hand, 192, False), (by_hand, 256, True), (grouped, 64, False)],
)
def test_tpus_kernel_has_its_own_limits(attention: Attention, depth: int, told: bool) -> None:
    step, shapes = step_with(attention, depth=depth), shapes_of(width=768)
    plan = planned(step, shapes, cluster="1 v5e", microbatches=1)
    assert ("attention" in advised(plan)) == told


def test_gpus_kernel_has_grouped_heads() -> None:
    assert "attention" in advised(planned(step_with(grouped), shapes_of()))


def test_a_loss_and_its_gradient_are_no_attention() -> None:
    step = step_with(lambda q, k, v: q + k + v)
    jaxpr = jax.make_jaxpr(step)(*shapes_of(64)).jaxpr
    flat = [jaxpr, *(body for eqn in jaxpr.eqns for body in inner_jaxprs(eqn))]
    assert not [x for scope in flat for x in written_attention(scope)]


def test_what_is_computed_again_is_told(plan: autopar.Plan) -> None:
    (advice,) = [x for x in plan.hot_lines.advice if x.about == "recomputation"]
    assert "jax.checkpoint" in advice.text and 'remat="override"' in advice.text
    again = sum(line.again_seconds for line in plan.hot_lines.lines)
    # An override does not undo all of it.
    assert 0.9 * again < advice.bound_seconds <= again


def test_an_override_is_advised_where_it_undoes_a_checkpoint() -> None:
    options: Any = {"batch_argnums": (1,), "microbatches": 1}
    told = {}
    for checkpoint in ("layer", "scan"):
        plan = planned(scanned(checkpoint), STACK, **options)
        told[checkpoint] = [x for x in plan.hot_lines.advice if x.about == "recomputation"]
        assert sum(x.again_seconds for x in plan.hot_lines.lines) > 0
    assert not told["scan"] and "keeps it" in str(told["layer"][0])
    plan = planned(scanned("layer"), STACK, **options)
    kept = planned(scanned("layer"), STACK, remat="override", **options)
    # What the advice says is right: what is kept, and how much shorter the step is at most.
    peaks = [x.estimates.peak_bytes_per_device for x in (plan, kept)]
    assert plan.lines is not None
    assert plan.lines.undone_bytes == pytest.approx(peaks[1] - peaks[0], rel=0.2)
    shorter = plan.estimates.step_seconds - kept.estimates.step_seconds
    assert 0.5 * told["layer"][0].bound_seconds < shorter <= told["layer"][0].bound_seconds


def test_an_override_is_not_advised_without_room() -> None:
    options: Any = {"batch_argnums": (1,), "microbatches": 1}
    plan = planned(scanned("layer"), STACK, **options)
    peak = plan.estimates.peak_bytes_per_device
    for free, said in ((20 << 20, None), (200 << 20, "keeps some of it"), (1 << 30, "keeps it")):
        tight = replace(plan, options={**plan.options, "memory_limit": peak + free})
        told = [str(x) for x in tight.hot_lines.advice if x.about == "recomputation"]
        assert bool(told) == bool(said) and all(str(said) in text for text in told)


def test_recomputation_is_not_told_where_there_is_none() -> None:
    assert "recomputation" not in advised(planned(step_with(by_hand), shapes_of()))
    override = planned(
        step_with(by_hand, remat=True), shapes_of(), remat="override", microbatches=1
    )
    assert "recomputation" not in advised(override)


def test_what_the_memory_needs_again_is_told_so() -> None:
    step, shapes = step_with(by_hand), shapes_of()
    whole = planned(step, shapes, microbatches=1).estimates.peak_bytes_per_device
    plan = planned(step, shapes, microbatches=1, memory_limit=int(0.6 * whole))
    assert plan.recomputation is not None
    assert sum(line.again_seconds for line in plan.hot_lines.lines) > 0
    told = [x.text for x in plan.hot_lines.advice if x.about == "recomputation"]
    assert all("With more of it" in text for text in told)


def test_full_recomputation_in_stages_is_told() -> None:
    shared: Any = {"cluster": "2xh100", "stages": 2, "microbatches": 4}
    plan = planned(step_with(by_hand), shapes_of(), remat="full", **shared)
    (advice,) = [x for x in plan.hot_lines.advice if x.about == "recomputation"]
    assert 'remat="full"' in advice.text and "less to do" in advice.text


def test_a_line_that_mostly_communicates_is_told() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8192, 8192), (64, 8192))]
    options: Any = {"cluster": "8xh100", "batch_argnums": (1,), "progress": False}
    plan = autopar.plan(step, *shapes, method="data", **options)
    (advice,) = plan.hot_lines.advice
    assert advice.about == "communication" and "gradient all-reduce" in advice.text
    assert plan.explain(advice.source).decisions
    alone = autopar.plan(step, *shapes, **{**options, "cluster": "1xh100"})
    assert not alone.hot_lines.advice


def _whitening(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Its products of weights alone have nothing of the batch."""
    for _ in range(4):
        w = w - w @ w.T @ w
    return w, jnp.sum(x @ w)


def test_what_devices_compute_alike_is_told() -> None:
    """In a warning where it is much, and by line: they may save all but their part of it."""
    arguments = [jax.ShapeDtypeStruct((8192, 8192), "float32") for _ in range(2)]
    options: dict[str, Any] = {"cluster": "1x8 h100", "microbatches": 1, "batch_argnums": 1}
    with pytest.warns(autopar.errors.AutoparWarning, match="compute alike") as caught:
        plan = autopar.plan(_whitening, *arguments, method="data", **options)
    assert "8 devices alike" in " ".join(str(caught[0].message).split())
    (advice,) = [x for x in plan.hot_lines.advice if x.about == "alike"]
    line = line_at(plan, advice.source)
    assert line.function == "_whitening"
    assert advice.bound_seconds == pytest.approx(7 / 8 * line.product_seconds, rel=0.01)
    assert autopar.Plan.from_json(plan.to_json()) == plan
    shared = autopar.plan(_whitening, *arguments, method="shard", **options)
    assert not any(x.about == "alike" for x in shared.hot_lines.advice)
    assert shared.estimates.step_seconds < plan.estimates.step_seconds - 0.8 * advice.bound_seconds


def test_what_is_soon_computed_alike_is_not_told() -> None:
    arguments = [jax.ShapeDtypeStruct((512, 512), "float32") for _ in range(2)]
    plan = autopar.plan(_whitening, *arguments, cluster="1x8 h100", method="data", batch_argnums=1)
    assert not any(x.about == "alike" for x in plan.hot_lines.advice)
