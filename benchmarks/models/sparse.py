"""Mixtures without capacities as users have them: rows sorted by expert, `ragged_dot`, a scan.

Jiang et al., "Mixtral of Experts", 2024 (8x7B and, by its published configuration, 8x22B); Yang et
al., "Qwen3 Technical Report", 2025 (table 2): 128 experts, of which each token sees 8. Experts are
balanced within each sequence, as in DeepSeek-V3 (DeepSeek-AI, 2024, section 2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from models.llama3 import GroupedAttention, scanned

BALANCE = 1e-3


@dataclass(frozen=True)
class SparseSize:
    """Widths, layers, heads (of queries and of keys, with so many features), and experts."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    features: int
    experts: int
    chosen: int
    sequence: int
    vocabulary: int


MIXTRAL = {
    "8x7B": SparseSize(4096, 14336, 32, 32, 8, 128, 8, 2, 4096, 32000),
    "8x22B": SparseSize(6144, 16384, 56, 48, 8, 128, 8, 2, 4096, 32768),
}
QWEN3 = {
    "30B": SparseSize(2048, 768, 48, 32, 4, 128, 128, 8, 4096, 151936),
    "235B": SparseSize(4096, 1536, 94, 64, 4, 128, 128, 8, 4096, 151936),
}


class DroplessExperts(nn.Module):
    """Feed-forward networks of which every token sees a few, and none is full."""

    size: SparseSize
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        size, width = self.size, x.shape[-1]
        logits = nn.Dense(size.experts, use_bias=False, dtype=jnp.float32, name="gate")(x)
        shares = jax.nn.softmax(logits)
        gates, experts = lax.top_k(shares, size.chosen)
        gates = (gates / gates.sum(-1, keepdims=True)).astype(self.dtype)
        chosen = jax.nn.one_hot(experts, size.experts).sum(2).mean(1)
        balance = size.experts * (lax.stop_gradient(chosen) * shares.mean(1)).sum(-1).mean()

        flat = experts.reshape(-1)
        order = jnp.argsort(flat)
        sizes = jnp.bincount(flat, length=size.experts).astype(jnp.int32)
        rows = x.reshape(-1, width)[order // size.chosen]
        hidden = jax.nn.silu(self.product("w1", rows, size.inner, sizes))
        hidden = hidden * self.product("w3", rows, size.inner, sizes)
        made = self.product("w2", hidden, width, sizes)[jnp.argsort(order)]
        mixed = jnp.einsum(
            "rkd,rk->rd", made.reshape(-1, size.chosen, width), gates.reshape(-1, size.chosen)
        )
        return mixed.reshape(x.shape), balance

    def product(self, name: str, rows: jax.Array, columns: int, sizes: jax.Array) -> jax.Array:
        """Every row with the matrix of its expert."""
        scale = nn.initializers.lecun_normal(batch_axis=0)
        shape = self.size.experts, rows.shape[-1], columns
        return lax.ragged_dot(rows, self.param(name, scale, shape).astype(self.dtype), sizes)


class SparseBlock(nn.Module):
    """One trip of the scan."""

    size: SparseSize
    dtype: Any
    attention: str

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        size, dtype = self.size, self.dtype
        y = nn.RMSNorm(dtype=dtype)(x)
        heads = size.heads, size.key_heads, dtype, self.attention, size.features
        x = x + GroupedAttention(*heads)(y)
        y, balance = DroplessExperts(size, dtype)(nn.RMSNorm(dtype=dtype)(x))
        return x + y, balance


class SparseDecoder(nn.Module):
    """Tokens to logits, and how far experts are from being used alike."""

    size: SparseSize
    dtype: Any
    remat: bool | str = False
    attention: str = "cudnn"

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        size, dtype = self.size, self.dtype
        x = nn.Embed(size.vocabulary, size.hidden, dtype=dtype)(tokens)
        scan = scanned(SparseBlock, size.layers, self.remat)
        x, balance = scan(size, dtype, self.attention)(x, None)
        x = nn.RMSNorm(dtype=dtype)(x)
        logits = nn.Dense(size.vocabulary, use_bias=False, dtype=dtype, name="head")(x)
        return logits, BALANCE * balance.mean()
