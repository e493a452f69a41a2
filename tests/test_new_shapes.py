"""Steps that are called with other shapes: smaller batches follow a known plan."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import AutoparError, AutoparWarning
from autopar.passes.graph.graph import batch_sizes
from autopar.passes.planner import compiler

WIDTH = 16


def init() -> Any:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {f"w{i}": jax.random.normal(key, (WIDTH, WIDTH)) / 4 for i, key in enumerate(keys)}
    return params, jax.tree.map(jnp.zeros_like, params)


def batch(rows: int) -> Any:
    x = jax.random.normal(jax.random.key(rows), (rows, WIDTH))
    return {"x": x, "y": jnp.sin(x)}


def step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        x = batch["x"]
        for w in params.values():
            x = x + jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    params, momentum = state
    loss, grads = jax.value_and_grad(loss_fn)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), loss


def train(fn: Callable[..., Any], sizes: list[int]) -> Any:
    state, losses = init(), []
    for rows in sizes:
        state, loss = fn(state, batch(rows))
        losses.append(float(loss))
    return jax.device_get(state), losses


def assert_trains(parallel: Any, sizes: list[int]) -> None:
    expected, found = train(jax.jit(step), sizes), train(parallel, sizes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), *(
        expected, found
    ))  # fmt: skip


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every batch that is planned for from now on."""
    planned: list[int] = []
    plain = compiler.compile_graph

    def count(graph: Any, *args: Any) -> Any:
        planned.extend(batch_sizes(graph))
        return plain(graph, *args)

    monkeypatch.setattr(compiler, "compile_graph", count)
    return planned


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "data"},
        {"method": "zero3", "microbatches": 2},
        {"stages": 2, "microbatches": 4},
    ],
    ids=str,
)
def test_a_ragged_last_batch_follows_the_plan(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = counted(monkeypatch)
    parallel = autopar.parallelize(step, **options)
    # 24 rows divide among the devices, 21 do not; what is known is not compiled again.
    with pytest.warns(AutoparWarning) as told:
        assert_trains(parallel, [32, 32, 24, 21, 32, 24, 21])
    assert planned == [32]
    known = {leaf.path: leaf.spec for leaf in parallel._planned[0].plan.inputs}
    for executable in parallel._executables.values():
        for leaf in executable.plan.inputs:
            assert leaf.role != "state" or leaf.spec == known[leaf.path], leaf.path
    assert 1 <= len(told) <= 2
    assert "follows its plan for 32 examples with 24: batch['x'] is float32[24,16]" in str(
        told[0].message
    )


def test_a_plan_that_followed_is_run_again_from_its_file(tmp_path: Any) -> None:
    parallel = autopar.parallelize(step, method="data")
    with pytest.warns(AutoparWarning, match="does not divide among the devices"):
        train(parallel, [32, 21])
    assert parallel.plan.reason_for_microbatches == "follows the plan for 32 examples"
    parallel.plan.save(tmp_path / "plan.json")
    again = autopar.compile(step, init(), batch(21), method="data", plan=tmp_path / "plan.json")
    assert again.plan == parallel.plan
    assert_trains(again, [21, 21])


def test_the_cause_of_another_plan_is_named() -> None:
    parallel = autopar.parallelize(step, method="data")
    train(parallel, [16])
    with pytest.warns(AutoparWarning, match=r"again: batch\['x'\] is float32\[32,16\], and"):
        train(parallel, [32])
    with warnings.catch_warnings():  # structures and static values differ on purpose
        warnings.simplefilter("error")
        flagged = autopar.parallelize(
            lambda w, x, train: (w + x.sum(0), x.mean() * train), static_argnums=(2,)
        )
        for train_ in (True, False):
            flagged(jnp.ones(8), jnp.ones((16, 8)), train_)


def test_one_example_goes_through_the_stages_in_one_microbatch() -> None:
    parallel = autopar.parallelize(step, stages=2, microbatches=4)
    with pytest.warns(AutoparWarning, match="follows its plan for 16 examples with 1"):
        assert_trains(parallel, [16, 1])


def test_a_batch_that_can_neither_follow_nor_be_planned_says_what_to_do() -> None:
    chunks: dict[str, Any] = {"schedule": "interleaved_1f1b", "num_chunks": 2}
    parallel = autopar.parallelize(step, stages=2, microbatches=4, **chunks)
    train(parallel, [16])
    with (
        pytest.warns(AutoparWarning, match="planned again"),
        pytest.raises(AutoparError) as error,
    ):
        train(parallel, [1])
    assert "Leave it out (drop_last), or pad it" in "".join(error.value.__notes__)
