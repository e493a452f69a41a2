# mypy: disallow-untyped-defs=False
"""Models over time and over graphs: state spaces, linear attention, Fourier mixing, odd solvers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.ode import odeint
from programs import Case, data

from .common import TOKENS, WIDTH, dense_layers, mlp, next_token_loss, normal, rms_norm, supervised


def _token_params(**more):
    return {
        "embed": normal(1, data.VOCABULARY, WIDTH) * 3,
        "head": normal(2, WIDTH, data.VOCABULARY),
        **more,
    }


def build_state_space() -> Case:
    """A gated linear recurrence by `jax.lax.associative_scan`, as Mamba and its kin have it."""

    def recurrence(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    def loss_fn(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        for layer in params["layers"]:
            y = rms_norm(x, layer["scale"])
            decay = jax.nn.sigmoid(y @ layer["decay"])
            _, state = jax.lax.associative_scan(recurrence, (decay, y @ layer["in"]), axis=1)
            x = x + (state * jax.nn.silu(y @ layer["gate"])) @ layer["out"]
        return next_token_loss(x @ params["head"], tokens)

    names = ("decay", "in", "gate", "out")
    layers = [
        {"scale": jnp.ones(WIDTH)}
        | {n: normal(9 * i + j, WIDTH, WIDTH) for j, n in enumerate(names)}
        for i in range(2)
    ]
    return supervised(loss_fn, _token_params(layers=layers), TOKENS)


def build_linear_attention() -> Case:
    """Attention without a softmax, its sums over the past by `cumsum` and `cumlogsumexp`."""

    def loss_fn(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        q, k, v = (x @ params[name] for name in "qkv")
        k = jnp.exp(k - jax.lax.cumlogsumexp(k, axis=1))
        sums = jnp.cumsum(k[..., :, None] * v[..., None, :], axis=1)
        x = x + jnp.einsum("btk,btkv->btv", jax.nn.softmax(q), sums)
        return next_token_loss(x @ params["head"], tokens)

    weights = {
        name: normal(10 + i, WIDTH, 8 if name != "v" else WIDTH) for i, name in enumerate("qkv")
    }
    return supervised(loss_fn, _token_params(**weights), TOKENS)


def build_fourier() -> Case:
    """FNet: tokens are mixed by a Fourier transform over time and width."""

    def loss_fn(params, batch):
        x = params["embed"][batch["tokens"]]
        for w in params["layers"]:
            x = x + jnp.real(jnp.fft.fft(jnp.fft.fft(x, axis=-1), axis=-2)) / 20
            x = rms_norm(x + jax.nn.gelu(x @ w), jnp.ones(WIDTH))
        logits = x.mean(axis=1) @ params["classes"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    params = {
        "embed": normal(1, data.VOCABULARY, WIDTH) * 3,
        "layers": [normal(i, WIDTH, WIDTH) for i in range(2)],
        "classes": normal(9, WIDTH, 10),
    }
    batches = [({"tokens": data.tokens(i), "label": data.classes(i)},) for i in range(data.STEPS)]
    return supervised(loss_fn, params, batches)


def build_chunked_recurrence() -> Case:
    """A recurrence over chunks of time, each chunk checkpointed."""

    def loss_fn(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        rows, time, width = x.shape
        chunks = jnp.moveaxis(x.reshape(rows, 4, time // 4, width), 1, 0)

        def cell(state, x):
            state = jnp.tanh(state @ params["recurrent"] + x @ params["in"])
            return state, state

        @jax.checkpoint
        def chunk(state, xs):
            state, ys = jax.lax.scan(cell, state, jnp.swapaxes(xs, 0, 1))
            return state, jnp.swapaxes(ys, 0, 1)

        _, ys = jax.lax.scan(chunk, jnp.zeros((rows, width)), chunks)
        ys = jnp.moveaxis(ys, 0, 1).reshape(x.shape)
        return next_token_loss(ys @ params["head"], tokens)

    weights = {"recurrent": normal(3, WIDTH, WIDTH), "in": normal(4, WIDTH, WIDTH)}
    return supervised(loss_fn, _token_params(**weights), TOKENS)


def build_alignment() -> Case:
    """Connectionist temporal classification, by Optax."""

    def loss_fn(params, batch):
        logits = mlp(params, batch["frames"])
        lengths = batch["lengths"][:, None]
        frame_padding = (jnp.arange(16) >= jnp.maximum(lengths, 12)).astype(jnp.float32)
        label_padding = (jnp.arange(5) >= lengths // 4 + 1).astype(jnp.float32)
        losses = optax.ctc_loss(logits, frame_padding, batch["labels"], label_padding)
        return losses.mean()

    batches = []
    for i in range(data.STEPS):
        frames = np.random.default_rng(i).normal(size=(data.BATCH, 16, 12)).astype(np.float32)
        labels = data.tokens(i, length=5) % 9 + 1
        batches.append(({"frames": frames, "labels": labels, "lengths": data.lengths(i)},))
    return supervised(loss_fn, dense_layers(3, 12, 32, 10), batches)


def build_ode() -> Case:
    """A neural differential equation through JAX's own adaptive solver and its adjoint."""

    def loss_fn(params, batch):
        x, label = batch
        matrix = params["constant"]

        def field(y, t, layers):
            return jnp.tanh(mlp(layers, y)) - 0.1 * t * y

        solve = functools.partial(odeint, field, rtol=1e-5, atol=1e-5)
        times = jnp.array([0.0, 0.5, 1.0])
        end = jax.vmap(lambda y: solve(y, times, params["field"])[-1])(x @ matrix)
        logits = mlp(params["classes"], end)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    params = {
        "constant": normal(8, 24, 6),
        "field": dense_layers(1, 6, 12, 6),
        "classes": dense_layers(5, 6, 10),
    }
    batches = [((data.vectors(i), data.classes(i)),) for i in range(data.STEPS)]
    return supervised(loss_fn, params, batches, optimizer=optax.sgd(0.05))


