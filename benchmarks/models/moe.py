"""A GPT whose every other block is a mixture of experts, as in GShard (Lepikhin et al., ICLR 2021).

Sizes are those of Alpa's evaluation (Zheng et al., OSDI 2022, Table 6). Tokens are routed in groups
of 2,048: a batch holds groups, each of a few whole sequences, so that its examples are independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.blocks import CausalSelfAttention, GeluMLP, maybe_remat

CAPACITY_FACTOR = 2  # an expert takes at most this multiple of its share of a group's tokens


@dataclass(frozen=True)
class MoESize:
    """Hidden width, layers, heads, and experts in every other layer."""

    hidden: int
    layers: int
    heads: int
    experts: int
    sequence: int = 1024
    vocabulary: int = 32000
    group: int = 2048


SIZES = {
    "380M": MoESize(768, 8, 16, 8),
    "690M": MoESize(768, 8, 16, 16),
    "1.3B": MoESize(768, 16, 16, 16),
    "2.4B": MoESize(1024, 16, 16, 16),
    "10B": MoESize(1536, 16, 16, 32),
    "27B": MoESize(2048, 16, 16, 48),
    "70B": MoESize(2048, 32, 16, 64),
}


def top2_gates(logits: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """What each expert's places take of each token, `[group, token, expert, place]`; the balance.

    Every token goes to its two best experts. Within a group, first choices are served before second
    ones, and what exceeds an expert's capacity is dropped.
    """
    gates = jax.nn.softmax(logits)
    experts = gates.shape[-1]
    first = jax.nn.one_hot(gates.argmax(-1), experts)
    second = jax.nn.one_hot((gates * (1 - first)).argmax(-1), experts)
    balance = experts * jnp.mean(jnp.sum(gates.mean(1) * first.mean(1), axis=-1))
    weights = [jnp.sum(gates * chosen, axis=-1) for chosen in (first, second)]
    total = weights[0] + weights[1] + 1e-9
    before, combined = jnp.zeros_like(first[:, :1]), jnp.zeros((*gates.shape, capacity))
    for chosen, weight in zip((first, second), weights, strict=True):
        place = jnp.sum((jnp.cumsum(chosen, axis=1) - 1 + before) * chosen, axis=-1)
        before = before + chosen.sum(1, keepdims=True)
        where = jax.nn.one_hot(place.astype(jnp.int32), capacity)  # nowhere beyond the capacity
        combined += jnp.einsum("gs,gse,gsc->gsec", weight / total, chosen, where)
    return combined, balance


class Experts(nn.Module):
    """Feed-forward networks of which every token sees two."""

    experts: int
    hidden: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens, width = x.shape[1:]
        capacity = CAPACITY_FACTOR * tokens // self.experts
        logits = nn.Dense(self.experts, use_bias=False, dtype=jnp.float32, name="gate")(x)
        combined, balance = top2_gates(logits, capacity)
        dispatched = (combined > 0).astype(self.dtype)
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.experts, width, self.hidden))
        down = self.param("down", init, (self.experts, self.hidden, width))
        y = jnp.einsum("gsec,gsm->egcm", dispatched, x)
        y = nn.gelu(jnp.einsum("egcm,emh->egch", y, up.astype(self.dtype)))
        y = jnp.einsum("egch,ehm->egcm", y, down.astype(self.dtype))
        return jnp.einsum("gsec,egcm->gsm", combined.astype(self.dtype), y), balance


class MoEBlock(nn.Module):
    """A transformer block; with experts, or with one feed-forward network."""

    size: MoESize
    experts: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        size = self.size
        flat = x.reshape(-1, size.sequence, size.hidden)
        y = CausalSelfAttention(size.heads, self.dtype)(nn.LayerNorm(dtype=self.dtype)(flat))
        x = x + y.reshape(x.shape)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        if not self.experts:
            return x + GeluMLP(8 * size.hidden, self.dtype)(y), jnp.zeros(())
        y, balance = Experts(size.experts, 8 * size.hidden, self.dtype)(y)
        return x + y, balance


class MoE(nn.Module):
    """A decoder with learned positions and tied embeddings.

    Tokens `[groups, sequences, sequence]` to logits, and the experts' balance loss.
    """

    size: MoESize
    dtype: Any
    remat: bool | str = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        size, balance = self.size, jnp.zeros(())
        embed = nn.Embed(size.vocabulary, size.hidden, dtype=self.dtype)
        places = nn.Embed(size.sequence, size.hidden, dtype=self.dtype)
        x = embed(tokens) + places(jnp.arange(size.sequence))
        x = x.reshape(tokens.shape[0], size.group, size.hidden)
        block = maybe_remat(MoEBlock, self.remat)
        for layer in range(size.layers):
            x, more = block(size, layer % 2 == 1, self.dtype)(x)
            balance += more
        logits = embed.attend(nn.LayerNorm(dtype=self.dtype)(x))
        return logits.reshape(*tokens.shape, size.vocabulary), 0.01 * balance
