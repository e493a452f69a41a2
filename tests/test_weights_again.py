"""Weights that the backward pass gathers again: the same numbers, and less memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_steps import perceptron as step

import autopar
from autopar.base.options import Options
from autopar.base.plan_records import Recomputation
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import variables
from autopar.passes.planner import layout_search, stage_shardings
from autopar.passes.planner.compiler import compile_graph
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.recomputed_steps import (
    RecomputedSteps,
    gathering_again,
    recomputed_step,
)
from autopar.passes.recompute.read_again import largest_little, with_weights_read_again
from autopar.passes.trace.trace import trace

CLUSTER = autopar.Cluster.preset("h100", devices_per_node=8)
LAYERS, WIDTH, ROWS = 6, 8, 16


def shapes(width: int, rows: int) -> tuple[Any, Any]:
    state = {f"w{i}": jax.ShapeDtypeStruct((width, width), jnp.float32) for i in range(LAYERS)}
    return state, jax.ShapeDtypeStruct((rows, width), jnp.float32)


@pytest.mark.parametrize("count", [1, 4])
def test_the_numbers_are_the_same(count: int) -> None:
    graph = trace(step, shapes(WIDTH, ROWS)).graph
    search = LayoutSearch.of(graph, Options(), CLUSTER, lambda message: None)
    again = gathering_again(search.split(count, True))
    assert again.recomputation is not None
    assert again.recomputation.weights == LAYERS - 1  # nobody needs the first rows' gradient
    assert again.recomputation.weight_bytes == (LAYERS - 1) * 4 * WIDTH * WIDTH
    random = np.random.default_rng(0)
    values = [random.normal(size=v.aval.shape).astype(np.float32) for v in graph.jaxpr.invars]
    plain = jax.core.eval_jaxpr(graph.jaxpr, (), *values)
    found = jax.core.eval_jaxpr(again.graph.jaxpr, (), *values)
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_each_weight_waits_for_the_gradient_that_it_meets() -> None:
    graph = trace(step, shapes(WIDTH, ROWS)).graph
    search = LayoutSearch.of(graph, Options(), CLUSTER, lambda message: None)
    made, weights = with_weights_read_again(search.split(2, True).step)
    assert made.loop is not None
    barriers = [eqn for eqn in made.loop.body.eqns if is_barrier(eqn)]
    passed = [[var in weights for var in eqn.invars] for eqn in barriers]
    assert passed == [[True, False]] * (2 * len(weights))  # an activation, or a gradient
    others = (eqn for eqn in made.loop.body.eqns if not is_barrier(eqn))
    read = {v for eqn in others for v in variables(eqn.invars)}
    assert read.isdisjoint(weights)


def test_with_values_that_are_computed_again_it_is_recorded() -> None:
    graph = trace(step, shapes(WIDTH, ROWS)).graph
    search = LayoutSearch.of(graph, Options(), CLUSTER, lambda message: None)
    split = search.split(2, True)
    steps = replace(RecomputedSteps.of(split, CLUSTER), weights=True)
    made = steps[len(steps) - 1]
    record = made.recomputation
    assert record is not None and record.operations and record.weights
    plain = Recomputation.from_dict(record.to_dict())
    again = recomputed_step(split, CLUSTER, plain)
    assert again.recomputation == record
    assert len(again.graph.jaxpr.eqns) == len(made.graph.jaxpr.eqns)
    with pytest.raises(autopar.errors.PlanMismatchError, match="other values again"):
        recomputed_step(split, CLUSTER, replace(plain, saved_bytes=plain.saved_bytes + 1))
    older = replace(record, weights=0, weight_bytes=0)  # as plans were written without them
    assert not {"weights", "weight_bytes"} & older.to_dict().keys()
    assert Recomputation.from_dict(older.to_dict()) == older


@pytest.fixture(scope="module")
def plans() -> list[autopar.Plan]:
    """With all memory, and with less than all gathered weights need."""
    arguments = shapes(4096, 8192)
    options: dict[str, Any] = {"method": "zero3", "microbatches": 1, "stages": 1}
    free = autopar.plan(step, *arguments, cluster=CLUSTER, **options)
    limit = int(0.8 * free.estimates.peak_bytes_per_device)
    return [free, autopar.plan(step, *arguments, cluster=CLUSTER, memory_limit=limit, **options)]


def test_where_memory_is_short_weights_are_gathered_again(plans: list[autopar.Plan]) -> None:
    free, tight = plans
    assert free.recomputation is None
    assert tight.recomputation is not None and tight.recomputation.weights == LAYERS - 1
    assert not tight.recomputation.operations
    assert "5 weights (320 MiB) gathered again" in str(tight)
    assert tight.estimates.peak_bytes_per_device <= 0.8 * free.estimates.peak_bytes_per_device
    gathers = [
        sum(c.times for c in p.stages[0].collectives if c.kind == "all-gather") for p in plans
    ]
    assert gathers == [LAYERS, 2 * LAYERS - 1]


def test_such_a_plan_is_followed(plans: list[autopar.Plan]) -> None:
    _, tight = plans
    graph = trace(step, shapes(4096, 8192), microbatches=1, method="zero3").graph
    options = Options.from_kwargs(**tight.options)
    loaded = autopar.Plan.from_json(tight.to_json())
    followed = compile_graph(graph, options, CLUSTER, loaded)
    assert followed.plan.recomputation == tight.recomputation
    assert sum(map(is_barrier, followed.graph.jaxpr.eqns)) == 2 * (LAYERS - 1)


@pytest.mark.parametrize("rows", [8192, 32768])
def test_what_all_computed_again_fits_is_not_refused(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By weights that are read again, whether the quickest plan gathers them or has them whole."""
    monkeypatch.setattr(layout_search, "LONG_PROGRAM", 10)
    monkeypatch.setattr(stage_shardings, "LARGE_PROBLEM", 10)
    asked: dict[str, Any] = {"cluster": CLUSTER, "microbatches": 1, "stages": 1}

    def planned(remat: str, limit: int | None = None, method: str = "auto") -> autopar.Plan:
        options = {**asked, "remat": remat, "memory_limit": limit, "method": method}
        return autopar.plan(step, *shapes(4096, rows), **options)

    limit = int(0.8 * planned("full").estimates.peak_bytes_per_device)
    full, auto = planned("full", limit), planned("auto", limit)
    for plan in (full, auto):
        assert plan.recomputation is not None and plan.recomputation.weights == LAYERS - 1
        assert plan.estimates.peak_bytes_per_device <= limit
    assert auto.estimates.step_seconds <= full.estimates.step_seconds
    with pytest.raises(autopar.AutoparError, match="No plan keeps within"):
        planned("none", limit)
    whole = planned("full", method="data").recomputation  # nothing is gathered
    assert whole is not None and not whole.weights


