"""Inference steps whose state holds the batch: caches and tokens, or examples of a sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traced_steps import check

import autopar
from autopar.base.errors import BatchArgumentError
from autopar.passes.trace.trace import trace

VOCABULARY, WIDTH, LENGTH, LAYERS = 32, 16, 10, 2


def parameters() -> dict[str, Any]:
    numbers = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(numbers.normal(size=shape) / 4, jnp.float32)

    layers = {name: normal(LAYERS, WIDTH, WIDTH) for name in "qkvo"}
    return {"emb": normal(VOCABULARY, WIDTH), "pos": normal(LENGTH, WIDTH), "layers": layers}


def caches(batch: int) -> list[Any]:
    shape = (batch, LENGTH, WIDTH)
    return [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(LAYERS)]


def attend(q: Any, k: Any, v: Any, places: Any) -> Any:
    known = jnp.arange(LENGTH) <= places
    scores = jnp.where(known, jnp.einsum("bd,bld->bl", q, k), -1e9)
    return jnp.einsum("bl,bld->bd", jax.nn.softmax(scores), v)


def logits_of(params: Any, cache: Any, tokens: Any, place: Any) -> Any:
    """Logits and the new caches; `place` is a number for all rows, or one for each."""

    def write(cache: Any, new: Any) -> Any:
        if place.ndim:
            return cache.at[jnp.arange(len(new)), place].set(new)
        return jax.lax.dynamic_update_slice(cache, new[:, None], (0, place, 0))

    h = params["emb"][tokens] + params["pos"][place]
    made = []
    for layer, (k, v) in enumerate(cache):
        w = {name: x[layer] for name, x in params["layers"].items()}
        k, v = write(k, h @ w["k"]), write(v, h @ w["v"])
        h += attend(h @ w["q"], k, v, place[:, None] if place.ndim else place) @ w["o"]
        made.append((k, v))
    return h @ params["emb"].T, made


def greedy(state: Any, params: Any) -> Any:
    cache, tokens, place = state
    logits, cache = logits_of(params, cache, tokens, place)
    return (cache, logits.argmax(-1).astype(jnp.int32), place + 1), logits


def scanned(state: Any, params: Any) -> Any:
    """The same by a scan over the layers."""
    cache, tokens, place = state
    logits, cache = scan_of_layers(params, cache, tokens, place)
    return (cache, logits.argmax(-1).astype(jnp.int32), place + 1), logits


def scan_of_layers(params: Any, cache: Any, tokens: Any, place: Any) -> Any:
    """A scan that walks caches and weights."""

    def layer(h: Any, xs: Any) -> Any:
        w, k, v = xs
        k = jax.lax.dynamic_update_slice(k, (h @ w["k"])[:, None], (0, place, 0))
        v = jax.lax.dynamic_update_slice(v, (h @ w["v"])[:, None], (0, place, 0))
        return h + attend(h @ w["q"], k, v, place) @ w["o"], (k, v)

    h = params["emb"][tokens] + params["pos"][place]
    h, cache = jax.lax.scan(layer, h, (params["layers"], *cache))
    return h @ params["emb"].T, cache


def sampled(state: Any, params: Any) -> Any:
    """Drawn among what is likely, which sums over the vocabulary; and a mean over the rows."""
    cache, tokens, place, key = state
    key, used = jax.random.split(key)
    logits, cache = logits_of(params, cache, tokens, place)
    chances = jax.nn.softmax(logits)
    likely = jnp.where(chances > 0.01 * chances.sum(-1, keepdims=True), logits, -1e9)
    tokens = jax.random.categorical(used, likely).astype(jnp.int32)
    return (cache, tokens, place + 1, key), chances.max(-1).mean()


def given(params: Any, cache: Any, tokens: Any, place: Any) -> Any:
    """Tokens that the caller chose: what comes back is the cache alone."""
    return logits_of(params, cache, tokens, place)


def start(batch: int, each: bool = False) -> Any:
    tokens = jnp.arange(batch, dtype=jnp.int32) % VOCABULARY
    place = jnp.arange(batch, dtype=jnp.int32) % 3 if each else jnp.int32(0)
    return caches(batch), tokens, place


def stacked(batch: int) -> Any:
    return (jnp.zeros((LAYERS, batch, LENGTH, WIDTH)), jnp.zeros((LAYERS, batch, LENGTH, WIDTH)))


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "greedy": (greedy, lambda n: (start(n), parameters())),
    "places": (greedy, lambda n: (start(n, each=True), parameters())),
    "scanned": (scanned, lambda n: ((stacked(n), *start(n)[1:]), parameters())),
    "sampled": (sampled, lambda n: ((*start(n), jax.random.key(7)), parameters())),
    "given": (given, lambda n: (parameters(), *start(n))),
    "given scanned": (
        scan_of_layers,
        lambda n: (parameters(), stacked(n), *start(n)[1:]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_of_the_state_are_the_batch(name: str) -> None:
    step, arguments = CASES[name]
    traced = trace(step, arguments(8))
    labels = check(traced)
    axes = {p: x.batch_axis for p, x in labels.items() if x.batch_axis is not None}
    rows = {p for p, x in labels.items() if x.alias is not None and 8 in shapes_of(traced)[p]}
    assert traced.batch_size == 8
    assert axes.keys() == rows | ({"tokens"} if "given" in name else set())
    assert all(shapes_of(traced)[path][axis] == 8 for path, axis in axes.items())


def shapes_of(traced: Any) -> dict[str, tuple[int, ...]]:
    paths = (label.path for label in traced.graph.inputs)
    return {p: x.shape for p, x in zip(paths, traced.signature.shapes, strict=False)}


@pytest.mark.parametrize("name", CASES)
def test_one_row_is_no_batch_and_no_vocabulary_is(name: str) -> None:
    step, arguments = CASES[name]
    labels = check(trace(step, arguments(1)))
    assert not [p for p, x in labels.items() if x.batch_axis is not None and "params" in p]


@pytest.mark.parametrize("options", [{"method": "data"}, {"microbatches": 2}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_numbers_of_inferences_are_those_of_jit(name: str, options: dict[str, Any]) -> None:
    step, arguments = CASES[name]
    given = arguments(16)
    ours = autopar.compile(step, *given, donate_argnums=(), **options)
    for a, b in zip(
        jax.tree.leaves(ours(*given)), jax.tree.leaves(jax.jit(step)(*given)), strict=True
    ):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_rows_that_meet_are_no_batch() -> None:
    """Tokens that are chosen by all rows together, as of one text."""

    def step(state: Any, params: Any) -> Any:
        tokens, count = state
        logits = params["emb"][tokens] @ params["emb"].T
        chosen = logits.mean(0).argmax().astype(jnp.int32)
        return (tokens.at[count].set(chosen), count + 1), logits

    state = jnp.zeros(8, jnp.int32), jnp.int32(1)
    labels = check(trace(step, (state, {"emb": jnp.ones((VOCABULARY, WIDTH))})))
    assert labels["state[0]"].role == "state"


def perceptron(state: Any, x: Any, y: Any) -> Any:
    """Classes are rows of its weights, and nothing sums over them."""

    def loss(w: Any) -> Any:
        scores = x @ w.T
        return -jnp.take_along_axis(scores, y[:, None], 1).mean()

    w, seen = state
    value, grad = jax.value_and_grad(loss)(w)
    return (w - 0.1 * grad, seen + 1), value


def with_history(state: Any, x: Any, y: Any) -> Any:
    w, history = state
    value, grad = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y[:, None]) ** 2))(w)
    return (w - 0.1 * grad, jnp.roll(history, 1).at[0].set(value)), value


@pytest.mark.parametrize("step", [perceptron, with_history])
def test_a_train_step_keeps_the_batch_of_its_data(step: Callable[..., Any]) -> None:
    shape = (4, 6) if step is perceptron else (6, 4)
    state = jnp.ones(shape), jnp.zeros(4, jnp.int32 if step is perceptron else jnp.float32)
    dtype = jnp.int32 if step is perceptron else jnp.float32
    labels = check(trace(step, (state, jnp.ones((16, 6)), jnp.zeros(16, dtype))))
    axes = {p: x.batch_axis for p, x in labels.items() if x.batch_axis is not None}
    assert axes == {"x": 0, "y": 0}


def mean_square(parameters: Any, x: Any, target: Any = 0.0) -> Any:
    return jnp.mean((x @ parameters[0] + parameters[1] - target) ** 2)


def one_layer(state: Any, x: Any) -> Any:
    """Of one example: that sums no rows, and the loss, which would mix features, is not state."""
    w, b, momentum = state
    loss, (dw, db) = jax.value_and_grad(mean_square)((w, b), x)
    return (w - 0.1 * dw, b - 0.1 * db, 0.9 * momentum + db), loss


def one_layer_by_hand(state: Any, x: Any) -> Any:
    w, b, momentum = state
    error = (x @ w + b) / b.size
    return (w - 0.1 * x.T @ error, b - 0.1 * error[0], 0.9 * momentum + error[0]), error.mean()


def one_layer_in_a_loop(state: Any, x: Any) -> Any:
    """What is differentiated is in a body."""
    steps = jax.lax.fori_loop(0, 2, lambda _, own: one_layer(own, x)[0], state)
    return steps, one_layer(state, x)[1]


def one_layer_with_history(state: Any, x: Any) -> Any:
    """Gradients are kept as caches keep tokens, each in a column."""
    own, history, place = state
    own, loss = one_layer(own, x)
    history = jax.lax.dynamic_update_slice(history, own[2][:, None], (0, place))
    return (own, history, place + 1), loss


def holding_data(state: Any, mask: Any) -> Any:
    w, b, x, target = state
    loss, (dw, db) = jax.value_and_grad(mean_square)((w, b), x * mask, target)
    return (w - 0.1 * dw, b - 0.1 * db, x, target), loss


LAYER = jnp.ones((WIDTH, 8)), jnp.ones(8)
ONE_LAYER = (*LAYER, jnp.zeros(8)), jnp.ones((1, WIDTH))
TRAINED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "one example": (one_layer, ONE_LAYER),
    "by hand": (one_layer_by_hand, ONE_LAYER),
    "with a history": (
        one_layer_with_history,
        ((ONE_LAYER[0], jnp.zeros((8, 5)), jnp.int32(0)), ONE_LAYER[1]),
    ),
    "in a loop": (one_layer_in_a_loop, ONE_LAYER),
    "data in the state": (
        holding_data,
        ((*LAYER, jnp.ones((64, WIDTH)), jnp.ones((64, 8))), jnp.ones(WIDTH)),
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_features_of_parameters_are_no_rows(name: str) -> None:
    step, arguments = TRAINED[name]
    labels = check(trace(step, arguments))
    assert not [p for p, x in labels.items() if x.role == "batch" and p.startswith("state")]
    with pytest.raises(BatchArgumentError, match="cannot be divided"):
        autopar.plan(step, *arguments, microbatches=3)


def recurrent(state: Any, params: Any, frames: Any) -> Any:
    """Caches of what comes in as numbers, without tokens."""
    (k, v), place = state
    k, v = (
        jax.lax.dynamic_update_slice(old, (frames @ params[name])[:, None], (0, place, 0))
        for name, old in (("k", k), ("v", v))
    )
    return ((k, v), place + 1), attend(frames, k, v, place)


def test_caches_without_tokens_have_rows() -> None:
    (cache, *_), params = start(8), parameters()["layers"]
    weights = {name: params[name][0] for name in "kv"}
    labels = check(trace(recurrent, ((cache[0], jnp.int32(0)), weights, jnp.ones((8, WIDTH)))))
    axes = {p: x.batch_axis for p, x in labels.items() if x.batch_axis is not None}
    assert axes == {"state[0][0]": 0, "state[0][1]": 0, "frames": 0}


def denoised(params: Any, x: Any) -> Any:
    """A sampler's step: the examples come back a step further, and the weights do not."""
    return x - 0.1 * jnp.tanh(x @ params["in"]) @ params["out"]


