"""Wide residual networks, at the sizes of Alpa's evaluation (Zheng et al., OSDI 2022, Table 7).

Their blocks are bottlenecks whose middle convolution is wider than the others. They normalize by
groups of channels: with batch norm the examples of a batch are not independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.blocks import maybe_remat


@dataclass(frozen=True)
class WideResNetSize:
    """Layers (50, 101, or some for a trial), channels of the first block, width of its middle."""

    layers: int
    channels: int
    width: int
    pixels: int = 224
    classes: int = 1000


SIZES = {
    "250M": WideResNetSize(50, 160, 2),
    "500M": WideResNetSize(50, 224, 2),
    "1B": WideResNetSize(50, 320, 2),
    "2B": WideResNetSize(50, 448, 2),
    "4B": WideResNetSize(50, 640, 2),
    "6.8B": WideResNetSize(50, 320, 16),
    "13B": WideResNetSize(101, 320, 16),
}

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def blocks_of(layers: int) -> tuple[int, ...]:
    """How many blocks have each number of pixels: as published, else the same number of each."""
    return BLOCKS.get(layers, (max((layers - 2) // 12, 1),) * 4)


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1 pixels beside a shortcut."""

    channels: int
    width: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def convolved(x: jax.Array, channels: int, pixels: int, stride: int = 1) -> jax.Array:
            conv = nn.Conv(
                channels, (pixels, pixels), (stride, stride), use_bias=False, dtype=self.dtype
            )
            return nn.GroupNorm(dtype=self.dtype)(conv(x))

        y = nn.relu(convolved(x, self.channels, 1))
        y = nn.relu(convolved(y, self.channels * self.width, 3, self.stride))
        y = convolved(y, 4 * self.channels, 1)
        if x.shape != y.shape:
            x = convolved(x, 4 * self.channels, 1, self.stride)
        return nn.relu(x + y)


class WideResNet(nn.Module):
    """Images `[batch, pixels, pixels, 3]` to logits."""

    size: WideResNetSize
    dtype: Any
    remat: bool | str = False

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        size = self.size
        x = nn.Conv(size.channels, (7, 7), (2, 2), use_bias=False, dtype=self.dtype)(images)
        x = nn.relu(nn.GroupNorm(dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        block = maybe_remat(Bottleneck, self.remat)
        for part, count in enumerate(blocks_of(size.layers)):
            for index in range(count):
                stride = 2 if part and not index else 1
                x = block(size.channels * 2**part, size.width, stride, self.dtype)(x)
        return nn.Dense(size.classes, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))


def block_flops(size: WideResNetSize) -> list[int]:
    """Multiplications of each block's convolutions for one image; the first has the stem's too."""
    pixels, inputs, found = size.pixels // 4, size.channels, list[int]()
    stem = 49 * 3 * size.channels * (size.pixels // 2) ** 2
    for part, count in enumerate(blocks_of(size.layers)):
        for index in range(count):
            channels, after = size.channels * 2**part, pixels
            if part and not index:
                after = pixels // 2
            middle = channels * size.width
            flops = inputs * channels * pixels**2
            flops += (9 * channels * middle + middle * 4 * channels) * after**2
            flops += inputs * 4 * channels * after**2 * (inputs != 4 * channels)
            found.append(flops)
            pixels, inputs = after, 4 * channels
    found[0] += stem
    return found
