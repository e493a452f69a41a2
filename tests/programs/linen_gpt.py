# mypy: disallow-untyped-defs=False
"""A GPT in Flax linen with dropout and a tied embedding, as in Flax's guide to dropout."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from . import data
from .case import Case
from .optimizers import BY_NAME


class Block(nn.Module):
    """A pre-norm transformer block."""

    width: int
    heads: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x, mask, train):
        y = nn.LayerNorm(dtype=self.dtype, param_dtype=self.dtype)(x)
        y = nn.MultiHeadDotProductAttention(
            self.heads,
            dropout_rate=self.dropout,
            broadcast_dropout=False,
            deterministic=not train,
            use_bias=False,
            dtype=self.dtype,
            param_dtype=self.dtype,
        )(y, mask=mask)
        x = x + nn.Dropout(self.dropout, deterministic=not train)(y)
        y = nn.LayerNorm(dtype=self.dtype, param_dtype=self.dtype)(x)
        y = nn.Dense(4 * self.width, dtype=self.dtype, param_dtype=self.dtype)(y)
        y = nn.Dense(self.width, dtype=self.dtype, param_dtype=self.dtype)(nn.gelu(y))
        return x + nn.Dropout(self.dropout, deterministic=not train)(y)


class GPT(nn.Module):
    """A decoder whose output layer is its token embedding."""

    vocabulary: int = data.VOCABULARY
    width: int = 32
    layers: int = 2
    heads: int = 4
    dropout: float = 0.1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens, train=False):
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, param_dtype=self.dtype)
        positions = self.param(
            "positions", nn.initializers.normal(0.02), (tokens.shape[-1], self.width), self.dtype
        )
        x = nn.Dropout(self.dropout, deterministic=not train)(embed(tokens) + positions)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = Block(self.width, self.heads, self.dropout, self.dtype)(x, mask, train)
        return embed.attend(nn.LayerNorm(dtype=self.dtype, param_dtype=self.dtype)(x))


def train_step(state, batch, dropout_key):
    """One step; the key of a step is folded from the step's number."""
    dropout_train_key = jax.random.fold_in(dropout_key, state.step)

    def loss_fn(params):
        logits = state.apply_fn(
            {"params": params},
            batch["inputs"],
            train=True,
            rngs={"dropout": dropout_train_key},
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["labels"])
    return state, {"loss": loss, "accuracy": accuracy, "gradient_norm": optax.tree.norm(grads)}


def build(optimizer: str = "clipped_adamw", dtype: Any = jnp.float32) -> Case:
    """The GPT with one of the shared optimizers, computing in `dtype`."""
    model = GPT(dtype=dtype)
    tokens = [data.tokens(i, length=data.LENGTH + 1) for i in range(data.STEPS)]
    params = jax.jit(model.init)(jax.random.key(0), tokens[0][:, :-1])["params"]
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=BY_NAME[optimizer]()
    )
    dropout_key = jax.random.key(7)
    batches = [({"inputs": t[:, :-1], "labels": t[:, 1:]}, dropout_key) for t in tokens]
    return Case(train_step, state, batches)