def test_layers_are_priced_with_weights_gathered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One loop reads each weight twice: gathered once, all of them are there at its middle.

    What the layers of a long program need of one mesh counted that, and what fits was refused.
    """
    monkeypatch.setattr(layout_search, "LONG_PROGRAM", 10)
    monkeypatch.setattr(stage_shardings, "LARGE_PROBLEM", 10)
    state = {f"w{i:02}": jax.ShapeDtypeStruct((4096, 4096), jnp.float32) for i in range(12)}
    rows = jax.ShapeDtypeStruct((2048, 4096), jnp.float32)
    options: dict[str, Any] = {"cluster": CLUSTER, "microbatches": 2, "stages": 1}
    free = autopar.plan(step, state, rows, **options)
    limit = int(0.9 * free.estimates.peak_bytes_per_device)
    tight = autopar.plan(step, state, rows, memory_limit=limit, **options)
    assert tight.recomputation is not None and tight.recomputation.weights == len(state) - 1
    assert not tight.recomputation.operations
    assert tight.estimates.peak_bytes_per_device <= limit
    assert str(tight.recomputation).endswith("gathered again, as prices count it anyway")


def test_the_smallest_weights_stay_gathered_as_far_as_they_are_little_together() -> None:
    """Many small ones are much: a hundredth of all bytes at most, and those of a size together."""
    assert largest_little([1000, 5, 5]) == 5
    assert largest_little([1000, *[5] * 3]) == 0
    assert largest_little([1000, 1000, *[2] * 5, *[5] * 3]) == 2
    assert largest_little([7]) == largest_little([]) == 0
