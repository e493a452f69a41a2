"""Megatron's methods and expert parallelism, asked for."""

from __future__ import annotations

import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_jit import equals_plain_jit

import autopar
from autopar.base.cluster import Cluster
from autopar.base.errors import BatchArgumentError, OptionError
from sharding.layers import mixture, mixture_shapes, norm
from sharding.steps import arrays, momentum_shapes, momentum_step, shaped

H100 = Cluster.preset("dgx-h100")
Weights = Any


def block(p: Weights, x: Any, heads: int) -> Any:
    rows, length, width = x.shape
    y = norm(x, p["norm_1"])
    q, k, v = (
        (y @ p[name].astype(x.dtype)).reshape(rows, length, heads, width // heads) for name in "qkv"
    )
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / math.sqrt(width // heads)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(x.dtype), v)
    x = x + mixed.reshape(rows, length, width) @ p["o"].astype(x.dtype)
    hidden = jax.nn.gelu(norm(x, p["norm_2"]) @ p["up"].astype(x.dtype))
    return x + hidden @ p["down"].astype(x.dtype)


def block_shapes(width: int) -> Weights:
    square = {name: shaped(width, width) for name in "qkvo"}
    norms = {"norm_1": shaped(width), "norm_2": shaped(width)}
    return {**square, **norms, "up": shaped(width, 4 * width), "down": shaped(4 * width, width)}


def descent(loss_fn: Callable[[Weights, Any], Any]) -> Callable[[Weights, Any], Any]:
    def step(weights: Weights, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

    return step


def large(step: Any, weights: Weights, x: Any, method: str) -> tuple[Counter[str], dict[str, Any]]:
    """The collectives of activations on eight devices, and how the weights lie."""
    plan = autopar.plan(step, weights, x, cluster=H100, method=method, microbatches=1, stages=1)
    (stage,) = plan.stages
    moved = Counter(c.kind for c in stage.collectives if c.bytes >= 2**20)
    return moved, {t.path.split("'")[1]: t.spec for t in plan.inputs if "[" in t.path}


WIDTH = 8192
COLUMNS, ROWS = ((), ("x",)), (("x",), ())


@pytest.fixture(scope="module")
def wide() -> tuple[Any, Weights, Any]:
    """One block behind a product, so that the block's input has a gradient too."""

    def loss(weights: Weights, x: Any) -> Any:
        x = block(weights, x * weights["first"].astype(x.dtype), 64)
        return (x.astype(jnp.float32) ** 2).mean()

    weights = {**block_shapes(WIDTH), "first": shaped(WIDTH)}
    return descent(loss), weights, shaped(2, 2048, WIDTH, dtype=jnp.bfloat16)


def test_megatron_completes_four_sums_a_layer(wide: tuple[Any, Weights, Any]) -> None:
    """Two forward and two backward."""
    moved, specs = large(*wide, method="megatron")
    assert moved == {"all-reduce": 4}
    assert {name: specs[name] for name in ("q", "k", "v", "up")} == dict.fromkeys(
        ("q", "k", "v", "up"), COLUMNS
    )
    assert specs["o"] == specs["down"] == ROWS
    assert specs["norm_1"] == ((),)


def test_sequence_parallelism_scatters_and_gathers_in_their_place(
    wide: tuple[Any, Weights, Any],
) -> None:
    moved, specs = large(*wide, method="megatron_sp")
    assert moved == {"all-gather": 4, "reduce-scatter": 4}
    assert specs["q"] == specs["up"] == COLUMNS and specs["o"] == specs["down"] == ROWS


def mixture_loss(weights: Weights, x: Any) -> Any:
    x = mixture(weights, x * weights["scale"].astype(x.dtype))
    return (x.astype(jnp.float32) ** 2).mean()


def grouped(experts: int) -> Callable[[Weights, Any], Any]:
    def loss(weights: Weights, x: Any) -> Any:
        rows = (x * weights["scale"]).reshape(-1, x.shape[-1])
        gates = jax.nn.softmax(rows @ weights["router"])
        expert = gates.argmax(-1)
        order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=experts).astype(jnp.int32)
        hidden = jax.nn.gelu(jax.lax.ragged_dot(rows[order], weights["up"], sizes))
        made = jax.lax.ragged_dot(hidden, weights["down"], sizes)
        return ((rows + made[jnp.argsort(order)] * gates.max(-1, keepdims=True)) ** 2).mean()

    return loss


def whole_batch(weights: Weights, x: Any) -> Any:
    """Experts have places for the rows of all examples together."""
    rows = (x * weights["scale"]).reshape(1, -1, x.shape[-1])
    return (mixture(weights, rows) ** 2).mean()


def scaled_mixture(experts: int, width: int, hidden: int) -> Weights:
    return {"scale": shaped(width), **mixture_shapes(experts, width, hidden)}


@pytest.mark.parametrize("loss", [mixture_loss, grouped(8)], ids=["one-hot", "ragged"])
def test_experts_are_sent_their_tokens(loss: Any) -> None:
    x = shaped(16, 2048, 4096, dtype=jnp.bfloat16)
    weights = scaled_mixture(8, 4096, 14336)
    moved, specs = large(descent(loss), weights, x, "expert")
    assert moved == {"all-to-all": 4}
    assert specs["up"] == specs["down"] == (("x",), (), ())
    assert specs["router"] == ((), ())


def gpt_loss(weights: Weights, tokens: Any) -> Any:
    x = weights["embedding"][tokens] + weights["positions"]
    for layer in weights["layers"]:
        x = block(layer, x, 8)
    log = jax.nn.log_softmax(norm(x, weights["norm"]) @ weights["head"])
    return -jnp.take_along_axis(log, jnp.roll(tokens, -1, 1)[..., None], -1).mean()


GPT = {
    "embedding": shaped(64, 32),
    "positions": shaped(16, 32),
    "layers": [block_shapes(32)] * 2,
    "norm": shaped(32),
    "head": shaped(32, 64),
}
TOKENS = np.random.default_rng(1).integers(0, 64, (16, 16)).astype(np.int32)
FLOATS = arrays(shaped(16, 16, 32))
PROGRAMS: dict[str, tuple[Any, Weights, Any]] = {
    "megatron": (gpt_loss, GPT, TOKENS),
    "megatron_sp": (gpt_loss, GPT, TOKENS),
    "expert": (mixture_loss, scaled_mixture(8, 32, 64), FLOATS),
    "expert, whole batch": (whole_batch, scaled_mixture(8, 32, 64), FLOATS),
    "expert, ragged": (grouped(8), scaled_mixture(8, 32, 64), FLOATS),
}


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("megatron", {"microbatches": 4}),
        ("megatron", {"microbatches": 4, "stages": 2, "logical_mesh": (2, 2)}),
        ("megatron_sp", {"microbatches": 4, "logical_mesh": (2, 4)}),
        ("megatron_sp", {"microbatches": 4, "stages": 2}),
        ("expert", {"microbatches": 2}),
        ("expert", {"microbatches": 1, "logical_mesh": (2, 4)}),
        ("expert, whole batch", {"microbatches": 1}),
        ("expert, ragged", {"microbatches": 1}),
    ],
)
def test_numbers_are_those_of_one_device(program: str, options: dict[str, Any]) -> None:
    loss, shapes, batch = PROGRAMS[program]
    weights = jax.tree.map(lambda w: 0.2 * w, arrays(shapes))
    method = program.split(",")[0]
    compiled = equals_plain_jit(
        descent(loss), weights, batch, method=method, rtol=1e-4, atol=1e-5, **options
    )
    if method == "megatron_sp":
        kinds = {c.kind for stage in compiled.plan.stages for c in stage.collectives}
        assert {"reduce-scatter", "all-gather"} <= kinds


