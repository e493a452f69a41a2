"""Scans over layers cut between iterations, with everything that is stacked by layer."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from stages.stage_programs import (
    MICROBATCHES,
    assert_equal_to_whole,
    check_links,
    crossing,
    microbatched_step,
    one_each_way,
)

from autopar.passes.slicing.slice_stages import slice_stages
from autopar.passes.slicing.stage_graphs import Stages

WIDTH, DEPTH, ROWS = 8, 6, 16


def parameters(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """Matrices stacked by layer; `gain` has the layers in its second dimension."""
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(DEPTH, WIDTH, WIDTH)) / WIDTH**0.5, dtype),
        "gain": jnp.asarray(1 + rng.normal(size=(WIDTH, DEPTH)) / 9, dtype),
        "head": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, dtype),
    }


def layer(x: jax.Array, params: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """One layer; the mean square of what it adds is collected."""
    y = jnp.tanh(x @ params["w"]) * params["gain"]
    return x + y, jnp.mean(y * y, axis=-1)


def stacked(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"w": params["w"], "gain": params["gain"].T}


def predict(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The scan over layers, and a linear map."""
    x, _ = jax.lax.scan(layer, x, stacked(params))
    return x @ params["head"]


def batch() -> tuple[jax.Array, jax.Array]:
    x, y = np.random.default_rng(1).normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(y)


def sliced(step: Any, state: Any, stages: Any, split_backward: bool = False) -> Stages:
    """The stages of a step, compared with the whole step."""
    whole = microbatched_step(step, (state, batch()))
    found = slice_stages(whole.step, whole.rules, stages, split_backward=split_backward)
    check_links(found)
    assert_equal_to_whole(whole, found)
    return found


def rows_of(stages: Stages, path: str) -> list[list[tuple[int, int, int | None]]]:
    """For every stage the rows (axis, start, stop) of a leaf that it holds."""
    paths = [label.path for label in stages.whole.graph.inputs]
    (group,) = [g for g in stages.leaves if paths[g[0].number].startswith(path)]
    homes = {rows.number: rows for rows in group}
    return [
        [
            (homes[n].axis, homes[n].start, homes[n].stop)
            for n in stage.inputs
            if n is not None and n in homes
        ]
        for stage in stages.graphs
    ]


