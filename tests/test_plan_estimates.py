"""What a plan's header says of a step adds up, also of steps that hardly do anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar

CLUSTER = autopar.Cluster.preset("h100")


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def _descend(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient, value


def _count(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return w + x.sum(0), x.mean()


def _several_scalars(w: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    new, value = _descend(w, x)
    norm = jnp.sqrt(jnp.sum((new - w) ** 2))
    return new / jnp.maximum(norm, 1.0), (value, norm, jnp.max(x))


def _two_layers(w: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(w: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"])

    value, gradients = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), value


def _check(plan: autopar.Plan) -> None:
    estimates = plan.estimates
    parts = estimates.compute_seconds, estimates.communication_seconds, estimates.waiting_seconds
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(estimates.step_seconds)
    assert plan.simulate().step_seconds == pytest.approx(estimates.step_seconds)
    for stage in plan.stages:
        moved = sum(item.seconds * item.times for item in stage.collectives)
        assert moved <= estimates.step_seconds * (1 + 1e-9)
    if not plan.is_pipeline:
        assert estimates.communication_seconds == pytest.approx(moved)


@pytest.mark.parametrize("method", ["auto", "data", "zero3"])
@pytest.mark.parametrize(
    ("step", "state"),
    [(_descend, _shape(4, 2)), (_count, _shape(4)), (_several_scalars, _shape(4, 2))],
)
def test_a_tiny_step_is_as_long_as_its_parts(
    step: Callable[..., Any], state: Any, method: str
) -> None:
    _check(autopar.plan(step, state, _shape(64, 4), cluster=CLUSTER, method=method))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_tiny_pipeline_is_as_long_as_its_parts(microbatches: int) -> None:
    state = {"a": _shape(4, 8), "b": _shape(8, 2)}
    options: dict[str, Any] = {"stages": 2, "microbatches": microbatches, "method": "data"}
    plan = autopar.plan(_two_layers, state, _shape(64, 4), cluster=CLUSTER, **options)
    _check(plan)
    assert "waiting" in str(plan)


def test_microbatches_of_a_tiny_step_are_counted() -> None:
    plan = autopar.plan(
        _descend, _shape(4, 2), _shape(64, 4), cluster=CLUSTER, method="data", microbatches=4
    )
    _check(plan)
