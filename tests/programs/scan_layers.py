# mypy: disallow-untyped-defs=False
"""Transformers whose layers are one scan with rematerialization, in plain JAX and in Flax linen."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from . import data
from .case import Case
from .optimizers import BY_NAME, adam

WIDTH = 32
HEADS = 4
LAYERS = 3


@functools.partial(jax.jit, static_argnames="dtype")
def init(key, dtype):
    """Parameters of all layers, stacked along a leading axis."""
    keys = jax.random.split(key, 6)

    def normal(key, *shape):
        return jax.random.normal(key, shape, dtype) / jnp.sqrt(jnp.asarray(shape[-2], dtype))

    return {
        "embed": normal(keys[0], data.VOCABULARY, WIDTH),
        "layers": {
            "scale": jnp.ones((LAYERS, 2, WIDTH), dtype),
            "qkv": normal(keys[1], LAYERS, WIDTH, 3 * WIDTH),
            "out": normal(keys[2], LAYERS, WIDTH, WIDTH),
            "up": normal(keys[3], LAYERS, WIDTH, 4 * WIDTH),
            "down": normal(keys[4], LAYERS, 4 * WIDTH, WIDTH),
        },
        "head": normal(keys[5], WIDTH, data.VOCABULARY),
    }


def rms_norm(x, scale):
    """Root-mean-square normalisation over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-3) * scale


def layer(x, params):
    """One layer on [batch, length, width]."""
    y = rms_norm(x, params["scale"][0]) @ params["qkv"]
    q, k, v = jnp.split(y.reshape(*y.shape[:2], HEADS, 3 * WIDTH // HEADS), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1]).astype(x.dtype)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
    x = x + y @ params["out"]
    y = jax.nn.silu(rms_norm(x, params["scale"][1]) @ params["up"])
    return x + y @ params["down"], None


def loss_fn(params, tokens):
    """Mean cross entropy of the next token."""
    x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][tokens[:, :-1]], params["layers"])
    logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def build(optimizer: str = "clipped_adamw", dtype: Any = jnp.float32) -> Case:
    """The layers written with `jax.lax.scan`; the author decorated the step with `jax.jit`."""
    transformation = BY_NAME[optimizer]()

    @jax.jit
    def train_step(state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens)
        updates, opt_state = transformation.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        state = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
        return state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}

    params = init(jax.random.key(0), dtype)
    state = {
        "params": params,
        "opt_state": jax.jit(transformation.init)(params),
        "step": jnp.zeros((), jnp.int32),
    }
    batches = [(data.tokens(i, length=data.LENGTH + 1),) for i in range(data.STEPS)]
    return Case(train_step, state, batches, plain=train_step)


class LinenLayer(nn.Module):
    """A residual layer with dropout, for `nn.scan`."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))
        y = nn.Dropout(0.1, deterministic=False)(nn.Dense(WIDTH)(nn.relu(y)))
        return x + y, None


class LinenStack(nn.Module):
    """Layers by `nn.scan` over `nn.remat`, every layer with a dropout key of its own."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(data.VOCABULARY, WIDTH)(tokens)
        stack = nn.scan(
            nn.remat(LinenLayer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )
        x, _ = stack()(x, None)
        return nn.Dense(data.VOCABULARY)(x)


def build_linen() -> Case:
    """The layers written with `nn.scan` and `nn.remat`."""
    model = LinenStack()

    def train_step(state, batch, key):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["inputs"], rngs={"dropout": key})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    tokens = [data.tokens(i, length=data.LENGTH + 1) for i in range(data.STEPS)]
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.jit(model.init)(keys, tokens[0][:, :-1])["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=adam())
    batches = [
        ({"inputs": t[:, :-1], "labels": t[:, 1:]}, jax.random.key(10 + i))
        for i, t in enumerate(tokens)
    ]
    return Case(train_step, state, batches)
