"""`autopar.follow`: functions of a train step's parameters, where its plan has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autopar
from autopar.arrays.split_array import SplitArray
from autopar.base.errors import AutoparError, DonatedBufferError, OptionError

WIDTH, ROWS, LAYERS = 8, 16, 4

random = np.random.default_rng(0)
MATRICES = random.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
HEAD = random.normal(size=(WIDTH, 4)).astype(np.float32)
BATCH = {
    "x": random.normal(size=(ROWS, WIDTH)).astype(np.float32),
    "y": random.normal(size=(ROWS, 4)).astype(np.float32),
}


def forward(params: Any, x: Any) -> Any:
    """Layers one by one, or under a scan where they are one array."""
    if isinstance(params["layers"], list):
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        return x
    narrow = params["layers"].astype(jnp.float16).astype(jnp.float32)
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, narrow)[0]


def mean_loss(params: Any, batch: Any) -> Any:
    return jnp.mean((forward(params, batch["x"]) @ params["head"] - batch["y"]) ** 2)


def train(state: Any, batch: Any) -> Any:
    loss, gradients = jax.value_and_grad(mean_loss)(state["params"], batch)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)
    return {"params": params}, loss


LAYOUTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "one mesh": (False, {"method": "zero3"}),
    "stages": (False, {"stages": 2, "microbatches": 2}),
    "stages in a scan": (True, {"stages": 2, "microbatches": 2, "schedule": "gpipe"}),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def trained(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """A train step that was called, what it returned, and that on the host."""
    is_scan, options = LAYOUTS[request.param]
    layers: Any = MATRICES.copy() if is_scan else list(MATRICES.copy())
    step = autopar.parallelize(train, **options)
    state, _ = step({"params": {"layers": layers, "head": HEAD}}, BATCH)
    return step, state["params"], jax.device_get(state["params"])


def equal_plain(
    step: Any, fn: Callable[..., Any], params: Any, host: Any, *args: Any, static: Any = ()
) -> Any:
    """What a followed function returns, the same as `jax.jit` returns."""
    expected = jax.jit(fn, static_argnums=static)(host, *args)
    found = autopar.follow(step, fn, static_argnums=static)(params, *args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
        jax.device_get(found),
        jax.device_get(expected),
    )
    return found


def test_evaluation_equals_plain_jit(trained: Any) -> None:
    step, params, host = trained

    def evaluate(params: Any, batch: Any) -> Any:
        norm = sum(jnp.sum(x * x) for x in jax.tree.leaves(params))
        return {"loss": mean_loss(params, batch), "norm": norm, "name": "evaluation"}

    def arrays(params: Any, batch: Any) -> Any:
        return {k: v for k, v in evaluate(params, batch).items() if k != "name"}

    before = [x.sharding for x in jax.tree.leaves(params)]
    equal_plain(step, arrays, params, host, BATCH)
    equal_plain(step, arrays, host, host, {k: v[:5] for k, v in BATCH.items()})  # from the host
    assert autopar.follow(step)(evaluate)(params, BATCH)["name"] == "evaluation"
    assert [x.sharding for x in jax.tree.leaves(params)] == before


def test_each_stage_runs_its_own_layers(trained: Any) -> None:
    """In a pipeline a layer's result lies on the devices of its parameters."""
    step, params, _ = trained
    if not step.plan.is_pipeline:
        return

    @autopar.follow(step)
    def layers(params: Any, x: Any) -> Any:
        results = []
        for number in range(LAYERS):
            x = jnp.tanh(x @ params["layers"][number])
            results.append(x)
        return results

    results = layers(params, BATCH["x"])
    stacked = params["layers"]
    if isinstance(stacked, SplitArray):
        homes = [part.sharding.device_set for part in stacked.parts for _ in range(len(part))]
    else:
        homes = [w.sharding.device_set for w in stacked]
    assert [x.sharding.device_set for x in results] == homes
    assert len(set(map(frozenset, homes))) == 2