def test_loops_that_are_not_there() -> None:
    def linear(weights: Weights, x: Any) -> Any:
        return (x @ weights["in"]).mean()

    shapes = {"in": shaped(8, 1)}
    for method, missing in (
        ("megatron", "no loop inside of a layer"),
        ("megatron_sp", "no loop inside of a layer"),
        ("expert", "no experts"),
    ):
        with pytest.raises(OptionError, match=missing) as caught:
            autopar.plan(descent(linear), shapes, shaped(16, 8), cluster=H100, method=method)
        assert "method='auto'" in str(caught.value)
    with pytest.raises(OptionError, match="no sequence") as caught:
        autopar.plan(momentum_step, *momentum_shapes(), cluster=H100, method="megatron_sp")
    assert "method='megatron'" in str(caught.value)
    plan = autopar.plan(momentum_step, *momentum_shapes(), cluster=H100, method="megatron")
    assert {t.path: t.spec for t in plan.inputs if t.role == "state"}.popitem()[1] == ROWS


def test_loops_that_do_not_divide() -> None:
    shapes = scaled_mixture(4, 32, 64), shaped(16, 16, 32)
    with pytest.raises(OptionError, match="into 8 parts") as caught:
        autopar.plan(descent(mixture_loss), *shapes, cluster=H100, method="expert")
    assert "a loop of 4" in str(caught.value) and "logical_mesh" in str(caught.value)


