"""Llama 3 as its users have it: grouped heads of their own, cuDNN's attention, one scan, long rows.

Grattafiori et al., "The Llama 3 Herd of Models", 2024 (table 3): sizes, 8,192 tokens a sequence, a
vocabulary of 128,256, rotary positions of base 500,000.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax

from models.blocks import SwiGLU, rotate
from models.llama import LlamaSize

SIZES = {
    "8B": LlamaSize(4096, 14336, 32, 32, 8, 8192, 128256),
    "70B": LlamaSize(8192, 28672, 80, 64, 8, 8192, 128256),
    "405B": LlamaSize(16384, 53248, 126, 128, 8, 8192, 128256),
}


class GroupedAttention(nn.Module):
    """Causal attention whose projections have dimensions for heads and features."""

    heads: int
    key_heads: int
    dtype: Any
    attention: str
    features: int | None = None  # of a head; by default, heads share the width

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=self.dtype)
        features = self.features or width // self.heads
        q = dense((self.heads, features), name="q")(x)
        k, v = (dense((self.key_heads, features), name=name)(x) for name in ("k", "v"))
        kind: Any = self.attention
        y = jax.nn.dot_product_attention(
            rotate(q, 500000.0), rotate(k, 500000.0), v, is_causal=True, implementation=kind
        )
        return dense(width, axis=(-2, -1), name="o")(y)


class Llama3Block(nn.Module):
    """One trip of the scan."""

    size: LlamaSize
    dtype: Any
    attention: str

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        size, dtype = self.size, self.dtype
        y = nn.RMSNorm(dtype=dtype)(x)
        x = x + GroupedAttention(size.heads, size.key_heads, dtype, self.attention)(y)
        return x + SwiGLU(size.inner, dtype)(nn.RMSNorm(dtype=dtype)(x)), None


def scanned(block: Any, layers: int, remat: bool | str) -> Any:
    """One scan over so many blocks, whose backward passes compute them again as asked."""
    if remat:
        policy = jax.checkpoint_policies.dots_saveable if remat == "dots" else None
        block = nn.remat(block, policy=policy, prevent_cse=False)  # a scan needs no barrier
    return nn.scan(block, {"params": 0}, split_rngs={"params": True}, length=layers)


class Llama3(nn.Module):
    """Tokens to logits, with an output layer of its own."""

    size: LlamaSize
    dtype: Any
    remat: bool | str = False
    attention: str = "cudnn"

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        x = nn.Embed(size.vocabulary, size.hidden, dtype=dtype)(tokens)
        x, _ = scanned(Llama3Block, size.layers, self.remat)(size, dtype, self.attention)(x, None)
        x = nn.RMSNorm(dtype=dtype)(x)
        return nn.Dense(size.vocabulary, use_bias=False, dtype=dtype, name="head")(x)
