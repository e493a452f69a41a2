"""Settings and contexts of JAX under which a step is called: `jax.jit` traces anew, so do we."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.errors import AutoparWarning, DeviceError


def step(w: Any, x: Any) -> Any:
    wide = jnp.sum(x.astype(float))
    return w + x.mean(0), jnp.arange(3), jax.random.uniform(jax.random.key(0), (3,)), wide


def arguments() -> tuple[Any, Any]:
    return jnp.ones(16), np.ones((32, 16), np.float32)


def assert_same(found: Any, expected: Any) -> None:
    for one, two in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_allclose(one, two, rtol=1e-5)


def test_results_are_those_of_the_setting() -> None:
    w, x = arguments()
    run, plain = autopar.parallelize(step, donate_argnums=()), jax.jit(step)
    assert_same(run(w, x), plain(w, x))
    with jax.enable_x64(True), pytest.warns(AutoparWarning, match="settings of JAX"):
        assert_same(run(w, x), plain(w, x))
    with jax.threefry_partitionable(False), pytest.warns(AutoparWarning, match="follows its plan"):
        assert_same(run(w, x), plain(w, x))
    with warnings.catch_warnings():  # each is known by now
        warnings.simplefilter("error")
        assert_same(run(w, x), plain(w, x))
        with jax.enable_x64(True):
            assert_same(run(w, x), plain(w, x))
        with jax.threefry_partitionable(False):
            assert_same(run(w, x), plain(w, x))


def test_precision_has_a_program_of_its_own_and_the_same_plan() -> None:
    def product(w: Any, x: Any) -> Any:
        return w @ x.T, x.sum()

    run = autopar.parallelize(product, donate_argnums=())
    w, x = jnp.ones((4, 16)), np.ones((32, 16), np.float32)
    run(w, x)
    first = run.executable
    with jax.default_matmul_precision("highest"), pytest.warns(AutoparWarning, match="follows"):
        run(w, x)
    assert run.executable is not first
    assert "HIGHEST" in run.executable.traced.graph.jaxpr.pretty_print()
    assert run.plan.inputs == first.plan.inputs
    run(w, x)
    assert run.executable is first


def train(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), value


def weights() -> Any:
    return {"a": 0.1 * jnp.ones((16, 32)), "b": 0.1 * jnp.ones((32, 8))}


@pytest.mark.parametrize("is_compiled", [False, True], ids=["first", "later"])
def test_without_jit_it_is_the_plain_function(is_compiled: bool) -> None:
    """Operation by operation, as under `jax.jit`: prints show numbers, and nothing is donated."""
    seen: list[Any] = []

    def noted(w: Any, x: Any) -> Any:
        seen.append(type(x))
        return train(w, x)

    x = np.ones((32, 16), np.float32)
    run = autopar.parallelize(noted, microbatches=2)
    if is_compiled:
        run(weights(), x)
    w = weights()
    with jax.disable_jit():
        found = run(w, x)
        expected = train(w, x)
    assert seen[-1] is np.ndarray
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(w))
    assert_same(found, expected)
    assert_same(run(w, x), expected)


def test_compiled_ahead_without_jit() -> None:
    x = np.ones((32, 16), np.float32)
    with jax.disable_jit():
        run = autopar.compile(train, weights(), x, microbatches=2)
        assert autopar.plan(train, weights(), x, microbatches=2) == run.plan
        found = run(weights(), x)
    assert_same(found, run(weights(), x))


def test_state_of_stages_without_jit_is_refused() -> None:
    x = np.ones((32, 16), np.float32)
    run = autopar.parallelize(train, stages=2, microbatches=2)
    w, _ = run(weights(), x)
    with jax.disable_jit():
        with pytest.raises(DeviceError, match="gather"):
            run(w, x)
        run(run.gather(w), x)


def test_followers_and_initial_states() -> None:
    x = np.ones((32, 16), np.float32)
    run = autopar.parallelize(train)
    with jax.disable_jit():
        made = autopar.compile(train, weights(), x).initialize(weights)
    w, _ = run(made, x)
    read = autopar.follow(run, lambda w: w["a"].astype(float))
    assert read(w).dtype == jnp.float32
    with jax.enable_x64(True):
        assert read(w).dtype == jnp.float64
    with jax.disable_jit():
        assert read(w).dtype == jnp.float32


@pytest.mark.parametrize(
    "options", [{}, {"microbatches": 2}, {"stages": 2, "microbatches": 2}], ids=str
)
def test_what_is_traced_is_not_computed_meanwhile(options: dict[str, Any]) -> None:
    """Under `jax.ensure_compile_time_eval`, which folds what depends on no argument."""
    x = np.ones((32, 16), np.float32)
    run = autopar.parallelize(train, donate_argnums=(), **options)
    expected = run(weights(), x)
    with jax.ensure_compile_time_eval(), pytest.warns(AutoparWarning, match="settings of JAX"):
        later = run(weights(), x)
    with jax.ensure_compile_time_eval():
        step = autopar.compile(train, weights(), x, donate_argnums=(), **options)
        first = step(step.initialize(weights), x)
        total = autopar.follow(step, lambda w: w["a"].sum() + jnp.arange(3))(later[0])
    assert_same(run.gather(later), step.gather(expected))
    assert_same(step.gather(first), run.gather(later))
    assert_same(total, run.gather(later)[0]["a"].sum() + jnp.arange(3))