def sgd(loss_fn: Any) -> Any:
    def step(params: Any, data: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, *data)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def mean_square(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((predict(params, x) - y) ** 2)


@pytest.mark.parametrize(
    ("stages", "ends"),
    [
        (2, [0, 3, 6]),
        (3, [0, 2, 4, 6]),
        ([1, 2, 5], [0, 1, 2, 5, 6]),
        ([6], [0, 6]),
    ],
)
def test_layers_and_their_leaves_are_cut_where_it_is_asked(stages: Any, ends: list[int]) -> None:
    found = sliced(sgd(mean_square), parameters(), stages)
    assert len(found.layers) == DEPTH + 1  # the linear map after them is one as well
    number = len(found.graphs)
    assert crossing(found) == one_each_way(number)
    pieces = list(itertools.pairwise(ends))
    if len(pieces) == 1:  # all layers on the first stage: the leaf is whole
        assert rows_of(found, "params['w']")[0] == [(0, 0, None)]
        return
    assert rows_of(found, "params['w']") == [[(0, a, b)] for a, b in pieces]
    assert rows_of(found, "params['gain']") == [[(1, a, b)] for a, b in pieces]


def test_equal_iterations_are_equal_layers() -> None:
    whole = microbatched_step(sgd(mean_square), (parameters(), batch()))
    found = slice_stages(whole.step, whole.rules, 1).layers
    inner = found.layers[1:-1]
    assert len({layer.digest for layer in inner}) == 1
    assert {layer.cut_bytes for layer in found.layers[:-1]} == {ROWS // MICROBATCHES * WIDTH * 4}


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lion": optax.lion(1e-2),
    "lamb": optax.lamb(1e-2),
    "accumulated": optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2),
    "finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "ema": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "bfloat16_momentum": optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    """Their states are split with the parameters; nothing of a layer leaves its stage."""
    optimizer = OPTIMIZERS[name]

    def step(state: Any, data: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(mean_square)(params, *data)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        return (new, opt_state), {"loss": loss, "norm": optax.tree.norm(grads)}

    params = parameters()
    found = sliced(step, (params, optimizer.init(params)), [2, 4])
    assert crossing(found) == one_each_way(3)
    if name != "adafactor":
        once = [k for k in found.links if not k.per_microbatch]
        assert all(link.bytes <= 8 for link in once), [str(link) for link in once]
        graph = found.whole.graph
        whole = [
            label.path
            for label, var in zip(graph.inputs, graph.jaxpr.invars, strict=True)
            if label.role == "state" and var.aval.shape[:1] == (DEPTH,)
        ]
        assert whole == []


def test_casts_averages_and_norms_by_layer() -> None:
    """Layers cast outside of the scan, an average of the parameters, and norms of each layer."""

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), params)
        return mean_square(low, x, y)

    def step(state: Any, data: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], *data)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, state["ema"], params)
        norms = jnp.sqrt(jnp.sum(grads["w"] ** 2, axis=(1, 2)))
        largest = jnp.max(jnp.abs(grads["gain"]))
        return {"params": params, "ema": ema}, {"loss": loss, "norms": norms, "largest": largest}

    found = sliced(step, {"params": parameters(), "ema": parameters()}, 3)
    assert rows_of(found, "state['ema']['w']") == rows_of(found, "state['params']['w']")
    assert max(link.bytes for link in found.links if not link.per_microbatch) <= 4 * DEPTH


@pytest.mark.parametrize("kind", ["where", "cond", "switch"])
def test_loss_scaling(kind: str) -> None:
    """The whole update is skipped where a gradient is not finite."""

    def step(state: Any, data: Any) -> Any:
        def scaled(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            return mean_square(params, x, y) * state["scale"]

        loss, grads = jax.value_and_grad(scaled)(state["params"], *data)
        finite = jnp.array(True)
        for grad in jax.tree.leaves(grads):
            finite &= jnp.all(jnp.isfinite(grad))

        def update(params: Any) -> Any:
            return jax.tree.map(lambda p, g: p - 0.1 * g / state["scale"], params, grads)

        old = state["params"]
        if kind == "cond":
            params = jax.lax.cond(finite, update, lambda params: params, old)
        elif kind == "switch":
            branches = [lambda params: params, update, update]
            params = jax.lax.switch(jnp.int32(finite), branches, old)
        else:
            params = jax.tree.map(lambda a, b: jnp.where(finite, a, b), update(old), old)
        scale = jnp.where(finite, state["scale"], state["scale"] / 2)
        return {"params": params, "scale": scale}, loss

    found = sliced(step, {"params": parameters(), "scale": jnp.float32(1024.0)}, [2, 4])
    assert all(link.bytes <= 8 for link in found.links if not link.per_microbatch)


def test_scans_that_keep_something_of_every_layer() -> None:
    """What every layer collects is part of the loss; dropout has a key for every layer."""

    def loss_fn(params: Any, key: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        def dropped(x: jax.Array, inputs: Any) -> Any:
            params, key, number = inputs
            x, size = jax.checkpoint(layer)(x, params)
            mask = jax.random.bernoulli(key, 0.8, (WIDTH,))
            return x * mask, size * (number + 1)

        inputs = stacked(params), jax.random.split(key, DEPTH), jnp.arange(DEPTH)
        x, sizes = jax.lax.scan(dropped, x, inputs)
        return jnp.mean((x @ params["head"] - y) ** 2) + 0.1 * jnp.mean(sizes)

    def step(state: Any, data: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), state["step"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], key, *data)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "step": state["step"] + 1}, loss

    sliced(step, {"params": parameters(), "step": jnp.int32(0)}, [2, 4], split_backward=True)


def test_two_scans_over_the_same_layers() -> None:
    """Layers that are used twice are cut alike; their gradients are added up at their home."""

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        once, _ = jax.lax.scan(layer, x, stacked(params))
        again, _ = jax.lax.scan(layer, once + y, stacked(params))
        return jnp.mean((again @ params["head"] - y) ** 2)

    found = sliced(sgd(loss_fn), parameters(), [3, 8])
    assert len(found.layers) == 2 * DEPTH + 1
    assert crossing(found) == one_each_way(3)


def test_a_scan_backwards() -> None:
    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(layer, x, stacked(params), reverse=True)
        return jnp.mean((x @ params["head"] - y) ** 2)

    found = sliced(sgd(loss_fn), parameters(), 3)
    assert crossing(found) == one_each_way(3)
    assert rows_of(found, "params['w']") == [[(0, 4, 6)], [(0, 2, 4)], [(0, 0, 2)]]


PICKS = {
    "rows": lambda w, x: w[jnp.array([0, -1])],
    "one": lambda w, x: w[2],
    "take": lambda w, x: jnp.take(w, jnp.array([5, 1]), axis=0),
    "traced": lambda w, x: jnp.take(w, jnp.argsort(jnp.sum(w, (1, 2)))[:2], axis=0),
    "along": lambda w, x: jnp.take_along_axis(w, jnp.argsort(w, axis=0)[:2], axis=0),
    "by batch": lambda w, x: w[(jnp.abs(x[:, 0]) * 4).astype(jnp.int32) % DEPTH],
    "bool": lambda w, x: (w > 0)[jnp.array([0, 3])] * 1.0,
    "dynamic": lambda w, x: jax.lax.dynamic_index_in_dim(w, x.shape[0] // 4, 0),
    "flipped": lambda w, x: jnp.flip(w, 0) * jnp.arange(DEPTH)[:, None, None],
    "cumulated": lambda w, x: jnp.cumsum(w, axis=0),
    "sorted": lambda w, x: jnp.sort(w, axis=0)[:2],
    "largest": lambda w, x: jnp.max(w, axis=0) + jnp.argmax(w, axis=0),
    "mixed": lambda w, x: jnp.einsum("lij,mij->lm", w, w),
    "reshaped": lambda w, x: w.reshape(2, 3, -1).mean(1),
    "merged": lambda w, x: w.reshape(-1, WIDTH) @ jnp.ones((WIDTH, 2)),
    "scattered": lambda w, x: w.at[jnp.array([1, 4])].set(0.0),
    "repeated": lambda w, x: jnp.repeat(w, 2, axis=0),
    "differences": lambda w, x: jnp.diff(w, axis=0),
}


def picks() -> Iterator[Any]:
    """Every pick in one of the two places, in turn; the other is marked `full`."""
    places = ("in the loss", "in the update")
    for (number, name), (turn, where) in itertools.product(enumerate(PICKS), enumerate(places)):
        marks = () if number % 2 == turn else pytest.mark.full
        yield pytest.param(name, where, id=f"{name}-{where}", marks=marks)


@pytest.mark.parametrize(("name", "where"), list(picks()))
def test_what_must_see_several_layers_sees_them(name: str, where: str) -> None:
    """Whatever is done along the layers' dimension, the numbers stay right."""

    def regular(params: Any, x: jax.Array) -> jax.Array:
        picked = PICKS[name](params["w"], x)
        return jnp.mean(picked**2 * (1 + jnp.arange(picked.size).reshape(picked.shape)))

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        extra = regular(params, x) if where == "in the loss" else 0.0
        return mean_square(params, x, y) + extra

    def step(params: Any, data: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, *data)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        if where == "in the update":
            new["w"] = new["w"] + 0.1 * regular(grads, jnp.ones((4, WIDTH)))
        return new, loss

    sliced(step, parameters(), [2, 4])


def test_a_key_for_every_layer_in_the_state() -> None:
    """Stacked keys stay in one piece."""

    def step(state: Any, data: Any) -> Any:
        def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            def dropped(x: jax.Array, inputs: Any) -> Any:
                params, key = inputs
                return layer(x, params)[0] * jax.random.bernoulli(key, 0.8, (WIDTH,)), None

            x, _ = jax.lax.scan(dropped, x, (stacked(params), state["keys"]))
            return jnp.mean((x @ params["head"] - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"], *data)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {
            "params": params,
            "keys": jax.vmap(jax.random.fold_in, (0, None))(state["keys"], 1),
        }, loss

    keys = jax.random.split(jax.random.key(0), DEPTH)
    found = sliced(step, {"params": parameters(), "keys": keys}, [2, 4])
    assert [len(rows) for rows in rows_of(found, "state['keys']")] == [1, 0, 0]


def test_a_scan_over_time_is_one_layer() -> None:
    """Its parameters are the same in every iteration."""

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def cell(state: jax.Array, inputs: jax.Array) -> Any:
            state = jnp.tanh(state @ params["head"] + inputs)
            return state, state

        steps = jnp.stack([x] * DEPTH)
        _, states = jax.lax.scan(cell, y, steps + params["gain"].T[:, None])
        return jnp.mean(states**2)

    whole = microbatched_step(sgd(loss_fn), (parameters(), batch()))
    found = slice_stages(whole.step, whole.rules, 1).layers
    assert all(not layer.iterations for layer in found.layers)
