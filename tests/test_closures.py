"""Arrays that a step closes over: as they were when it was traced, whatever becomes of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

WAYS: dict[str, dict[str, Any]] = {
    "data": {"method": "data"},
    "microbatches": {"microbatches": 2},
    "stages": {"stages": 2, "microbatches": 2},
}


def aligned(size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Ones in memory that XLA on CPUs may take over without a copy."""
    memory = np.ones(size + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    return memory[start : start + size]


def weights() -> dict[str, Any]:
    return {"a": 0.1 * jnp.ones((16, 32)), "b": 0.1 * jnp.ones((32, 8))}


def step_towards(start: Any) -> Callable[[Any, Any], Any]:
    """A step whose loss has the distance from `start`."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            fit = jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)
            return fit + jnp.sum((w["a"] - start) ** 2)

        value, gradients = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), value

    return step


def losses(step: Callable[..., Any], w: Any, between: Callable[[], None]) -> list[float]:
    x, found = np.ones((32, 16), np.float32), []
    for _ in range(3):
        w, loss = step(w, x)
        found.append(float(loss))
        between()
    return found


@pytest.mark.parametrize("way", list(WAYS))
def test_numpy_array_changes_after_the_trace(way: str) -> None:
    start = aligned(16 * 32).reshape(16, 32)
    plain = jax.jit(step_towards(start.copy()))
    expected = losses(plain, weights(), lambda: None)
    step = autopar.parallelize(step_towards(start), **WAYS[way])

    def change() -> None:
        start[:] = 100.0

    np.testing.assert_allclose(losses(step, weights(), change), expected, rtol=1e-5)


@pytest.mark.parametrize("way", list(WAYS))
def test_leaf_of_the_donated_state(way: str) -> None:
    w = weights()
    expected = losses(jax.jit(step_towards(w["a"] + 0)), weights(), lambda: None)
    step = autopar.parallelize(step_towards(w["a"]), **WAYS[way])
    np.testing.assert_allclose(losses(step, w, lambda: None), expected, rtol=1e-5)


@pytest.mark.parametrize("way", list(WAYS))
def test_array_that_others_delete(way: str) -> None:
    start = weights()["a"]
    expected = losses(jax.jit(step_towards(start + 0)), weights(), lambda: None)
    step = autopar.parallelize(step_towards(start), **WAYS[way])

    def delete() -> None:
        if not start.is_deleted():
            start.delete()

    np.testing.assert_allclose(losses(step, weights(), delete), expected, rtol=1e-5)


def test_typed_key() -> None:
    key = jax.random.key(3)

    def step(w: Any, x: Any) -> Any:
        return w + x.mean(0), jax.random.normal(key, (4,))

    run = autopar.parallelize(step, donate_argnums=())
    w, x = jnp.zeros(4), np.ones((8, 4), np.float32)
    for found, expected in zip(run(w, x), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_array_of_another_device_beside_a_mesh_in_the_context() -> None:
    mask = jax.device_put(jnp.arange(16.0), jax.devices()[3])

    def step(w: Any, x: Any) -> Any:
        return w + x.mean(0) * mask, x.sum()

    w, x = jnp.zeros(16), np.ones((32, 16), np.float32)
    with jax.set_mesh(jax.make_mesh((4,), ("x",))):
        found = autopar.parallelize(step, donate_argnums=())(w, x)
    np.testing.assert_allclose(found[0], np.arange(16.0))


@pytest.mark.parametrize("way", list(WAYS))
def test_followers(way: str) -> None:
    """So has a function that follows a step's plan: each signature is traced once."""
    mask, x = aligned(16 * 32).reshape(16, 32), np.ones((32, 16), np.float32)
    step = autopar.parallelize(step_towards(np.zeros((16, 32), np.float32)), **WAYS[way])
    w, _ = step(weights(), x)
    read = autopar.follow(step, lambda w: jnp.sum(w["a"] * mask))
    before = float(read(w))
    mask[:] = 100.0
    assert float(read(w)) == pytest.approx(before)
