# mypy: disallow-untyped-defs=False
"""Recurrent networks by `jax.lax.scan` over time: batch first, time first, and Flax's `nn.RNN`."""

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


@functools.partial(jax.jit, static_argnames="dtype")
def init(key, dtype):
    """Parameters of an LSTM language model."""
    keys = jax.random.split(key, 4)
    return {
        "embed": jax.random.normal(keys[0], (data.VOCABULARY, WIDTH), dtype),
        "input": jax.random.normal(keys[1], (WIDTH, 4 * WIDTH), dtype) / 6,
        "hidden": jax.random.normal(keys[2], (WIDTH, 4 * WIDTH), dtype) / 6,
        "bias": jnp.zeros((4 * WIDTH,), dtype),
        "out": jax.random.normal(keys[3], (WIDTH, data.VOCABULARY), dtype) / 6,
    }


def cell(params, carry, x):
    """One time step on [batch, width]."""
    h, c = carry
    gates = x @ params["input"] + h @ params["hidden"] + params["bias"]
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def loss_fn(params, inputs, labels):
    """Mean cross entropy; tokens are [time, batch]."""
    x = params["embed"][inputs]
    zeros = jnp.zeros((inputs.shape[1], WIDTH), x.dtype)
    (h, _), states = jax.lax.scan(lambda carry, x: cell(params, carry, x), (zeros, zeros), x)
    logits = states @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), jnp.mean(jnp.abs(h))


def build(
    optimizer: str = "clipped_adamw", dtype: Any = jnp.float32, time_first: bool = False
) -> Case:
    """The batch is the first dimension of what the step gets, or the second (`time_first`)."""
    transformation = BY_NAME[optimizer]()

    def train_step(state, batch):
        inputs, labels = batch["inputs"], batch["labels"]
        if not time_first:
            inputs, labels = inputs.T, labels.T
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, activity), grads = gradient(state["params"], inputs, labels)
        updates, opt_state = transformation.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss, "activity": activity}

    params = init(jax.random.key(0), dtype)
    state = {"params": params, "opt_state": jax.jit(transformation.init)(params)}
    batches = []
    for i in range(data.STEPS):
        tokens = data.tokens(i, length=data.LENGTH + 1)
        tokens = tokens.T if time_first else tokens
        inputs, labels = (
            (tokens[:-1], tokens[1:]) if time_first else (tokens[:, :-1], tokens[:, 1:])
        )
        batches.append(({"inputs": inputs, "labels": labels},))
    options = {"batch_axes": (None, 1)} if time_first else {}
    return Case(train_step, state, batches, options=options)


class Classifier(nn.Module):
    """The last valid state of a recurrent layer, classified."""

    @nn.compact
    def __call__(self, x, lengths):
        states = nn.RNN(nn.OptimizedLSTMCell(WIDTH))(x, seq_lengths=lengths)
        last = jnp.take_along_axis(states, lengths[:, None, None] - 1, axis=1)[:, 0]
        return nn.Dense(10)(last)


def build_linen() -> Case:
    """Flax's `nn.RNN` on sequences of different lengths."""
    model = Classifier()

    def train_step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["x"], batch["lengths"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return jnp.mean(losses)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    batches = []
    for i in range(data.STEPS):
        x = data.vectors(i, 8 * 12).reshape(data.BATCH, 8, 12)
        lengths = data.lengths(i, length=8)
        batches.append(({"x": x, "lengths": lengths, "labels": data.classes(i)},))
    first = batches[0][0]
    params = jax.jit(model.init)(jax.random.key(0), first["x"], first["lengths"])["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=adam())
    return Case(train_step, state, batches)
