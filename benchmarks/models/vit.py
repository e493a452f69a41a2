"""Vision transformers on patches of images (Dosovitskiy et al., ICLR 2021).

The class is read from the mean of all patches, not from a token of its own (Beyer et al., "Better
plain ViT baselines", 2022), of which images of 256 pixels have 256: XLA for GPUs that are not
there, which cannot try tilings, finds none for the products of 196 or 197 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax

from models.blocks import maybe_remat


@dataclass(frozen=True)
class ViTSize:
    """Hidden width, layers and heads."""

    hidden: int
    layers: int
    heads: int
    pixels: int = 256
    patch: int = 16
    classes: int = 1000


SIZES = {"base": ViTSize(768, 12, 12), "large": ViTSize(1024, 24, 16)}


class ViTBlock(nn.Module):
    """Attention and feed-forward network, each after a norm."""

    size: ViTSize
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        y = nn.LayerNorm(dtype=dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(size.heads, dtype=dtype)(y, y)
        y = nn.Dense(4 * size.hidden, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
        return x + nn.Dense(size.hidden, dtype=dtype)(nn.gelu(y, approximate=False))


class ViT(nn.Module):
    """Images `[batch, pixels, pixels, 3]` to logits."""

    size: ViTSize
    dtype: Any
    remat: bool | str = False

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        patch = (size.patch, size.patch)
        x = nn.Conv(size.hidden, patch, patch, padding="VALID", dtype=dtype)(images)
        x = x.reshape(x.shape[0], -1, size.hidden)
        places = self.param("places", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = x + places.astype(dtype)
        block = maybe_remat(ViTBlock, self.remat)
        for _ in range(size.layers):
            x = block(size, dtype)(x)
        return nn.Dense(size.classes, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x).mean(axis=1))
