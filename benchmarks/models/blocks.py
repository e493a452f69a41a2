"""What the models share: attention, rotary positions, remat of a block."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Softmax attention of `[batch, sequence, heads, features]`, its softmax in float32."""
    sequence, dtype = q.shape[1], q.dtype
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1]).astype(dtype)
    mask = jnp.tril(jnp.ones((sequence, sequence), bool))
    scores = jnp.where(mask, scores.astype(jnp.float32), jnp.finfo(jnp.float32).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(dtype), v)


def heads_apart(x: jax.Array, heads: int) -> jax.Array:
    """`[batch, sequence, heads * features]` as `[batch, sequence, heads, features]`."""
    return x.reshape(*x.shape[:-1], heads, -1)


def rotate(x: jax.Array, base: float = 10000.0) -> jax.Array:
    """Rotary positions (Su et al., 2021) on `[batch, sequence, heads, features]`."""
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(x.shape[1]), base ** (-jnp.arange(half) / half))
    sin, cos = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    one, other = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)


class CausalSelfAttention(nn.Module):
    """GPT's: one product makes queries, keys and values.

    The attention is written out, or that of `jax.nn` in an implementation of its own ("cudnn").
    """

    heads: int
    dtype: Any
    attention: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        qkv = jnp.split(nn.Dense(3 * width, dtype=self.dtype)(x), 3, axis=-1)
        q, k, v = (heads_apart(part, self.heads) for part in qkv)
        if self.attention is None:
            y = causal_attention(q, k, v)
        else:
            kind: Any = self.attention
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kind)
        return nn.Dense(width, dtype=self.dtype)(y.reshape(x.shape))


class GeluMLP(nn.Module):
    """Two products with a GELU between them."""

    hidden: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.gelu(nn.Dense(self.hidden, dtype=self.dtype)(x))
        return nn.Dense(x.shape[-1], dtype=self.dtype)(y)


class SwiGLU(nn.Module):
    """Llama's feed-forward network (Shazeer, 2020), without biases."""

    hidden: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = nn.Dense(self.hidden, use_bias=False, dtype=self.dtype, name="gate")(x)
        up = nn.Dense(self.hidden, use_bias=False, dtype=self.dtype, name="up")(x)
        down = nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name="down")
        return down(nn.silu(gate) * up)


class RotaryAttention(nn.Module):
    """Llama's attention: rotary positions, and keys and values that several queries may share."""

    heads: int
    key_heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        size = width // self.heads

        def projected(heads: int, name: str) -> jax.Array:
            y = nn.Dense(heads * size, use_bias=False, dtype=self.dtype, name=name)(x)
            return heads_apart(y, heads)

        q, k = rotate(projected(self.heads, "q")), rotate(projected(self.key_heads, "k"))
        v, shared = projected(self.key_heads, "v"), self.heads // self.key_heads
        if shared > 1:
            k, v = (jnp.repeat(part, shared, axis=2) for part in (k, v))
        y = causal_attention(q, k, v).reshape(x.shape)
        return nn.Dense(width, use_bias=False, dtype=self.dtype, name="o")(y)


def maybe_remat(block: Any, remat: bool | str) -> Any:
    """The block's class, whose backward pass computes its forward pass again if asked for.

    "dots": all of it but its products (`jax.checkpoint_policies.dots_saveable`).
    """
    if remat == "dots":
        return nn.remat(block, policy=jax.checkpoint_policies.dots_saveable)
    return nn.remat(block) if remat else block
