"""Random bits of a microbatch are the full batch's own bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from microbatch.helpers import analyzed, check_split, run

from autopar.passes.graph.graph import walk
from autopar.passes.microbatch import split


def dropout(key: Any, x: Any, rate: float = 0.4) -> Any:
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_dropout_masks_are_the_same_bits(implementation: str) -> None:
    def masks(key: Any, x: Any) -> Any:
        one, other = jax.random.split(key)
        kept = jax.random.bernoulli(one, 0.7, x.shape) & (x < 9)
        return kept, jax.random.bits(other, (3, *x.shape), jnp.uint8)[1] + x.astype(jnp.uint8)

    x = np.ones((8, 5, 2), np.float32)
    check_split(masks, (jax.random.key(3, impl=implementation), x), 4)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_training_with_dropout(implementation: str) -> None:
    def step(state: Any, x: Any) -> Any:
        key, next_key = jax.random.split(state["key"])

        def loss_fn(w: Any) -> Any:
            return jnp.mean(dropout(key, jnp.tanh(x @ w)) ** 2)

        loss, gradient = jax.value_and_grad(loss_fn)(state["w"])
        return {"w": state["w"] - gradient, "key": next_key}, loss

    w = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    x = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
    state = {"w": w, "key": jax.random.key(0, impl=implementation)}
    analysis = check_split(step, (state, x), 4)
    assert analysis.costs.loop_share > 0.6


def test_threefry_bits_are_regenerated_in_the_loop() -> None:
    """Nothing of the size of the batch is drawn outside of it."""

    def step(key: Any, x: Any) -> Any:
        return jnp.sum(dropout(key, x))

    graph, analysis = analyzed(step, (jax.random.key(0), np.ones((32, 64), np.float32)), 4)
    new = split(graph, analysis).graph
    largest = max(var.aval.size for eqn in new.jaxpr.eqns for var in eqn.outvars)
    assert largest == 32 * 64  # the batch itself, on its way into the loop
    assert not [eqn for eqn in walk(new.jaxpr) if eqn.primitive.name == "random_bits"]


def test_other_generators_draw_once_before_the_loop() -> None:
    def step(key: Any, x: Any) -> Any:
        return jnp.sum(dropout(key, x))

    key = jax.random.key(0, impl="rbg")
    graph, analysis = analyzed(step, (key, np.ones((32, 8), np.float32)), 4)
    eqns = split(graph, analysis).graph.jaxpr.eqns
    drawn = [eqn for eqn in eqns if eqn.primitive.name == "random_bits"]
    assert len(drawn) == 1


def test_without_partitionable_threefry() -> None:
    with jax.threefry_partitionable(False):
        check_split(
            lambda key, x: jnp.mean(dropout(key, x)),
            (jax.random.key(1), np.ones((8, 6), np.float32)),
            4,
        )


def test_a_key_for_each_example() -> None:
    def augment(w: Any, batch: Any) -> Any:
        noise = jax.vmap(lambda key: jax.random.normal(key, (4,)))(batch["keys"])
        shifts = jax.vmap(lambda key: jax.random.randint(key, (), 0, 4))(batch["keys"])
        moved = jax.vmap(jnp.roll)(batch["x"] + noise, shifts)
        return jnp.mean(jnp.tanh(moved * w)), moved

    keys = jax.random.split(jax.random.key(0), 8)
    x = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
    check_split(augment, (np.float32(2), {"keys": keys, "x": x}), 4)
    raw = jax.vmap(jax.random.key_data)(keys)

    def with_raw_keys(w: Any, batch: Any) -> Any:
        return jnp.mean(w * jax.vmap(lambda key: jax.random.normal(key, (4,)))(batch))

    check_split(with_raw_keys, (np.float32(2), raw), 4)


def test_keys_split_for_each_example() -> None:
    def step(key: Any, x: Any) -> Any:
        keys = jax.random.split(key, x.shape[0])
        return jnp.sum(x * jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys))

    check_split(step, (jax.random.key(0), np.ones((8, 3), np.float32)), 4)


def test_distributions_with_loops_inside() -> None:
    def step(key: Any, x: Any) -> Any:
        return jnp.sum(x * jax.random.gamma(key, 2.0, x.shape)), jax.random.categorical(key, x)

    x = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
    graph, analysis = analyzed(
        step, (jax.random.key(0), x), 4, max_flops_share=1, max_bytes_share=1
    )
    for one, other in zip(
        run(graph, (jax.random.key(0), x)),
        run(split(graph, analysis).graph, (jax.random.key(0), x)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5)
