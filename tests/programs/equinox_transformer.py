# mypy: disallow-untyped-defs=False
"""A transformer in Equinox: the model itself, functions among its leaves, is part of the state."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from . import data
from .case import Case
from .optimizers import adam, clipped_adamw


class Block(eqx.Module):
    """A pre-norm transformer block."""

    attention: eqx.nn.MultiheadAttention
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, width: int, heads: int, key: jax.Array):
        key1, key2 = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(heads, width, dropout_p=0.1, key=key1)
        self.norm1 = eqx.nn.LayerNorm(width)
        self.norm2 = eqx.nn.LayerNorm(width)
        self.mlp = eqx.nn.MLP(width, width, 2 * width, depth=1, activation=jax.nn.gelu, key=key2)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, mask, key):
        key1, key2 = jax.random.split(key)
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y, mask=mask, key=key1)
        return x + self.dropout(jax.vmap(self.mlp)(jax.vmap(self.norm2)(x)), key=key2)


class Transformer(eqx.Module):
    """A decoder over one sequence; the batch comes from `jax.vmap`."""

    embed: eqx.nn.Embedding
    positions: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear
    squash: Callable

    def __init__(self, width: int, heads: int, layers: int, key: jax.Array):
        keys = jax.random.split(key, layers + 3)
        self.embed = eqx.nn.Embedding(data.VOCABULARY, width, key=keys[0])
        self.positions = 0.02 * jax.random.normal(keys[1], (data.LENGTH, width))
        self.blocks = [Block(width, heads, k) for k in keys[3:]]
        self.head = eqx.nn.Linear(width, data.VOCABULARY, key=keys[2])
        self.squash = jnp.tanh

    def __call__(self, tokens, key):
        x = jax.vmap(self.embed)(tokens) + self.positions
        mask = jnp.tril(jnp.ones((data.LENGTH, data.LENGTH), bool))
        for block, block_key in zip(
            self.blocks, jax.random.split(key, len(self.blocks)), strict=True
        ):
            x = block(x, mask, block_key)
        return jax.vmap(self.head)(self.squash(x))


def loss_fn(model, inputs, labels, key):
    """Mean cross entropy over the batch, every example with a dropout key of its own."""
    keys = jax.random.split(key, inputs.shape[0])
    logits = jax.vmap(model)(inputs, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def build() -> Case:
    """One state argument that holds the model, the optimizer's state and a key."""
    optimizer = clipped_adamw()

    def train_step(state, batch):
        model, opt_state, key = state
        key, step_key = jax.random.split(key)
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, *batch, step_key)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        model = eqx.apply_updates(model, updates)
        return (model, opt_state, key), {"loss": loss}

    model = eqx.filter_jit(Transformer)(32, 2, 2, jax.random.key(0))
    opt_state = jax.jit(optimizer.init)(eqx.filter(model, eqx.is_inexact_array))
    state = (model, opt_state, jax.random.key(5))
    batches = [(batch,) for batch in _batches()]
    return Case(train_step, state, batches, plain=eqx.filter_jit(train_step))


def build_documented() -> Case:
    """Model, optimizer state and batch as arguments of their own, as in Equinox's examples."""
    optimizer = adam()

    def make_step(model, x, y, opt_state, key):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y, key)
        updates, opt_state = optimizer.update(grads, opt_state)
        model = eqx.apply_updates(model, updates)
        return loss, model, opt_state

    model = eqx.filter_jit(Transformer)(32, 4, 1, jax.random.key(3))
    state = (model, jax.jit(optimizer.init)(eqx.filter(model, eqx.is_inexact_array)))
    batches = [(*b, jax.random.key(i)) for i, b in enumerate(_batches())]
    return Case(
        make_step,
        state,
        batches,
        plain=eqx.filter_jit(make_step),
        arguments=lambda state, batch: (state[0], batch[0], batch[1], state[1], batch[2]),
        next_state=lambda state, outputs: (outputs[1], outputs[2]),
    )


def _batches():
    tokens = [data.tokens(i, length=data.LENGTH + 1) for i in range(data.STEPS)]
    return [(t[:, :-1], t[:, 1:]) for t in tokens]
