"""Refusals about the batch say what was taken for it, and what would do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from traced_steps import PARAMS, train

import autopar
from autopar.base.cluster import Cluster
from autopar.base.errors import (
    AutoparWarning,
    BatchArgumentError,
    InexactMicrobatchError,
    OptionError,
)


def shape(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def said(error: Exception) -> str:
    return " ".join(str(error).split())


GUESSED = ", as autopar guessed: batch_argnums= or batch_axes= say otherwise."


def test_a_number_of_microbatches_that_does_not_divide() -> None:
    with pytest.raises(BatchArgumentError) as refused:
        autopar.plan(train, PARAMS, shape(24, 8), shape(24, 4), microbatches=5)
    assert "The batch is dimension 0 of x and y (24)" + GUESSED in said(refused.value)
    with pytest.raises(BatchArgumentError) as refused:
        autopar.plan(
            train, PARAMS, shape(24, 8), shape(24, 4), microbatches=5, batch_argnums=(1, 2)
        )
    assert "The batch is dimension 0 of x and y (24)." in said(refused.value)
    assert "guessed" not in said(refused.value)


def test_dimensions_and_sizes_that_differ() -> None:
    def step(params: Any, batch: Any) -> Any:
        more = jnp.mean(jnp.tanh(batch["u"] @ params["w"]) ** 2)
        x, y = batch["x"].T, batch["y"]
        loss = jnp.mean((x @ params["w"] - y) ** 2) + more
        return jax.tree.map(lambda p: p - loss, params), loss

    batch = {"u": shape(48, 8), "x": shape(8, 16), "y": shape(16, 4)}
    axes = {"u": 0, "x": 1, "y": 0}
    with pytest.raises(BatchArgumentError) as refused:
        autopar.plan(step, PARAMS, batch, microbatches=3, batch_axes=(None, axes))
    wanted = "dimension 0 of batch['u'] (48); dimension 1 of batch['x'] (16); dimension 0 of"
    assert wanted in said(refused.value)


DEEP = {"a": shape(16, 64), "b": shape(64, 16)}


def deep(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        hidden = jnp.tanh(x @ params["a"])
        return jnp.mean((hidden @ params["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def test_a_step_that_needs_the_whole_batch() -> None:
    def step(params: Any, x: Any) -> Any:
        x = x - jnp.median(x, axis=0)
        x = x - jnp.median(jnp.tanh(x @ params["a"]) @ params["b"], axis=0)
        return deep(params, x)

    with pytest.raises(InexactMicrobatchError) as refused:
        autopar.plan(step, DEEP, shape(32, 16), microbatches=4)
    assert "The batch is dimension 0 of x (32)" + GUESSED in said(refused.value)


@pytest.mark.parametrize("method", ["data", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("rows", [6, 12])
def test_devices_that_do_not_divide_the_batch(method: str, rows: int) -> None:
    """No pipeline takes the place of data parallelism."""
    with pytest.raises(BatchArgumentError, match="among 8 devices") as refused:
        autopar.plan(train, PARAMS, shape(rows, 8), shape(rows, 4), method=method)
    padded = {6: 8, 12: 16}[rows]
    for part in (f"pad it to {padded}", "logical_mesh=(6,), which leaves 2 of the devices idle"):
        assert part in said(refused.value)
    arguments = PARAMS, shape(rows, 8), shape(rows, 4)
    plan = autopar.plan(train, *arguments, method=method, logical_mesh=(6,))
    assert [stage.num_devices for stage in plan.stages] == [6]


def test_stages_in_place_of_one_mesh_are_told() -> None:
    """Three microbatches of four examples divide among the devices of a stage."""
    nodes = Cluster.preset("cpu", nodes=2, devices_per_node=4)
    options: dict[str, Any] = {"cluster": nodes, "method": "data", "microbatches": 3}
    with pytest.warns(AutoparWarning, match="is planned in . stages"):
        plan = autopar.plan(deep, DEEP, shape(12, 16), **options)
    assert all(4 % stage.num_devices == 0 for stage in plan.stages)
    with pytest.raises(BatchArgumentError, match="among 8 devices"):
        autopar.plan(deep, DEEP, shape(12, 16), stages=1, **options)


def test_too_few_entries_of_batch_axes() -> None:
    with pytest.raises(OptionError) as refused:
        autopar.plan(train, PARAMS, shape(24, 8), shape(24, 4), batch_axes=(None,))
    for part in (
        "batch_axes has 1 entry, and the call has 3 positional arguments",
        "where: x, y",
        "batch_axes=(None, None, None) says that they hold no batch; 0 in its place",
    ):
        assert part in said(refused.value)


def test_microbatches_that_would_divide_nothing_are_refused() -> None:
    """A step that draws its rows by number from a data set, which is taken for the batch."""

    def train_step(w: Any, data: Any, key: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            rows = data[jax.random.randint(key, (16,), 0, len(data))]
            return jnp.mean(jnp.square(rows @ w))

        loss, grad = jax.value_and_grad(loss_fn)(w)
        return w - 0.1 * grad, loss

    args = jnp.ones((4, 4)), jnp.ones((64, 4)), jax.random.key(0)
    assert autopar.plan(train_step, *args, microbatches=1).num_microbatches == 1
    with pytest.raises(InexactMicrobatchError) as refused:
        autopar.plan(train_step, *args, microbatches=4)
    said = str(refused.value)
    assert "nothing of it is computed for each example" in said
    assert "dimension 0 of data was taken for the batch" in " ".join(said.split())
    assert f"{__file__.rsplit('/', 1)[-1]}:" in said, "the line that takes rows"


def test_arguments_without_a_batch_are_named_from_both_ends() -> None:
    """Of many the first and the last, among which the data is that came back as state."""

    def step(state: Any, last: Any) -> Any:
        return {name: 2 * x for name, x in state.items()}, last + 1.0

    state = {f"w{i}": jnp.ones((i + 2, 3)) for i in range(8)}
    with pytest.raises(BatchArgumentError) as refused:
        autopar.plan(step, state, jnp.ones(16), microbatches=2)
    said = " ".join(str(refused.value).split())
    assert "state['w2'] (state), 3 more, state['w6'] (state)" in said
    assert "last (state)." in said
