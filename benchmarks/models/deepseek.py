"""A decoder of many small experts, some of them shared, as in DeepSeekMoE (Dai et al., ACL 2024).

Every token goes to 6 of 64 routed experts, and to the shared ones. Tokens are sorted by expert
within a sequence and gathered: there is no one-hot dispatch, which would be larger than the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.blocks import RotaryAttention, SwiGLU, maybe_remat

CAPACITY_FACTOR = 1.25


@dataclass(frozen=True)
class DeepSeekSize:
    """Widths, layers (the first has one large feed-forward network), heads and experts."""

    hidden: int
    layers: int
    heads: int
    dense_inner: int
    inner: int
    experts: int
    shared: int
    chosen: int
    sequence: int = 4096
    vocabulary: int = 102400


SIZES = {"16B": DeepSeekSize(2048, 28, 16, 10944, 1408, 64, 2, 6)}


def places_of(expert: jax.Array, experts: int, capacity: int) -> jax.Array:
    """The place of each choice among all experts' places; one too large where it is dropped."""
    order = jnp.argsort(expert, stable=True)
    ranked = expert[order]
    rank = jnp.arange(expert.size) - jnp.searchsorted(ranked, jnp.arange(experts))[ranked]
    place = jnp.where(rank < capacity, ranked * capacity + rank, experts * capacity)
    return jnp.zeros_like(place).at[order].set(place)


class RoutedExperts(nn.Module):
    """Feed-forward networks of which every token sees a few."""

    size: DeepSeekSize
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        size, (batch, tokens, width) = self.size, x.shape
        experts, chosen = size.experts, size.chosen
        capacity = int(CAPACITY_FACTOR * tokens * chosen / experts)
        logits = nn.Dense(experts, use_bias=False, dtype=jnp.float32, name="gate")(x)
        scores = jax.nn.softmax(logits)
        weights, choice = jax.lax.top_k(scores, chosen)
        share = jax.nn.one_hot(choice, experts).sum(2).mean(1) * experts / chosen
        balance = jnp.mean(jnp.sum(share * scores.mean(1), axis=-1))

        def sent(x: jax.Array, places: jax.Array) -> jax.Array:
            buffer = jnp.zeros((experts * capacity, width), x.dtype)
            return buffer.at[places].set(jnp.repeat(x, chosen, axis=0), mode="drop")

        places = jax.vmap(lambda c: places_of(c, experts, capacity))(choice.reshape(batch, -1))
        y = jax.vmap(sent)(x, places).reshape(batch, experts, capacity, width)
        init = nn.initializers.lecun_normal(batch_axis=0)

        def matrices(name: str, *shape: int) -> jax.Array:
            return self.param(name, init, (experts, *shape)).astype(self.dtype)

        gate = jnp.einsum("becd,edf->becf", y, matrices("gate_up", width, size.inner))
        up = jnp.einsum("becd,edf->becf", y, matrices("up", width, size.inner))
        down = matrices("down", size.inner, width)
        y = jnp.einsum("becf,efd->becd", nn.silu(gate) * up, down)
        y = y.reshape(batch, experts * capacity, width)
        y = jax.vmap(lambda y, places: y.at[places].get(mode="fill", fill_value=0))(y, places)
        y = y.reshape(batch, tokens, chosen, width)
        return jnp.einsum("btkd,btk->btd", y, weights.astype(self.dtype)), balance


class DeepSeekBlock(nn.Module):
    """Attention, and one feed-forward network or many."""

    size: DeepSeekSize
    dense: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        size, dtype = self.size, self.dtype
        x = x + RotaryAttention(size.heads, size.heads, dtype)(nn.RMSNorm(dtype=dtype)(x))
        y = nn.RMSNorm(dtype=dtype)(x)
        if self.dense:
            return x + SwiGLU(size.dense_inner, dtype)(y), jnp.zeros(())
        routed, balance = RoutedExperts(size, dtype)(y)
        return x + routed + SwiGLU(size.shared * size.inner, dtype, name="shared")(y), balance


class DeepSeek(nn.Module):
    """Tokens to logits, and the experts' balance loss."""

    size: DeepSeekSize
    dtype: Any
    remat: bool | str = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        size, dtype, balance = self.size, self.dtype, jnp.zeros(())
        x = nn.Embed(size.vocabulary, size.hidden, dtype=dtype)(tokens)
        for layer in range(size.layers):
            block = maybe_remat(DeepSeekBlock, self.remat)
            x, more = block(size, layer == 0, dtype)(x)
            balance += more
        x = nn.RMSNorm(dtype=dtype)(x)
        logits = nn.Dense(size.vocabulary, use_bias=False, dtype=dtype, name="head")(x)
        return logits, 0.001 * balance
