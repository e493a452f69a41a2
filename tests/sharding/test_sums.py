"""What microbatches add up is reduced once a step, and the integer program pays for it."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar

CLUSTER = autopar.Cluster.preset("cpu", nodes=2, devices_per_node=2)


def train_step(params: Any, x: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.mark.parametrize("width", [4, 8, 64, 128])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_small_gradients_are_priced(width: int, microbatches: int) -> None:
    """Of every size: the plan's step contains its collectives, but for those of scalars."""
    params = {
        "w": jax.ShapeDtypeStruct((width, width), jnp.float32),
        "b": jax.ShapeDtypeStruct((width,), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((16, width), jnp.float32)
    plan = autopar.plan(
        train_step, params, x, cluster=CLUSTER, method="data", stages=1, microbatches=microbatches
    )
    listed = plan.stages[0].collectives
    arrays = [c.seconds * c.times for c in listed if c.bytes > 4]
    assert sorted(c.bytes for c in listed if c.bytes > 4) == [4 * width, 4 * width**2]
    assert plan.estimates.step_seconds > sum(arrays)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_a_scan_carries_by_row_is_cut_with_the_rows(microbatches: int) -> None:
    """Advantages, summed up backward in time from a few zeros, as many as there are games."""

    def step(params: Any, games: Any, rewards: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            values = jnp.tanh(games @ params["w"]) @ params["v"]

            def earlier(advantage: Any, now: Any) -> Any:
                return (advantage := now + 0.9 * advantage), advantage

            start = jnp.zeros(games.shape[0])
            _, advantages = jax.lax.scan(earlier, start, (rewards - values).T, reverse=True)
            return jnp.mean(advantages**2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {"w": jnp.ones((8, 32)), "v": jnp.ones(32)}
    plan = autopar.plan(
        step, params, jnp.ones((16, 12, 8)), jnp.ones((16, 12)),
        cluster=CLUSTER, method="data", stages=1, microbatches=microbatches,
    )  # fmt: skip
    assert {c.purpose for c in plan.stages[0].collectives} == {"gradient", "scalar"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("method", ["data", "zero2"])
def test_parts_of_a_shared_weights_gradient_are_added_first(method: str, dtype: Any) -> None:
    """A tied embedding that is looked up twice, with an optimizer that reads its gradient twice."""
    vocabulary, width = 1024, 16

    def tied_step(state: Any, tokens: Any) -> Any:
        def loss_fn(embed: Any) -> Any:
            embed = embed.astype(dtype)
            x = jnp.tanh(embed[tokens] + embed[tokens[:, ::-1]])
            logits = jax.nn.log_softmax((x @ embed.T).astype(jnp.float32))
            return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))

        embed, first, second = state
        gradient = jax.grad(loss_fn)(embed)
        first, second = 0.9 * first + gradient, 0.9 * second + gradient**2
        return embed - first / (jnp.sqrt(second) + 1.0), first, second

    embed = jax.ShapeDtypeStruct((vocabulary, width), jnp.float32)
    tokens = jax.ShapeDtypeStruct((16, 8), jnp.int32)
    kind = "all-reduce" if method == "data" else "reduce-scatter"
    plan = autopar.plan(
        tied_step, (embed,) * 3, tokens, cluster=CLUSTER, method=method, stages=1, microbatches=1
    )
    (found,) = (c for c in plan.stages[0].collectives if c.purpose == "gradient")
    size = vocabulary * width * jnp.dtype(dtype).itemsize
    assert (found.kind, found.bytes, found.times) == (kind, size, 1)
    assert found.dtype == jnp.dtype(dtype).name
    assert re.search(rf"gradient +{kind} +x +{found.dtype}", str(plan))


@pytest.mark.parametrize("method", ["data", "zero3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_scanned_layers_are_reduced_once(method: str, dtype: str) -> None:
    """Not in every microbatch, nor in every layer, also where a layer rounds them."""

    def step(params: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            h = jnp.matmul(x, w.astype(dtype), preferred_element_type=jnp.float32)
            return x + jnp.tanh(h).astype(dtype), None

        def loss_fn(params: Any) -> Any:
            y, _ = jax.lax.scan(layer, x.astype(dtype), params)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return params - 0.1 * grads, loss

    layers, width, microbatches = 3, 64, 4
    plan = autopar.plan(
        step,
        jax.ShapeDtypeStruct((layers, width, width), jnp.float32),
        jax.ShapeDtypeStruct((64, width), jnp.float32),
        cluster=CLUSTER,
        method=method,
        stages=1,
        microbatches=microbatches,
    )
    gradients = [c for c in plan.stages[0].collectives if c.purpose == "gradient"]
    assert [(c.times, c.bytes) for c in gradients] == [(1, 4 * layers * width**2)]
