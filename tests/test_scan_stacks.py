"""What scans stack for their backward scans, and what these compute again instead."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn
from scanned_losses import (
    DEPTH,
    LENGTH,
    LOSSES,
    ROWS,
    WIDTH,
    arguments,
    evaluated,
    norm,
    recurrent,
    stacked_bytes,
    step_of,
    transformer,
    two_uses,
)
from sharding.steps import graph_of

import autopar
from autopar.passes import microbatch
from autopar.passes.graph.microbatched import LoopPhase
from autopar.passes.primitives.populate import populate
from autopar.passes.recompute.choice import KeptValues
from autopar.passes.recompute.run_again import recomputed
from autopar.passes.recompute.scan_stacks import with_lean_stacks


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_lean_stacks_are_less_and_give_the_same(loss_fn: Any) -> None:
    graph = graph_of(step_of(loss_fn), *arguments())
    lean = with_lean_stacks(graph)
    least = 0.9 if loss_fn in (transformer, recurrent, two_uses) else 1.0
    assert stacked_bytes(lean.jaxpr) <= least * stacked_bytes(graph.jaxpr)
    leaves = jax.tree.leaves(arguments())
    for found, expected in zip(evaluated(lean, leaves), evaluated(graph, leaves), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_all_choices_give_the_same(loss_fn: Any) -> None:
    values, _ = body_of(loss_fn)
    graph = values.parts.step.graph
    leaves = jax.tree.leaves(arguments())
    expected = evaluated(graph, leaves)
    for choice in values.family[:: max(len(values.family) // 3, 1)]:
        step = recomputed(values, choice)
        for one, other in zip(evaluated(step.graph, leaves), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_what_is_lean_stays() -> None:
    graph = with_lean_stacks(graph_of(step_of(transformer), *arguments()))
    assert with_lean_stacks(graph) is graph


def body_of(loss_fn: Any) -> tuple[KeptValues, list[JaxprEqn]]:
    graph = graph_of(step_of(loss_fn), *arguments())
    step = microbatch.in_one_microbatch(graph, populate(graph.jaxpr))
    rules = populate(step.graph.jaxpr)
    seconds = lambda eqn: sum(v.aval.size for v in eqn.outvars) * 1e-9  # noqa: E731
    values = KeptValues.of(step, rules, seconds)
    return values, list(values.parts.body.eqns)


def test_choices_of_scans_are_nested_down_to_what_iterations_begin_with() -> None:
    values, _ = body_of(transformer)
    family = values.family
    assert len(family) > 2
    sizes = [choice.saved_bytes for choice in family]
    assert sizes == sorted(set(sizes))
    step = recomputed(values, family[-1])
    assert step.loop is not None
    forward, *_ = (eqn for eqn in step.loop.body.eqns if eqn.primitive.name == "scan")
    kept = [atom for atom, outer in LoopPhase(forward).stacks if outer.aval.size > DEPTH]
    assert [atom.aval.shape for atom in kept] == [(ROWS, LENGTH, WIDTH)]
    carries = [item.carry for item in LoopPhase(forward).accumulators]
    assert kept[0] in carries


ASKED: dict[str, Any] = {"batch_argnums": (1,), "donate_argnums": ()}


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 1, "remat": "full"},
        {"microbatches": 2, "remat": "full"},
        {"microbatches": 2, "stages": 2, "schedule": "1f1b"},
        {"microbatches": 4, "stages": 2, "schedule": "zb_h1"},
    ],
)
def test_steps_with_scans_that_compute_again(options: dict[str, Any]) -> None:
    step = autopar.compile(step_of(transformer), *arguments(), **ASKED, **options)
    found = step.gather(step(*arguments()))
    expected = jax.jit(step_of(transformer))(*arguments())
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def long_step(checkpoint: bool, /) -> tuple[Any, Any, Any]:
    """Shapes of a scanned model whose rows need most of the memory, in bfloat16."""
    depth, width, length, rows = 8, 512, 512, 64

    def layer(h: Any, w: Any) -> Any:
        y = norm(h.astype(jnp.float32), w["scale"]).astype(jnp.bfloat16)
        y = jax.nn.silu(y @ w["up"].astype(jnp.bfloat16)) @ w["down"].astype(jnp.bfloat16)
        return h + y, None

    def loss_fn(w: Any, x: Any) -> Any:
        h, _ = jax.lax.scan(jax.checkpoint(layer) if checkpoint else layer, x, w)
        return jnp.mean(jnp.square(h.astype(jnp.float32)))

    def train_step(w: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss

    shape = lambda *sizes: jax.ShapeDtypeStruct((depth, *sizes), jnp.float32)  # noqa: E731
    w = {"scale": shape(width), "up": shape(width, 4 * width), "down": shape(4 * width, width)}
    return train_step, w, jax.ShapeDtypeStruct((rows, length, width), jnp.bfloat16)


@pytest.mark.parametrize(("share", "most"), [(0.8, 1.01), (0.55, 1.01), (0.45, 1.1)])
def test_no_annotation_is_needed(share: float, most: float) -> None:
    """The last one needs other shards as well."""
    cluster = autopar.Cluster.preset("dgx-h100")
    asked: dict[str, Any] = {"cluster": cluster, "stages": 1, "batch_argnums": (1,)}
    whole = autopar.plan(*long_step(False), **asked)
    limit = int(share * whole.estimates.peak_bytes_per_device)
    asked["memory_limit"] = limit
    plans = [
        autopar.plan(*long_step(checkpoint), **{**asked, "remat": remat})
        for checkpoint, remat in [(False, "auto"), (True, "auto"), (False, "none")]
    ]
    found, by_hand, kept = (plan.estimates.step_seconds for plan in plans)
    assert found <= most * by_hand and found <= 1.001 * kept
    assert plans[0].recomputation is not None
    assert plans[0].estimates.peak_bytes_per_device <= limit
