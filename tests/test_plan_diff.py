"""`plan.diff` of deep models: few lines, causes first."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.base.plan_records import PlanRecord
from autopar.report.plan_diff import MOST_LINES

CLUSTER = autopar.Cluster.preset("h100", devices_per_node=4)
LAYERS = 24


@functools.cache
def _plan(**options: Any) -> autopar.Plan:
    def step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        def loss(params: list[jax.Array]) -> jax.Array:
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return jnp.mean(y**2)

        value, gradients = jax.value_and_grad(loss)(state["params"])
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
        return {"params": params, "moments": moments}, value

    sizes = [64 + 64 * (i % 5 == 4) for i in range(LAYERS + 1)]
    weights = [jax.ShapeDtypeStruct(s, jnp.float32) for s in itertools.pairwise(sizes)]
    state = {"params": weights, "moments": weights}
    batch = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    return autopar.plan(step, state, batch, **{"cluster": CLUSTER, **options})


def _lines(plan: PlanRecord, other: PlanRecord) -> str:
    found = plan.diff(other)  # type: ignore[attr-defined]
    assert 0 < len(found) <= MOST_LINES
    assert len(found.details) >= len(found)
    return str(found)


def test_equal_plans_have_no_differences() -> None:
    plan = _plan(method="data")
    assert plan.diff(plan) == ()
    assert plan.diff(plan).details == ()


def test_leaves_alike_share_a_line() -> None:
    text = _lines(_plan(method="data"), _plan(method="zero3"))
    assert text.splitlines()[0] == 'options.method: "data" -> "zero3"'
    assert "step: " in text
    assert "memory: " in text
    assert "state/{moments,params}/" in text
    assert "leaves): P(None, None) -> P('x', None), 16 KiB -> 4 KiB a device" in text
    assert "cluster" not in text
    assert "gradient reduce-scatter along x: 0 s ->" in text


def test_stages_and_clusters_are_causes() -> None:
    two = _plan(method="data", stages=2, microbatches=4)
    text = _lines(_plan(method="data", microbatches=4), two)
    assert "stages: 1 -> 2, " in text
    assert "mesh: x=4 -> 2 of x=2" in text
    assert "are on other stages" in text
    larger = dataclasses.replace(CLUSTER, num_nodes=2)
    text = _lines(_plan(method="data"), _plan(method="data", cluster=larger))
    assert "cluster: 1 node of 4 x H100 SXM5 80GB -> 2 nodes of 4 x H100 SXM5 80GB" in text
    slower = dataclasses.replace(CLUSTER, intra_node=autopar.base.cluster.Link(1e9, 1e-6))
    text = _lines(_plan(method="data"), _plan(method="data", cluster=slower))
    assert "cluster.intra_node.bandwidth: " in text


def test_what_only_estimates_tell_is_named() -> None:
    plan = _plan(method="data")
    text = _lines(plan, dataclasses.replace(plan, candidates=()))
    assert text.startswith("only in candidates")


def test_the_other_plan_may_be_in_a_file(tmp_path: Path) -> None:
    plan, other = _plan(method="data"), _plan(method="zero3")
    other.save(tmp_path / "other.json")
    assert plan.diff(tmp_path / "other.json") == plan.diff(other)
    for wrong in (None, {"method": "data"}):
        with pytest.raises(autopar.AutoparError, match="diff takes a plan"):
            plan.diff(wrong)  # type: ignore[arg-type]