def build_solve() -> Case:
    """A layer that solves a small linear system for every example, and a log-determinant."""

    def loss_fn(params, batch):
        x, label = batch
        h = mlp(params["in"], x)
        matrices = h[:, :, None] * h[:, None, :] / 8 + 2 * jnp.eye(8)
        right = x @ params["right"]
        solved = jax.vmap(jnp.linalg.solve)(matrices, right)
        inverse = jax.vmap(jnp.linalg.inv)(matrices)
        _, logdet = jnp.linalg.slogdet(matrices)
        logits = jnp.concatenate([solved, inverse[:, 0], logdet[:, None]], -1) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    params = {
        "in": dense_layers(1, 24, 16, 8),
        "right": normal(4, 24, 8),
        "out": normal(5, 17, 10),
    }
    batches = [((data.vectors(i), data.classes(i)),) for i in range(data.STEPS)]
    return supervised(loss_fn, params, batches)


def build_products() -> Case:
    """Survival probabilities by `cumprod`, running maxima by `cummax`, ranks by sorting."""

    def loss_fn(params, batch):
        x, label = batch
        hazards = jax.nn.sigmoid(mlp(params, x))
        survival = jnp.cumprod(1 - hazards, axis=1)
        picked = jnp.take_along_axis(survival, label[:, None], axis=1)[:, 0]
        highest = jax.lax.cummax(hazards, axis=1)[:, 5]
        top, _ = jax.lax.top_k(hazards, 3)
        middle = jnp.sort(hazards, axis=1)[:, 4]
        return -jnp.log(picked + 1e-3).mean() + jnp.mean(highest + middle) + top.mean()

    batches = [((data.vectors(i), data.classes(i)),) for i in range(data.STEPS)]
    return supervised(loss_fn, dense_layers(2, 24, 32, 10), batches)


def build_graphs() -> Case:
    """Message passing over one batch of edges: nodes and edges have leading sizes of their own."""
    nodes, edges = 64, 192

    def loss_fn(params, graph):
        h = graph["nodes"] @ params["in"]
        for layer in params["layers"]:
            pairs = jnp.concatenate([h[graph["senders"]], h[graph["receivers"]]], axis=-1)
            messages = mlp(layer, pairs) * graph["weights"][:, None]
            total = jax.ops.segment_sum(messages, graph["receivers"], nodes)
            top = jax.ops.segment_max(messages, graph["receivers"], nodes)
            h = h + total + jnp.where(jnp.isfinite(top), top, 0)
        logits = h @ params["out"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, graph["labels"])
        return jnp.sum(losses * graph["mask"]) / jnp.maximum(jnp.sum(graph["mask"]), 1)

    params = {
        "in": normal(1, 12, 16),
        "layers": [dense_layers(10 * i, 32, 24, 16) for i in range(1, 3)],
        "out": normal(2, 16, 5),
    }
    batches = []
    for i in range(data.STEPS):
        rng = np.random.default_rng([7, i])
        graph = {
            "nodes": rng.normal(size=(nodes, 12)).astype(np.float32),
            "labels": rng.integers(0, 5, nodes).astype(np.int32),
            "mask": (rng.random(nodes) < 0.6).astype(np.float32),
            "senders": rng.integers(0, nodes, edges).astype(np.int32),
            "receivers": rng.integers(0, nodes, edges).astype(np.int32),
            "weights": rng.random(edges).astype(np.float32),
        }
        batches.append((graph,))
    return supervised(loss_fn, params, batches)
