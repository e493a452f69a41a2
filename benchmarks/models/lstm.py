"""A language model of recurrent layers (Zaremba et al., 2014), each one scan over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax

from models.blocks import maybe_remat


@dataclass(frozen=True)
class LSTMSize:
    """Hidden width and layers."""

    hidden: int
    layers: int
    sequence: int = 128
    vocabulary: int = 10000


SIZES = {"66M": LSTMSize(1536, 2), "180M": LSTMSize(2048, 4)}


class LSTM(nn.Module):
    """Tokens to logits."""

    size: LSTMSize
    dtype: Any
    remat: bool | str = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        x = nn.Embed(size.vocabulary, size.hidden, dtype=dtype)(tokens)
        layer = maybe_remat(nn.RNN, self.remat)
        for _ in range(size.layers):
            x = layer(nn.OptimizedLSTMCell(size.hidden, dtype=dtype))(x)
        return nn.Dense(size.vocabulary, dtype=dtype)(x)
