"""States with Python numbers, whose weak types change from call to call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.errors import AutoparWarning
from autopar.passes.planner.compiler import compile_graph

WAYS = [{"method": "data"}, {"microbatches": 2}, {"stages": 2, "microbatches": 2}]


def chained(state: Any, x: Any) -> Any:
    """`total` is strong after the first step, `product` after the second."""
    params, rate, total, product = state

    def loss(params: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
    return (params, rate * 0.9, total + value, product + total), value


def start() -> tuple[Any, Any]:
    numbers = np.random.default_rng(0)
    shapes = {"a": (16, 32), "b": (32, 8)}
    params = {n: numbers.normal(size=shape).astype("f") / 4 for n, shape in shapes.items()}
    return (params, 0.1, 0.0, 0.0), numbers.normal(size=(16, 16)).astype("f")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return compile_graph(*args, **kwargs)

    monkeypatch.setattr("autopar.passes.planner.compiler.compile_graph", counting)
    return calls


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_other_weak_types_follow_the_plan(options: dict[str, Any], planned: list[Any]) -> None:
    ours, plain = autopar.parallelize(chained, **options), jax.jit(chained)
    (state, x), (other, _) = start(), start()
    with pytest.warns(AutoparWarning, match="follows its plan with other weak types: state"):
        for _ in range(4):
            state, value = ours(state, x)
            other, expected = plain(other, x)
            np.testing.assert_allclose(value, expected, rtol=1e-5)
            for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
                assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
                np.testing.assert_allclose(ours.gather(a), b, rtol=1e-5, atol=1e-6)
    assert len(planned) == 1
    assert ours.plan.method == options.get("method", "auto")
    assert ours.plan.num_microbatches == options.get("microbatches", 1)
    assert repr(ours).endswith("3 plans>")


def test_a_step_without_a_batch_follows_too(planned: list[Any]) -> None:
    def step(state: Any) -> Any:
        w, total = state
        return w * 0.5, total + w.sum()

    ours = autopar.parallelize(step, donate_argnums=())
    w = np.arange(32, dtype="f")
    with pytest.warns(AutoparWarning, match="weak types"):
        state = ours(ours((w, 0.0)))
    np.testing.assert_allclose(state[1], w.sum() * 1.5)
    assert len(planned) == 1


def test_types_that_change_the_results_are_planned(planned: list[Any]) -> None:
    """A strong float32 makes a bfloat16 state float32."""

    def step(state: Any, rate: Any) -> Any:
        return state * rate, (state * rate).sum()

    ours = autopar.parallelize(step, donate_argnums=())
    state = jnp.arange(32, dtype=jnp.bfloat16)
    assert ours(state, 0.3)[0].dtype == jnp.bfloat16
    with pytest.warns(AutoparWarning, match="planned again"):
        found = ours(state, np.float32(0.3))
    assert found[0].dtype == jnp.float32
    np.testing.assert_array_equal(found[0], jax.jit(step)(state, np.float32(0.3))[0])
    assert len(planned) == 2