def test_generation_in_loops(trained: Any) -> None:
    step, params, host = trained

    def generate(params: Any, x: Any, key: Any, length: int) -> Any:
        def token(x: Any, key: Any) -> Any:
            x = forward(params, x) + jax.random.normal(key, x.shape) / 8
            return x, x.sum(0)

        x, sums = jax.lax.scan(token, x, jax.random.split(key, length))
        count, x = jax.lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, forward(params, c[1])), (0, x)
        )
        return sums, jax.lax.cond(count > 1, lambda x: forward(params, x), lambda x: x, x)

    equal_plain(step, generate, params, host, BATCH["x"], jax.random.key(3), 3, static=3)


def test_a_cache_stays_where_it_was_written(trained: Any) -> None:
    """A loop around the function: what it returns goes in again."""
    step, params, host = trained

    def decode(params: Any, cache: Any, x: Any) -> Any:
        if not isinstance(params["layers"], list):

            def layer(x: Any, both: Any) -> Any:
                w, old = both
                x = jnp.tanh(x @ w)
                return x, old + x

            x, cache = jax.lax.scan(layer, x, (params["layers"], cache))
            return cache, x
        new = []
        for w, old in zip(params["layers"], cache, strict=True):
            x = jnp.tanh(x @ w)
            new.append(old + x)
        return new, x

    zeros: Any = np.zeros((LAYERS, ROWS, WIDTH), np.float32)
    start = zeros if not isinstance(host["layers"], list) else list(zeros)
    followed = autopar.follow(step, decode)
    cache, x = start, BATCH["x"]
    plain_cache, plain_x = start, BATCH["x"]
    for _ in range(3):
        cache, x = followed(params, cache, x)
        plain_cache, plain_x = jax.jit(decode)(host, plain_cache, plain_x)
    for a, b in zip(
        jax.tree.leaves((cache, x)), jax.tree.leaves((plain_cache, plain_x)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    if step.plan.is_pipeline and isinstance(cache, list):
        homes = [w.sharding.device_set for w in params["layers"]]
        assert [x.sharding.device_set for x in cache] == homes


def test_objects_are_updated() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first, self.second = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
            self.seen = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x: Any) -> Any:
            return self.second(jnp.tanh(self.first(x)))

    def loss_of(model: Model, x: Any) -> Any:
        return jnp.mean(model(x) ** 2)

    @autopar.parallelize(method="zero3")
    def step(model: Model, x: Any) -> Any:
        loss, gradients = nnx.value_and_grad(loss_of)(model, x)
        state = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients))
        return loss

    @autopar.follow(step)
    def evaluate(model: Model, x: Any) -> Any:
        model.seen[...] += x.shape[0]
        return loss_of(model, x)

    model = Model(nnx.Rngs(0))
    step(model, BATCH["x"])
    loss = evaluate(model, BATCH["x"])
    np.testing.assert_allclose(loss, nnx.jit(loss_of)(model, BATCH["x"]), rtol=1e-5)
    assert int(model.seen[...]) == ROWS


def test_what_cannot_be_followed() -> None:
    step = autopar.parallelize(train, method="data")
    followed = autopar.follow(step, mean_loss)
    state = {"params": {"layers": list(MATRICES.copy()), "head": HEAD}}
    with pytest.raises(AutoparError, match="train has no plan yet"):
        followed(state["params"], BATCH)
    with pytest.raises(OptionError, match="takes a parallelized step first"):
        autopar.follow(mean_loss)  # type: ignore[call-overload]
    old, _ = step(state, BATCH)
    step(old, BATCH)
    with pytest.raises(DonatedBufferError, match=r"params\['head'\]"):
        followed(old["params"], BATCH)
    assert jax.grad(followed)(jax.device_get(step.gather(state["params"])), BATCH)["head"].shape
