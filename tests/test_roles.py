"""Roles of a step's leaves: state, batch or key, read from what becomes of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from jax.flatten_util import ravel_pytree
from traced_steps import PARAMS, B, W, X, Y, check, loss_fn, roles, sgd, train

from autopar.passes.graph import graph
from autopar.passes.trace.trace import trace


def test_train_state_and_optimizer_state() -> None:
    class TrainState(struct.PyTreeNode):
        step: Any
        params: Any
        opt_state: Any
        name: str = struct.field(pytree_node=False)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(state: TrainState, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(state.params, *batch)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return new, {"loss": loss}

    opt_state = jax.eval_shape(optimizer.init, PARAMS)
    state = TrainState(step=0, params=PARAMS, opt_state=opt_state, name="mine")
    traced = trace(step, (state, (X, Y)))
    labels = check(traced)
    assert {p: x.role for p, x in labels.items() if p.startswith("batch")} == {
        "batch[0]": "batch",
        "batch[1]": "batch",
    }
    states = {p: x for p, x in labels.items() if p.startswith("state")}
    assert all(x.role == "state" and x.donated for x in states.values())
    for path, label in states.items():
        assert label.alias is not None
        assert traced.graph.outputs[label.alias].path == path.replace("state", "result[0]", 1)
    assert traced.batch_size == 16


def test_arguments_come_back_in_another_order() -> None:
    optimizer = optax.adam(1e-3)

    def step(opt_state: Any, params: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return loss, gradients, {"new": optax.apply_updates(params, updates)}, opt_state

    traced = trace(step, (jax.eval_shape(optimizer.init, PARAMS), PARAMS, X, Y))
    labels = check(traced)
    # Gradients and moments have the structure of the parameters too.
    pairs = {
        path: traced.graph.outputs[label.alias].path
        for path, label in labels.items()
        if label.alias is not None
    }
    assert pairs["params['w']"] == "result[2]['new']['w']"
    assert pairs["opt_state[0].mu['w']"] == "result[3][0].mu['w']"
    assert pairs["opt_state[0].count"] == "result[3][0].count"


def test_two_arguments_of_one_structure_are_told_apart_by_what_updates_them() -> None:
    def step(fast: Any, slow: Any, x: Any, y: Any) -> Any:
        new, _ = train(fast, x, y)
        average = jax.tree.map(lambda s, f: 0.9 * s + 0.1 * f, slow, new)
        return average, new

    labels = check(traced := trace(step, (PARAMS, PARAMS, X, Y)))
    aliases = {p: x.alias for p, x in labels.items()}
    outputs = [o.path for o in traced.graph.outputs]
    assert outputs[aliases["fast['w']"]] == "result[1]['w']"  # type: ignore[index]
    assert outputs[aliases["slow['w']"]] == "result[0]['w']"  # type: ignore[index]


def test_gradients_are_not_a_new_state() -> None:
    traced = trace(lambda params, x, y: jax.value_and_grad(loss_fn)(params, x, y), (PARAMS, X, Y))
    labels = check(traced)
    assert labels["params['w']"] == graph.Input("params['w']", "state")
    assert not any(label.donated for label in labels.values())


def test_gradients_of_a_weight_decay_are_not_a_new_state() -> None:
    def loss(params: Any, x: Any, y: Any) -> Any:
        return loss_fn(params, x, y) + 1e-3 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))

    traced = trace(lambda p, x, y: jax.value_and_grad(loss)(p, x, y), (PARAMS, X, Y))
    assert not any(label.donated for label in check(traced).values())


def test_predictions_of_the_batch_shape_are_not_a_new_state() -> None:
    def step(state: Any, x: Any) -> Any:
        reconstruction = jnp.tanh(x @ state["w"]) @ state["w"].T
        return {"w": state["w"] + reconstruction.mean()}, reconstruction

    labels = check(trace(step, ({"w": W}, X)))
    assert labels["x"] == graph.Input("x", "batch", 0)
    assert labels["state['w']"].donated


def test_a_batch_that_is_passed_through_stays_a_batch() -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        return train(params, x, y)[0], {"targets": y, "x": x}

    assert roles(trace(step, (PARAMS, X, Y)))["y"] == "batch"


def test_momentum_and_statistics_are_state_although_they_are_scaled() -> None:
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(params: Any, trace_: Any, mean: Any, x: Any, y: Any) -> Any:
        gradients = jax.grad(loss_fn)(params, x, y)
        updates, trace_ = optimizer.update(gradients, trace_)
        mean = 0.9 * mean + 0.1 * x.mean(0)
        return optax.apply_updates(params, updates), trace_, mean

    arguments = (PARAMS, jax.eval_shape(optimizer.init, PARAMS), np.ones(8, np.float32), X, Y)
    labels = check(trace(step, arguments))
    assert all(x.donated == (x.role == "state") for x in labels.values())
    assert labels["mean"].role == "state"


def through_scan(params: Any, x: Any, y: Any) -> Any:
    return jax.lax.scan(lambda p, _: (train(p, x, y)[0], None), params, None, length=2)[0]


def through_while(params: Any, x: Any, y: Any) -> Any:
    return jax.lax.fori_loop(0, jnp.int32(y.sum()), lambda _, p: train(p, x, y)[0], params)


def through_cond(params: Any, x: Any, y: Any) -> Any:
    new, loss = train(params, x, y)
    return jax.lax.switch(
        jnp.int32(jnp.isfinite(loss)), [lambda: params, lambda: new, lambda: params]
    )


def through_selections(params: Any, x: Any, y: Any) -> Any:
    new, loss = train(params, x, y)
    return jax.lax.cond(jnp.isfinite(loss), lambda: new, lambda: params)


def through_where(params: Any, x: Any, y: Any) -> Any:
    new, loss = train(params, x, y)
    return jax.tree.map(lambda n, o: jnp.where(jnp.isfinite(loss), n, o), new, params)


def through_one_vector(params: Any, x: Any, y: Any) -> Any:
    flat, unravel = ravel_pytree(params)
    return unravel(flat - 0.1 * jax.grad(lambda f: loss_fn(unravel(f), x, y))(flat))


def through_jit(params: Any, x: Any, y: Any) -> Any:
    return jax.jit(jax.checkpoint(train))(params, x, y)[0]


def through_queue(params: Any, x: Any, y: Any) -> Any:
    return {
        "b": jnp.concatenate([params["b"][1:], y.mean()[None]]),
        "w": jax.lax.dynamic_update_slice(params["w"], x.mean(0)[:, None], (0, 1)),
    }


@pytest.mark.parametrize(
    "step",
    [
        through_scan,
        through_while,
        through_cond,
        through_selections,
        through_where,
        through_one_vector,
        through_jit,
        through_queue,
    ],
    ids=lambda step: step.__name__,
)
def test_updates_are_followed(step: Callable[..., Any]) -> None:
    labels = check(trace(step, (PARAMS, X, Y)))
    expected = [("state", True), ("state", True), ("batch", False), ("batch", False)]
    assert [(x.role, x.donated) for x in labels.values()] == expected


def test_an_evaluation_step_reads_its_parameters() -> None:
    params = {"w": W, "b": B, "embed": jax.ShapeDtypeStruct((16, 8), jnp.float32)}

    def evaluate(params: Any, batch: Any) -> Any:
        return loss_fn(params, batch["x"] + params["embed"], batch["y"])

    # The size of the embedding happens to be the batch's.
    labels = check(trace(evaluate, (params, {"x": X, "y": Y})))
    assert {x.role for p, x in labels.items() if p.startswith("params")} == {"state"}
    assert {x.role for p, x in labels.items() if p.startswith("batch")} == {"batch"}
    assert not any(x.donated for x in labels.values())


def test_frozen_parameters_between_state_and_batch() -> None:
    def step(params: Any, frozen: Any, x: Any, y: Any) -> Any:
        return train(params, jnp.tanh(x @ frozen["w"] + frozen["b"]), y)

    frozen = {"w": np.ones((8, 8), np.float32), "b": np.ones((2, 8), np.float32)[0]}
    frozen["scale"] = np.ones(3, np.float32)
    labels = check(trace(step, (PARAMS, frozen, X, Y)))
    assert labels["frozen['w']"] == graph.Input("frozen['w']", "state")


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_are_not_a_batch(make: Callable[[int], Any]) -> None:
    key = make(0)

    def step(params: Any, key: Any, batch: Any) -> Any:
        key, dropout = jax.random.split(key)
        mask = jax.random.bernoulli(dropout, 0.5, batch["x"].shape)
        noise = jax.random.normal(batch["rng"], batch["x"].shape)
        return *train(params, batch["x"] * mask + noise, batch["y"]), key

    labels = check(trace(step, (PARAMS, key, {"x": X, "y": Y, "rng": key})))
    assert labels["key"].donated
    assert labels["key"].role == "state"
    assert labels["batch['rng']"].role == "other"
    assert labels["batch['rng']"].batch_axis is None


def test_two_keys_come_back() -> None:
    def step(params: Any, first: Any, second: Any, x: Any, y: Any) -> Any:
        noise = jax.random.normal(first, x.shape) + jax.random.normal(second, x.shape)
        first, second = (jax.random.fold_in(key, 1) for key in (first, second))
        return second, first, train(params, x + noise, y)

    key = jax.random.key(0)
    labels = check(traced := trace(step, (PARAMS, key, key, X, Y)))
    assert labels["first"].donated
    assert labels["second"].donated
    assert {label.alias for label in labels.values()} >= {0, 1}
    assert [output.alias is not None for output in traced.graph.outputs][:2] == [True, True]


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_for_each_example_is_a_batch(make: Callable[[int], Any]) -> None:
    keys = jax.random.split(make(0), 16)

    def step(params: Any, x: Any, y: Any, keys: Any) -> Any:
        noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(keys)
        return train(params, x + noise, y)

    assert check(trace(step, (PARAMS, X, Y, keys)))["keys"] == graph.Input("keys", "batch", 0)


def test_labels_of_two_or_four_examples_are_not_keys() -> None:
    def step(params: Any, x: Any, label: Any) -> Any:
        return sgd(params, jax.grad(lambda p: (x @ p["w"])[jnp.arange(4), label].sum())(params))

    x, label = np.ones((4, 8), np.float32), np.zeros(4, np.uint32)
    assert roles(trace(step, (PARAMS, x, label)))["label"] == "batch"


def test_a_raw_key_that_goes_through_control_flow_is_a_key() -> None:
    def step(params: Any, x: Any, y: Any, key: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            key, p = carry
            key, use = jax.random.split(key)
            return (key, train(p, x + jax.random.normal(use, x.shape), y)[0]), None

        return jax.lax.scan(body, (key, params), None, length=2)[0][1]

    assert roles(trace(step, (PARAMS, X, Y, jax.random.PRNGKey(0))))["key"] == "other"


def test_scalars_are_not_a_batch() -> None:
    def step(params: Any, batch: Any, rate: Any) -> Any:
        gradients = jax.grad(loss_fn)(params, batch["x"], batch["y"])
        return jax.tree.map(lambda p, g: p - rate * batch["weight"] * g, params, gradients)

    labels = check(trace(step, (PARAMS, {"x": X, "y": Y, "weight": 2.0}, 0.1)))
    assert labels["rate"].role == labels["batch['weight']"].role == "other"


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_learning_rate_among_the_metrics_is_kept(scale: float) -> None:
    """A number alone that comes back as it was, or times something, is no state to be used up."""

    def step(params: Any, batch: Any, rate: Any) -> Any:
        gradients = jax.grad(loss_fn)(params, *batch)
        new = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
        return new, {"rate": rate if scale == 1 else rate * scale}

    labels = check(trace(step, (PARAMS, (X, Y), jnp.float32(0.1))))
    assert not labels["rate"].donated
    assert all(x.donated for path, x in labels.items() if path.startswith("params"))


def test_a_counter_that_is_added_to_is_state() -> None:
    def step(params: Any, batch: Any, count: Any) -> Any:
        gradients = jax.grad(loss_fn)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), count + 1

    labels = check(trace(step, (PARAMS, (X, Y), jnp.int32(0))))
    assert labels["count"].donated
