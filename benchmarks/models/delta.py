"""A decoder of linear attention with gates and a delta rule; every fourth layer attends in full.

Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024 (section 3.3: the states
of a sequence chunk by chunk); in the form of today's hybrids, three such layers and one of softmax
attention in turn, as Qwen3-Next has them. Layers are written one after the other, each in
`jax.checkpoint`, and every layer of linear attention has a scan of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from models.blocks import SwiGLU, maybe_remat
from models.llama3 import GroupedAttention

CHUNK = 64
FULL_EVERY = 4


@dataclass(frozen=True)
class DeltaSize:
    """Widths, layers, heads of linear attention (of keys, of values), and of full attention."""

    hidden: int
    inner: int
    layers: int
    key_heads: int
    value_heads: int
    features: int
    heads: int
    grouped_heads: int
    sequence: int
    vocabulary: int


SIZES = {"1.6B": DeltaSize(2048, 5632, 24, 16, 32, 128, 8, 2, 4096, 32000)}


def gated_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, rate: jax.Array
) -> jax.Array:
    """What queries read of states to which every token writes what they lack of its value.

    `state = exp(decay) state + rate k (v - exp(decay) state^T k)^T`, token by token; here by chunks
    of `CHUNK`: inside of a chunk by products of matrices and one triangular system.

    Args:
      q: `[batch, sequence, heads, features]`.
      k: the same.
      v: the same, maybe of other features.
      decay: `[batch, sequence, heads]`, the logarithm of what is left of a state.
      rate: `[batch, sequence, heads]`.
    """
    batch, sequence, heads, _ = v.shape

    def chunks(x: jax.Array) -> jax.Array:  # [batch, heads, chunks, CHUNK, ...]
        apart = x.astype(jnp.float32).reshape(batch, sequence // CHUNK, CHUNK, *x.shape[2:])
        return jnp.moveaxis(apart, 3, 1)

    q, k, v, decay, rate = map(chunks, (q, k, v, decay, rate))
    q, decay, rate = q * q.shape[-1] ** -0.5, jnp.cumsum(decay, -1), rate[..., None]
    earlier = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    between = jnp.where(earlier, decay[..., :, None] - decay[..., None, :], 0.0)
    left = jnp.where(earlier, jnp.exp(between), 0.0)
    system = jnp.tril(rate * jnp.einsum("...id,...jd->...ij", k, k) * left, -1)
    grown = jnp.exp(decay)[..., None]
    given = jnp.concatenate([rate * v, rate * grown * k], -1)
    solved = lax.linalg.triangular_solve(
        system + jnp.eye(CHUNK), given, left_side=True, lower=True, unit_diagonal=True
    )
    own, of_state = jnp.split(solved, [v.shape[-1]], -1)
    inside = jnp.einsum("...id,...jd->...ij", q, k) * left
    rest = jnp.exp(decay[..., -1:] - decay)[..., None]

    def chunk(state: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
        q, k, own, of_state, inside, left = now
        lacking = own - of_state @ state
        read = q @ state + inside @ lacking
        return left * state + jnp.einsum("...ik,...iv->...kv", k, lacking), read

    now = q * grown, k * rest, own, of_state, inside, grown[..., -1:, :]
    start = jnp.zeros((batch, heads, k.shape[-1], v.shape[-1]), jnp.float32)
    _, read = lax.scan(chunk, start, [jnp.moveaxis(x, 2, 0) for x in now])
    return jnp.transpose(read, (1, 0, 3, 2, 4)).reshape(batch, sequence, heads, -1)


class LinearAttention(nn.Module):
    """Queries, keys and values after a short convolution, gates, and the delta rule."""

    size: DeltaSize
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size, width = self.size, x.shape[-1]
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        of_keys, of_values = (n * size.features for n in (size.key_heads, size.value_heads))
        mixed = dense(2 * of_keys + of_values, name="qkv")(x)
        shape = 4, 1, mixed.shape[-1]
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        mixed = lax.conv_general_dilated(
            mixed,
            kernel.astype(self.dtype),
            (1,),
            [(3, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=mixed.shape[-1],
        )
        q, k, v = jnp.split(jax.nn.silu(mixed), [of_keys, 2 * of_keys], -1)
        q, k, v = (y.reshape(*y.shape[:2], -1, size.features) for y in (q, k, v))
        repeated = size.value_heads // size.key_heads
        q, k = (jnp.repeat(self.normalized(y), repeated, axis=2) for y in (q, k))
        rate = jax.nn.sigmoid(dense(size.value_heads, name="rate")(x).astype(jnp.float32))
        scale = self.param("scale", nn.initializers.zeros, (size.value_heads,))
        bias = self.param("bias", nn.initializers.zeros, (size.value_heads,))
        step = dense(size.value_heads, name="decay")(x).astype(jnp.float32)
        decay = -jnp.exp(scale) * jax.nn.softplus(step + bias)
        y = gated_delta_rule(q, k, v, decay, rate).astype(self.dtype)
        gate = dense(of_values, name="gate")(x).reshape(y.shape)
        y = nn.RMSNorm(dtype=self.dtype)(y) * jax.nn.silu(gate)
        return dense(width, name="out")(y.reshape(*y.shape[:2], -1))

    def normalized(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.square(wide).sum(-1, keepdims=True) + 1e-6)).astype(x.dtype)


class DeltaBlock(nn.Module):
    """Attention of one of the two kinds, and a feed-forward network."""

    size: DeltaSize
    dtype: Any
    is_full: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        y = nn.RMSNorm(dtype=dtype)(x)
        if self.is_full:
            x = x + GroupedAttention(size.heads, size.grouped_heads, dtype, "xla")(y)
        else:
            x = x + LinearAttention(size, dtype)(y)
        return x + SwiGLU(size.inner, dtype)(nn.RMSNorm(dtype=dtype)(x))


class DeltaDecoder(nn.Module):
    """Tokens to logits, with an output layer of its own."""

    size: DeltaSize
    dtype: Any
    remat: bool | str = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        x = nn.Embed(size.vocabulary, size.hidden, dtype=dtype)(tokens)
        block = maybe_remat(DeltaBlock, self.remat)
        for number in range(1, size.layers + 1):
            x = block(size, dtype, number % FULL_EVERY == 0, name=f"layer_{number}")(x)
        x = nn.RMSNorm(dtype=dtype)(x)
        return nn.Dense(size.vocabulary, use_bias=False, dtype=dtype, name="head")(x)
