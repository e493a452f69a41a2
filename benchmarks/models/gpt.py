"""GPT in mixed precision, at the sizes of Alpa's evaluation (Zheng et al., OSDI 2022, Table 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.blocks import CausalSelfAttention, GeluMLP, maybe_remat


@dataclass(frozen=True)
class GPTSize:
    """Hidden width, layers and heads."""

    hidden: int
    layers: int
    heads: int
    sequence: int = 1024
    vocabulary: int = 51200


SIZES = {
    "125M": GPTSize(768, 12, 12),
    "350M": GPTSize(1024, 24, 16),
    "760M": GPTSize(1536, 24, 16),
    "1.3B": GPTSize(2048, 24, 32),
    "2.6B": GPTSize(2560, 32, 32),
    "6.7B": GPTSize(4096, 32, 32),
    "15B": GPTSize(5120, 48, 40),
    "39B": GPTSize(8192, 48, 64),
    "76B": GPTSize(10240, 60, 80),
}


class Block(nn.Module):
    """A transformer block with the norms before attention and feed-forward."""

    heads: int
    dtype: Any
    attention: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + CausalSelfAttention(self.heads, self.dtype, self.attention)(y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        return x + GeluMLP(4 * x.shape[-1], self.dtype)(y)


class GPT(nn.Module):
    """A decoder with learned positions and tied embeddings: tokens to logits."""

    size: GPTSize
    dtype: Any
    remat: bool | str = False
    attention: str | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        size = self.size
        embed = nn.Embed(size.vocabulary, size.hidden, dtype=self.dtype)
        places = nn.Embed(size.sequence, size.hidden, dtype=self.dtype)
        x = embed(tokens) + places(jnp.arange(tokens.shape[-1]))
        block = maybe_remat(Block, self.remat)
        for _ in range(size.layers):
            x = block(size.heads, self.dtype, self.attention)(x)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))