def denoised_at_times(params: Any, x: Any, t: Any, key: Any) -> Any:
    """A time for each example, and noise."""
    hidden = jnp.tanh(x @ params["in"] + t[:, None])
    x = x - 0.1 * hidden @ params["out"] + 0.01 * jax.random.normal(key, x.shape)
    return x, (x**2).sum(-1)


def denoised_often(params: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, _: 2 * (denoised(params, x),), x, None, length=3)


def weights_in(width: int, hidden: int) -> dict[str, Any]:
    numbers = np.random.default_rng(1)
    shapes = {"in": (width, hidden), "out": (hidden, width)}
    return {name: jnp.asarray(numbers.normal(size=x) / 4) for name, x in shapes.items()}


EXAMPLES = jnp.linspace(-1.0, 1.0, 16 * 8).reshape(16, 8)
SAMPLERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "one step": (denoised, (weights_in(8, 32), EXAMPLES)),
    "square weights": (denoised, (weights_in(8, 8), EXAMPLES)),
    "several steps": (denoised_often, (weights_in(8, 32), EXAMPLES)),
    "times and noise": (
        denoised_at_times,
        (weights_in(8, 32), EXAMPLES, jnp.arange(16.0), jax.random.key(3)),
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_examples_that_come_back_are_the_batch(name: str) -> None:
    step, arguments = SAMPLERS[name]
    labels = check(trace(step, arguments))
    axes = {p: x.batch_axis for p, x in labels.items() if x.batch_axis is not None}
    assert axes == {"x": 0} | ({"t": 0} if name == "times and noise" else {})


@pytest.mark.parametrize("options", [{"method": "data"}, {"microbatches": 4}], ids=str)
@pytest.mark.parametrize("name", SAMPLERS)
def test_numbers_of_samplers_are_those_of_jit(name: str, options: dict[str, Any]) -> None:
    step, arguments = SAMPLERS[name]
    ours = autopar.compile(step, *arguments, donate_argnums=(), **options)
    pairs = zip(
        jax.tree.leaves(ours(*arguments)), jax.tree.leaves(jax.jit(step)(*arguments)), strict=True
    )
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
