"""A U-Net that learns to remove noise (Ho et al., "Denoising Diffusion Models", NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.blocks import maybe_remat


@dataclass(frozen=True)
class UNetSize:
    """Residual blocks at each number of pixels, and the channels of these."""

    layers: int
    channels: tuple[int, ...]
    pixels: int = 64


SIZES = {"60M": UNetSize(2, (128, 256, 512)), "130M": UNetSize(2, (192, 384, 768))}


class ResidualBlock(nn.Module):
    """Two convolutions after group norms, shifted by the embedded time, beside a shortcut."""

    channels: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        def convolved(y: jax.Array) -> jax.Array:
            y = nn.silu(nn.GroupNorm(32, dtype=self.dtype)(y))
            return nn.Conv(self.channels, (3, 3), dtype=self.dtype)(y)

        y = convolved(x) + nn.Dense(self.channels, dtype=self.dtype)(nn.silu(time))[:, None, None]
        y = convolved(y)
        if x.shape[-1] != self.channels:
            x = nn.Conv(self.channels, (1, 1), dtype=self.dtype)(x)
        return x + y


class PixelAttention(nn.Module):
    """Attention between all pixels."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.GroupNorm(32, dtype=self.dtype)(x)
        y = y.reshape(x.shape[0], -1, x.shape[-1])
        y = nn.MultiHeadDotProductAttention(8, dtype=self.dtype)(y, y)
        return x + y.reshape(x.shape)


class UNet(nn.Module):
    """Noisy images and the times of their noise to that noise."""

    size: UNetSize
    dtype: Any
    remat: bool | str = False

    @nn.compact
    def __call__(self, images: jax.Array, times: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        block = maybe_remat(ResidualBlock, self.remat)
        angles = times[:, None] * jnp.exp(-jnp.arange(64) * 0.15)
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        time = nn.Dense(4 * size.channels[0], dtype=dtype)(time)
        x = nn.Conv(size.channels[0], (3, 3), dtype=dtype)(images)
        across = []
        for place, channels in enumerate(size.channels):
            if place:
                x = nn.Conv(channels, (3, 3), strides=(2, 2), dtype=dtype)(x)
            for _ in range(size.layers):
                x = block(channels, dtype)(x, time)
                across.append(x)
        x = PixelAttention(dtype)(x)
        for place, channels in reversed(list(enumerate(size.channels))):
            for _ in range(size.layers):
                x = block(channels, dtype)(jnp.concatenate([x, across.pop()], axis=-1), time)
            if place:
                x = nn.ConvTranspose(size.channels[place - 1], (2, 2), (2, 2), dtype=dtype)(x)
        x = nn.silu(nn.GroupNorm(32, dtype=dtype)(x))
        return nn.Conv(images.shape[-1], (3, 3), dtype=dtype)(x)
