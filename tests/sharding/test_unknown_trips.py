"""Loops that run as long as something is true: one trip counts; devices share what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.errors import AutoparWarning
from autopar.base.options import Options
from autopar.passes.planner import layout_search
from autopar.passes.planner.compiler import compile_graph
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding.batch_dims import batch_dims
from autopar.passes.trace.trace import trace
from sharding.steps import graph_of, shaped

ROWS, WIDTH = 1 << 18, 2048
Repeat = Callable[[Callable[[Any], Any], Any], Any]


def until_small(body: Callable[[Any], Any], x: Any) -> Any:
    def goes_on(carry: Any) -> Any:
        x, count = carry
        return (count < 20) & (jnp.max(jnp.abs(x)) > 1e-3)

    return jax.lax.while_loop(goes_on, lambda carry: (body(carry[0]), carry[1] + 1), (x, 0))[0]


def once(body: Callable[[Any], Any], x: Any) -> Any:
    return jax.lax.scan(lambda x, _: (body(x), None), x, None, length=1)[0]


def step_of(repeat: Repeat) -> Any:
    """A loss of what a loop makes of the batch."""

    def step(weights: Any, x: Any) -> Any:
        made = repeat(lambda x: jnp.tanh(x @ weights["fixed"]), x)
        made = jax.lax.stop_gradient(made)
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((made @ w) ** 2))(weights["head"])
        return {**weights, "head": weights["head"] - 0.1 * gradient}, loss

    return step


def plan_of(repeat: Repeat, **options: Any) -> autopar.Plan:
    square = shaped(WIDTH, WIDTH, dtype=jnp.bfloat16)
    x = shaped(ROWS, WIDTH, dtype=jnp.bfloat16)
    weights = {"fixed": square, "head": square}
    return autopar.plan(step_of(repeat), weights, x, microbatches=1, **options)


def test_one_trip_is_counted_and_the_user_is_told() -> None:
    with pytest.warns(
        AutoparWarning, match=r"(?s)One trip is counted .*test_unknown_trips\.py:\d+"
    ):
        found = plan_of(until_small, cluster="1x1 h100")
    expected = plan_of(once, cluster="1x1 h100").estimates.step_seconds
    # Its condition reads what a trip makes.
    assert expected < found.estimates.step_seconds < 1.4 * expected
    assert any("while" in line.operations for line in found.hot_lines.lines)


@pytest.mark.filterwarnings("ignore:One trip is counted:autopar.errors.AutoparWarning")
@pytest.mark.parametrize("method", ["auto", "data"])
def test_devices_share_the_loop_and_what_follows_it(method: str) -> None:
    graph = graph_of(
        step_of(until_small),
        {"fixed": shaped(8, 8), "head": shaped(8, 8)},
        shaped(64, 8),
        batch_argnums=(1,),
    )
    dims = batch_dims(graph, populate(graph.jaxpr))
    (loop,) = (eqn for eqn in graph.jaxpr.eqns if eqn.primitive.name == "while")
    assert [dims.get(var) or frozenset() for var in loop.outvars] == [frozenset({0}), frozenset()]
    one, eight = (plan_of(until_small, cluster=f"1x{n} h100", method=method) for n in (1, 8))
    assert eight.estimates.compute_seconds < 0.15 * one.estimates.compute_seconds


@pytest.mark.filterwarnings("ignore:One trip is counted:autopar.errors.AutoparWarning")
@pytest.mark.parametrize("equations", [1, 4000])
def test_stages_around_it_are_priced(equations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are those of a microbatch, on several nodes."""
    monkeypatch.setattr(layout_search, "LONG_PROGRAM", equations)

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for w in weights:
                y = y + jnp.tanh(y @ w)
            fixed = jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] / 2, c[1] + 1), (y, 0))
            return jnp.mean((y + jax.lax.stop_gradient(fixed[0])) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    traced = trace(step, ([shaped(1024, 1024)] * 4, shaped(4096, 1024)), batch_argnums=(1,))
    told: list[str] = []
    nodes = autopar.Cluster.preset("dgx-v100", nodes=2)
    found = compile_graph(traced.graph, Options.from_kwargs(), nodes, None, told.append)
    assert any(line.startswith("costs of") for line in told)
    assert found.plan.estimates.step_seconds > 0


@pytest.mark.filterwarnings("ignore:One trip is counted:autopar.errors.AutoparWarning")
@pytest.mark.parametrize("method", ["auto", "data", "zero3"])
def test_numbers_are_those_of_one_device(method: str) -> None:
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=(32, 32)) / 6 for name in ("fixed", "head")}
    weights = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), weights)
    x = jnp.asarray(random.normal(size=(64, 32)), jnp.float32)
    step = step_of(until_small)
    run = autopar.parallelize(step, method=method, donate_argnums=())
    for one, other in zip(
        jax.tree.leaves(run.gather(run(weights, x))),
        jax.tree.leaves(jax.jit(step)(weights, x)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"method": "data"}, {"logical_mesh": (4, 2)}])
def test_a_callback_in_its_body_runs_once_a_trip(options: Any) -> None:
    seen: list[tuple[float, ...]] = []

    def step(weights: Any, x: Any) -> Any:
        def body(carry: Any) -> Any:
            x, trip = carry
            new = jnp.tanh(x @ weights)
            jax.debug.callback(lambda *told: seen.append(tuple(map(float, told))), trip, new.max())
            return new, trip + 1

        goes_on = lambda carry: (carry[1] < 9) & (jnp.max(carry[0]) > 0.5)  # noqa: E731
        found, trips = jax.lax.stop_gradient(jax.lax.while_loop(goes_on, body, (x, 0)))
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((found @ w) ** 2))(weights)
        return weights - 0.1 * gradient, (loss, trips)

    random = np.random.default_rng(0)
    args = [jnp.asarray(random.normal(size=size) / 5, jnp.float32) for size in ((8, 8), (32, 8))]
    told = []
    for run in (jax.jit(step), autopar.parallelize(step, donate_argnums=(), **options)):
        trips = int(run(*args)[1][1])
        jax.effects_barrier()
        assert [trip for trip, _ in sorted(seen)] == list(range(trips)) and trips
        told.append(sorted(seen))
        seen.clear()
    np.testing.assert_allclose(told[0], told[1], rtol=1e-5)


def test_a_callback_in_a_loop_of_single_numbers_runs_once_a_trip() -> None:
    seen: list[int] = []

    def step(weights: Any, x: Any) -> Any:
        def body(carry: Any) -> Any:
            jax.debug.callback(lambda trip: seen.append(int(trip)), carry[1])
            return carry[0] / 2, carry[1] + 1

        scale, trips = jax.lax.while_loop(lambda c: c[0] > 0.1, body, (jnp.mean(x**2), 0))
        return weights - scale * (x.T @ (x @ weights)), trips

    args = jnp.eye(8), jnp.ones((32, 8))
    run = autopar.parallelize(step, donate_argnums=(), method="data")
    weights, trips = run(*args)
    jax.effects_barrier()
    assert sorted(seen) == list(range(int(trips))) and seen
    np.testing.assert_allclose(run.gather(weights), jax.jit(step)(*args)[0], rtol=1e-5)
