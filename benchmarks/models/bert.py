"""BERT, trained on masked tokens with dropout (Devlin et al., NAACL 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.blocks import heads_apart, maybe_remat


@dataclass(frozen=True)
class BertSize:
    """Hidden width, layers and heads."""

    hidden: int
    layers: int
    heads: int
    sequence: int = 512
    vocabulary: int = 30522
    dropout: float = 0.1


SIZES = {"base": BertSize(768, 12, 12), "large": BertSize(1024, 24, 16)}


class BertBlock(nn.Module):
    """Attention and feed-forward network, each dropped out, added, and normalized afterwards."""

    size: BertSize
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, is_token: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype

        def projected(name: str) -> jax.Array:
            return heads_apart(nn.Dense(size.hidden, dtype=dtype, name=name)(x), size.heads)

        def dropped(y: jax.Array) -> jax.Array:
            return nn.Dropout(size.dropout, deterministic=False)(y)

        mask = is_token[:, None, None, :]
        rng = self.make_rng("dropout")
        y = nn.dot_product_attention(
            *map(projected, ("query", "key", "value")),
            mask=mask,
            dropout_rng=rng,
            dropout_rate=size.dropout,
            deterministic=False,
            dtype=dtype,
        )
        y = nn.Dense(size.hidden, dtype=dtype)(y.reshape(x.shape))
        x = nn.LayerNorm(dtype=dtype)(x + dropped(y))
        y = nn.gelu(nn.Dense(4 * size.hidden, dtype=dtype)(x), approximate=False)
        return nn.LayerNorm(dtype=dtype)(x + dropped(nn.Dense(size.hidden, dtype=dtype)(y)))


class Bert(nn.Module):
    """Tokens, and which of them are no padding, to logits of every position."""

    size: BertSize
    dtype: Any
    remat: bool | str = False

    @nn.compact
    def __call__(self, tokens: jax.Array, is_token: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        embed = nn.Embed(size.vocabulary, size.hidden, dtype=dtype)
        places = nn.Embed(size.sequence, size.hidden, dtype=dtype)
        x = nn.LayerNorm(dtype=dtype)(embed(tokens) + places(jnp.arange(tokens.shape[-1])))
        x = nn.Dropout(size.dropout, deterministic=False)(x)
        block = maybe_remat(BertBlock, self.remat)
        for _ in range(size.layers):
            x = block(size, dtype)(x, is_token)
        x = nn.gelu(nn.Dense(size.hidden, dtype=dtype)(x), approximate=False)
        return embed.attend(nn.LayerNorm(dtype=dtype)(x))
