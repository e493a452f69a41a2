"""A slice of the random bits that keys draw, without drawing the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from autopar.passes.primitives.cuts import Cuts, local_shape, positions


def threefry_bits(keys: Any, shape: Sequence[int], cuts: Cuts, dtype: Any) -> Any:
    """The bits that each key draws for `shape`, of which only a slice is computed.

    With `jax_threefry_partitionable` an element's bits are a function of the key and of its
    position in the row-major order of `shape`, as a 64-bit counter.
    """
    local = local_shape(shape, cuts)
    data = jax.random.key_data(keys)
    out_shape = (*keys.shape, *local)
    high, low = counters(shape, cuts)
    key_dims = tuple(range(keys.ndim))
    counter_dims = tuple(range(keys.ndim, len(out_shape)))
    first, second = threefry2x32_p.bind(
        lax.broadcast_in_dim(data[..., 0], out_shape, key_dims),
        lax.broadcast_in_dim(data[..., 1], out_shape, key_dims),
        lax.broadcast_in_dim(high, out_shape, counter_dims),
        lax.broadcast_in_dim(low, out_shape, counter_dims),
    )
    if np.dtype(dtype).itemsize == 8:
        wide = lax.convert_element_type(first, dtype)
        return (wide << np.array(32, dtype)) | lax.convert_element_type(second, dtype)
    return lax.convert_element_type(first ^ second, dtype)


def counters(shape: Sequence[int], cuts: Cuts) -> tuple[Any, Any]:
    """High and low words of the row-major positions of a slice's elements."""
    local = local_shape(shape, cuts)
    high = low = jnp.zeros((1,) * len(shape), np.uint32)
    stride = math.prod(shape)
    for dim, (size, cut) in enumerate(zip(shape, cuts, strict=True)):
        stride //= max(size, 1)
        new_high, new_low = _multiply(positions(size, cut, np.uint32), stride)
        alone = tuple(local[dim] if d == dim else 1 for d in range(len(shape)))
        total = low + new_low.reshape(alone)
        carry = lax.convert_element_type(total < low, np.uint32)
        high, low = high + new_high.reshape(alone) + carry, total
    return jnp.broadcast_to(high, local), jnp.broadcast_to(low, local)


def _multiply(x: Any, stride: int) -> tuple[Any, Any]:
    """High and low words of the product of 32-bit numbers with a constant of up to 64 bits."""
    word, half = np.uint32(0xFFFFFFFF), np.uint32(16)
    mask = np.uint32(0xFFFF)
    stride_low = np.uint32(stride & 0xFFFFFFFF)
    stride_high = np.uint32(stride >> 32 & int(word))
    low = x * stride_low
    a, b = x >> half, x & mask
    c, d = stride_low >> half, stride_low & mask
    middle = a * d + (b * d >> half)  # below 2^32: (2^16 - 1)^2 + 2^16 - 1
    other = b * c + (middle & mask)
    high = a * c + (middle >> half) + (other >> half)
    return high + x * stride_high, low
