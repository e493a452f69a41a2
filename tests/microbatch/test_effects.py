"""A callback happens exactly once a step, on the value that it has in the plain step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from microbatch.helpers import analyzed, run

from autopar.base.errors import InexactMicrobatchError
from autopar.passes.microbatch import split


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_callbacks_run_once_on_whole_values() -> None:
    seen: list[tuple[str, Any]] = []

    def record(name: str) -> Any:
        return lambda value: seen.append((name, np.asarray(value)))

    def step(w: Any, x: Any) -> Any:
        jax.debug.callback(record("parameter"), w.sum())

        def loss_fn(w: Any) -> Any:
            losses = jnp.sum(jnp.tanh(x @ w) ** 2, axis=1)
            jax.debug.callback(record("rows"), losses)
            return losses.mean()

        loss, gradient = jax.value_and_grad(loss_fn)(w)
        jax.debug.callback(record("sum"), loss)
        jax.debug.callback(record("batch"), x[:, 0])
        jax.debug.callback(record("late"), jnp.abs(gradient).max())
        return w - gradient, loss

    args = (normal(0, 16, 16), normal(1, 16, 16))
    graph, analysis = analyzed(step, args, 4)
    run(graph, args)
    jax.effects_barrier()
    plain = sorted(seen, key=lambda item: item[0])
    seen.clear()
    run(split(graph, analysis).graph, args)
    jax.effects_barrier()
    found = sorted(seen, key=lambda item: item[0])
    assert [name for name, _ in plain] == ["batch", "late", "parameter", "rows", "sum"]
    assert [name for name, _ in found] == [name for name, _ in plain]
    for (_, one), (_, other) in zip(plain, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::autopar.errors.UnknownPrimitiveWarning")
def test_results_of_a_callback() -> None:
    calls: list[int] = []

    def learning_rate(n: Any) -> Any:
        calls.append(1)
        return np.float32(0.5) * np.asarray(n, np.float32)

    def step(state: Any, x: Any) -> Any:
        rate = io_callback(learning_rate, jax.ShapeDtypeStruct((), np.float32), state["n"])
        loss = lambda w: jnp.mean(jnp.tanh(x @ w)) * rate  # noqa: E731
        return {"w": state["w"] - jax.grad(loss)(state["w"]), "n": state["n"] + 1}

    args = ({"w": normal(0, 4, 4), "n": np.int32(3)}, normal(1, 8, 4))
    graph, analysis = analyzed(step, args, 4)
    expected = run(graph, args)
    calls.clear()
    for one, other in zip(expected, run(split(graph, analysis).graph, args), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert len(calls) == 1


def test_an_effect_inside_a_loop_over_rows_is_refused_or_kept() -> None:
    """Printing inside a scan over layers would mean running all of it on the whole batch."""

    def step(w: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            x = jnp.tanh(x @ w)
            jax.debug.print("mean {}", x.mean())
            return x, None

        return jax.grad(lambda w: jnp.mean(jax.lax.scan(layer, x, w)[0]))(w)

    graph, analysis = analyzed(step, (normal(0, 2, 4, 4), normal(1, 8, 4)), 4)
    with pytest.raises(InexactMicrobatchError, match="effect") as error:
        split(graph, analysis)
    assert __file__ in str(error.value.where)
