"""Arrays as tiles in host memory: out of one mesh's devices, and into another's.

A typed PRNG key moves as the numbers that it wraps, a value of any dtype as its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.ray_array import key_implementation
from autopar.runtime.ray.routes import Route, slices
from autopar.split_array import SplitArray


def is_key(dtype: Any) -> bool:
    """Whether it is the dtype of typed PRNG keys."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def plain(shape: Sequence[int], dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of the numbers behind an array."""
    if not is_key(dtype):
        return tuple(shape), np.dtype(dtype)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(tuple(shape), dtype))
    return tuple(data.shape), np.dtype(data.dtype)


def numbers(array: Any) -> Any:
    """An array, or what a key array wraps."""
    return jax.random.key_data(array) if is_key(array.dtype) else array


def to_host(array: Any) -> np.ndarray:
    """The whole array in host memory; waits for it."""
    return np.asarray(numbers(array))


def host_numbers(leaf: Any) -> np.ndarray:
    """The numbers of a leaf of this process, of the dtype that JAX gives it."""
    if isinstance(leaf, SplitArray):
        return np.concatenate([to_host(part) for part in leaf.parts], leaf.axis)
    if isinstance(leaf, jax.Array):
        return to_host(leaf)
    return np.asarray(leaf, jax.typeof(leaf).dtype)


def from_host(value: np.ndarray, dtype: Any, sharding: NamedSharding) -> jax.Array:
    """The numbers behind an array, placed."""
    if not is_key(dtype):
        return jax.device_put(value, sharding)
    keys = jax.random.wrap_key_data(jax.numpy.asarray(value), impl=key_implementation(dtype))
    return jax.device_put(keys, sharding)


def taken(array: Any, route: Route, devices: dict[Any, int]) -> Iterator[np.ndarray]:
    """The bytes of every move of a route, in order; waits for the array.

    Args:
      array: on the sending mesh.
      route: of its numbers.
      devices: the number of every device of that mesh.
    """
    if not route.moves:
        return
    held = {devices[shard.device]: shard.data for shard in numbers(array).addressable_shards}
    values = {number: np.asarray(held[number]) for number in {m.device for m in route.moves}}
    for move in route.moves:
        part = np.ascontiguousarray(values[move.device][slices(move.take)])
        yield part.reshape(-1).view(np.uint8)


def placed(
    data: np.ndarray,
    route: Route,
    shape: tuple[int, ...],
    dtype: Any,
    sharding: NamedSharding,
) -> jax.Array:
    """The array on the receiving mesh, from the bytes of its route.

    Args:
      data: bytes, as those that `taken` gives.
      route: of the array's numbers.
      shape: of the array.
      dtype: of the array.
      sharding: where it shall be.
    """
    real_shape, real_dtype = plain(shape, dtype)
    if len(real_shape) > len(shape):  # a key's numbers have one more dimension
        spec = [*sharding.spec, *[None] * (len(real_shape) - len(sharding.spec))]
        real = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    else:
        real = sharding
    parts: list[list[tuple[tuple[slice, ...], np.ndarray]]] = [[] for _ in route.tiles]
    start = 0
    for move in route.moves:
        size = math.prod(move.shape) * real_dtype.itemsize
        part = data[start : start + size].view(real_dtype).reshape(move.shape)
        parts[move.tile].append((slices(move.put), part))
        start += size
    devices = list(sharding.mesh.devices.flat)
    values, where = [], []
    for tile, found in zip(route.tiles, parts, strict=True):
        if len(found) == 1 and found[0][1].shape == tile.shape:
            whole = found[0][1]
        else:
            whole = np.empty(tile.shape, real_dtype)
            for index, part in found:
                whole[index] = part
        values += [whole] * len(tile.devices)
        where += [devices[number] for number in tile.devices]
    shards = jax.device_put(values, where)
    array = jax.make_array_from_single_device_arrays(real_shape, real, shards)
    if not is_key(dtype):
        return array
    keys = jax.random.wrap_key_data(array, impl=key_implementation(dtype))
    return jax.device_put(keys, sharding)
