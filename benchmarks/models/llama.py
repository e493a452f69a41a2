"""Llama-like decoders: every block written out, as Hugging Face has it, or one scan over them.

Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax

from models.blocks import RotaryAttention, SwiGLU, maybe_remat


@dataclass(frozen=True)
class LlamaSize:
    """Hidden width, width of the feed-forward network, layers, heads, and those of the keys."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    sequence: int
    vocabulary: int = 32000


SIZES = {
    "7B": LlamaSize(4096, 11008, 32, 32, 32, 2048),
    "70B": LlamaSize(8192, 28672, 80, 64, 8, 4096),
}


class LlamaBlock(nn.Module):
    """Attention and feed-forward network, each after a norm."""

    size: LlamaSize
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        y = nn.RMSNorm(dtype=dtype)(x)
        x = x + RotaryAttention(size.heads, size.key_heads, dtype)(y)
        return x + SwiGLU(size.inner, dtype)(nn.RMSNorm(dtype=dtype)(x))


class ScannedBlock(nn.Module):
    """One trip of a scan over the blocks."""

    size: LlamaSize
    dtype: Any
    remat: bool | str

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return maybe_remat(LlamaBlock, self.remat)(self.size, self.dtype)(x), None


class Llama(nn.Module):
    """Tokens to logits, with an output layer of its own."""

    size: LlamaSize
    dtype: Any
    remat: bool | str = False
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        x = nn.Embed(size.vocabulary, size.hidden, dtype=dtype)(tokens)
        if self.scanned:
            axes, keys = {"params": 0}, {"params": True}
            scan = nn.scan(ScannedBlock, axes, split_rngs=keys, length=size.layers)
            x, _ = scan(size, dtype, self.remat)(x, None)
        else:
            for _ in range(size.layers):
                x = maybe_remat(LlamaBlock, self.remat)(size, dtype)(x)
        x = nn.RMSNorm(dtype=dtype)(x)
        return nn.Dense(size.vocabulary, use_bias=False, dtype=dtype, name="head")(x)