@pytest.mark.parametrize("method", ["hsdp", "expert"])
def test_stages_are_chosen_where_one_mesh_has_too_many_devices(method: str) -> None:
    """Four microbatches of four examples do not divide among eight devices, but among four."""
    nodes = Cluster.preset("cpu", nodes=2, devices_per_node=4)
    one = scaled_mixture(8, 32, 64)
    shapes = {"first": one, "second": one}, shaped(16, 16, 32)

    def two_layers(weights: Weights, x: Any) -> Any:
        return mixture_loss(weights["first"], mixture(weights["second"], x))

    step = descent(two_layers)
    options: dict[str, Any] = {"cluster": nodes, "method": method, "microbatches": 4}
    plan = autopar.plan(step, *shapes, stages="auto", **options)
    assert len(plan.stages) > 1
    with pytest.raises(BatchArgumentError, match="among 8 devices"):
        autopar.plan(step, *shapes, stages=1, **options)


def projected(order: str) -> Callable[[Weights, Any], Any]:
    """Attention whose queries, keys and values are one projection, with its columns so ordered."""

    def loss(p: Weights, x: Any) -> Any:
        rows, length, width = x.shape
        made = x @ p["qkv"]
        if order == "parts":
            q, k, v = (y.reshape(rows, length, 8, width // 8) for y in jnp.split(made, 3, axis=-1))
        elif order == "parts, heads":
            q, k, v = jnp.moveaxis(made.reshape(rows, length, 3, 8, width // 8), 2, 0)
        else:
            q, k, v = jnp.moveaxis(made.reshape(rows, length, 8, 3, width // 8), 3, 0)
        scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        mixed = jnp.einsum("bhts,bshd->bthd", scores, v)
        return jnp.mean((x + mixed.reshape(rows, length, width) @ p["o"]) ** 2)

    return loss


@pytest.mark.parametrize(
    ("order", "told"),
    [("parts", "(3, 128)"), ("parts, heads", "(3, 8, 16)"), ("heads, parts", None)],
)
def test_a_fused_projection_that_cannot_be_cut_is_told(order: str, told: str | None) -> None:
    weights = {"qkv": shaped(128, 384), "o": shaped(128, 128)}
    options: dict[str, Any] = {"method": "megatron", "microbatches": 1, "stages": 1}

    def plan() -> autopar.Plan:
        return autopar.plan(
            descent(projected(order)), weights, shaped(8, 32, 128), cluster=H100, **options
        )

    if told is None:
        kinds = {c.kind for c in plan().stages[0].collectives}
        assert kinds == {"all-reduce"}
        return
    with pytest.warns(autopar.errors.AutoparWarning, match="384 columns of a fused") as caught:
        plan()
    (text,) = (str(warning.message) for warning in caught)
    assert told in text and "test_loop_methods.py:" in text


def apart(heads: int, width: int) -> tuple[Any, Weights, Any]:
    """A layer with a projection for each of queries, keys and values, and its arguments."""

    def loss(p: Weights, x: Any) -> Any:
        shape = (*x.shape[:2], heads, width // heads)
        q, k, v = ((x @ p[n]).reshape(shape) for n in "qkv")
        mixed = jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
        x = x + mixed.reshape(x.shape) @ p["o"]
        return jnp.mean((x + jnp.tanh(x @ p["up"]) @ p["down"]).astype(jnp.float32) ** 2)

    half = functools.partial(shaped, dtype=jnp.bfloat16)
    weights = {name: half(width, width) for name in "qkvo"}
    weights |= {"up": half(width, 2 * width), "down": half(2 * width, width)}
    return descent(loss), weights, half(8, 128, width)


def test_heads_that_devices_do_not_divide_are_told() -> None:
    """Twenty heads of separate projections on eight devices: nothing is fused."""

    step, weights, x = apart(heads=20, width=1280)
    asked: dict[str, Any] = {"method": "megatron", "stages": 1, "microbatches": 1}
    asked["cluster"] = autopar.Cluster.preset("dgx-h100")
    with pytest.warns(autopar.errors.AutoparWarning, match="cannot share 20 heads") as caught:
        whole = autopar.plan(step, weights, x, **asked)
    (text,) = (" ".join(str(warning.message).split()) for warning in caught)
    assert "8 does not divide 20" in text and "an axis of 4 devices" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked["logical_mesh"] = (2, 4)
        cut = autopar.plan(step, weights, x, **asked)
    assert cut.estimates.peak_bytes_per_device < whole.estimates.peak_bytes_per_device


def test_a_tied_vocabulary_is_cut_on_its_other_stage_too() -> None:
    """What the last stage receives of the first one's weights is a weight there."""

    def loss(p: Weights, x: Any) -> Any:
        tokens, targets = x[..., :-1], x[..., 1:]
        hidden = p["table"][tokens]
        for one in p["blocks"]:
            hidden = block(one, hidden, 8)
        logits = hidden @ p["table"].T
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()

    width, vocabulary = 512, 4096
    weights = {"table": shaped(vocabulary, width), "blocks": [block_shapes(width)] * 2}
    x = jax.ShapeDtypeStruct((32, 129), jnp.int32)
    plan = autopar.plan(
        descent(loss), weights, x, cluster=H100, method="megatron", logical_mesh=(1, 4), stages=[1],
        microbatches=4, memory_limit=10**12,
    )  # fmt: skip
    last = plan.stages[-1]
    whole = vocabulary * width * 4
    assert not [c for c in last.collectives if c.kind == "all-gather" and c.bytes >= whole]


def test_fewer_heads_than_devices_are_told_as_heads() -> None:
    """Two heads of 128 have as many columns as two parts of 128 would."""
    step, weights, x = apart(heads=2, width=256)
    asked: dict[str, Any] = {"method": "megatron", "stages": 1, "microbatches": 1}
    with pytest.warns(autopar.errors.AutoparWarning, match="cannot share 2 heads"):
        autopar.plan(step, weights, x, cluster=H100, **asked)


def test_heads_that_are_printed_are_told() -> None:
    """What prints them has no results."""
    step, weights, x = apart(heads=2, width=256)

    def printing(weights: Weights, x: Any) -> Any:
        jax.debug.print("{}", (x @ weights["q"]).reshape(8, 128, 2, 128))
        return step(weights, x)

    asked: dict[str, Any] = {"method": "megatron", "stages": 1, "microbatches": 1}
    with pytest.warns(autopar.errors.AutoparWarning, match="cannot share 2 heads"):
        autopar.plan(printing, weights, x, cluster=H100, **asked)


@pytest.mark.parametrize("rows", [32, 64])
def test_a_layer_that_is_left_out_by_chance_is_cut(rows: int) -> None:
    """As many rows as columns: what a branch fills with zeros is not both."""

    def loss(p: Weights, x: Any) -> Any:
        def layer(h: Any) -> Any:
            return h + jnp.tanh(h @ p["up"]) @ p["down"]

        h = x @ p["first"]
        h = jax.lax.cond(jnp.sum(p["gate"]) > 0, layer, lambda h: h, h)
        return jnp.mean((h @ p["last"]) ** 2)

    weights = {"first": shaped(8, 16), "up": shaped(16, 32), "down": shaped(32, 16)}
    weights |= {"last": shaped(16, 3), "gate": shaped(2)}
    asked: dict[str, Any] = {"method": "megatron", "stages": 1, "microbatches": 1}
    plan = autopar.plan(descent(loss), weights, shaped(rows, 8), cluster=H100, **asked)
    (up,) = (leaf for leaf in plan.inputs if "'up'" in leaf.path)
    assert up.spec == COLUMNS
