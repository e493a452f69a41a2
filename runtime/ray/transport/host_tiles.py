"""Arrays as tiles in host memory: out of one mesh's devices, and into another's.

A typed PRNG key moves as the numbers that it wraps, a value of any dtype as its bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.arrays.ray_array import key_implementation
from autopar.arrays.sourced_leaf import SourcedLeaf
from autopar.arrays.split_array import HOST_MEMORY, SplitArray
from autopar.arrays.typed_keys import is_key
from autopar.runtime.ray.transport.routes import Box, Move, Tile, slices


def plain(shape: Sequence[int], dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of the numbers behind an array."""
    if not is_key(dtype):
        return tuple(shape), np.dtype(dtype)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(tuple(shape), dtype))
    return tuple(data.shape), np.dtype(data.dtype)


def numbers(array: Any) -> Any:
    """An array, or what a key array wraps."""
    return jax.random.key_data(array) if is_key(array.dtype) else array


def to_host(array: Any, box: Box | None = None) -> np.ndarray:
    """An array in host memory, or a box of it that a device of this process holds; waits for it."""
    if box is None:
        return np.asarray(numbers(array))
    found = numbers(array)
    for shard in found.addressable_shards:
        ranges = zip(shard.index, found.shape, strict=True)
        if tuple(index.indices(size)[:2] for index, size in ranges) == box:
            return np.asarray(shard.data)
    raise AssertionError(f"no device of this process holds {box}")


def host_numbers(leaf: Any) -> np.ndarray:
    """The numbers of a leaf of this process, of the dtype that JAX gives it."""
    if isinstance(leaf, SplitArray):
        return np.concatenate([to_host(part) for part in leaf.parts], leaf.axis)
    if isinstance(leaf, jax.Array):
        return to_host(leaf)
    if isinstance(leaf, SourcedLeaf):
        return np.asarray(leaf)
    return np.asarray(leaf, jax.typeof(leaf).dtype)


def assembled(
    tiles: Iterable[tuple[np.ndarray | jax.Array, Sequence[int]]],
    shape: tuple[int, ...],
    dtype: Any,
    sharding: NamedSharding,
) -> jax.Array:
    """An array of what the devices of this process hold.

    The tiles are numbers, and the devices of the mesh that hold them, by number; other processes
    have other tiles. Shape, dtype and sharding are those of the array.
    """
    (real_shape, _), real = plain(shape, dtype), sharding
    if len(real_shape) > len(shape):  # a key's numbers have one more dimension
        spec = [*sharding.spec, *[None] * (len(real_shape) - len(sharding.spec))]
        real = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    devices = list(sharding.mesh.devices.flat)
    if sharding.memory_kind == HOST_MEMORY:
        devices = [SingleDeviceSharding(device, memory_kind=HOST_MEMORY) for device in devices]
    values, where = [], []
    for tile, holders in tiles:
        values += [tile] * len(holders)
        where += [devices[number] for number in holders]
    shards = jax.device_put(values, where)
    array = jax.make_array_from_single_device_arrays(real_shape, real, shards)
    return _as_keys(array, dtype, sharding) if is_key(dtype) else array


def _as_keys(array: jax.Array, dtype: Any, sharding: NamedSharding) -> jax.Array:
    keys = jax.random.wrap_key_data(array, impl=key_implementation(dtype))
    if keys.sharding.is_equivalent_to(sharding, keys.ndim):
        return keys
    return jax.device_put(keys, sharding)


def cut(value: np.ndarray, held: Mapping[Box, Sequence[int]]) -> tuple[np.ndarray, ...]:
    """The tiles of an array in host memory."""
    return tuple(np.asarray(value[slices(box)], order="C") for box in held)


def copied(array: Any) -> jax.Array:
    """A copy, in other memory."""
    found = numbers(array)
    shards = [
        jax.device_put(shard.data, shard.data.sharding, may_alias=False)
        for shard in found.addressable_shards
    ]
    copy = jax.make_array_from_single_device_arrays(found.shape, found.sharding, shards)
    return _as_keys(copy, array.dtype, array.sharding) if is_key(array.dtype) else copy


def resharded(array: Any, sharding: NamedSharding) -> jax.Array:
    """An array as another stage of its mesh wants it."""
    if array.is_fully_addressable:
        return jax.device_put(array, sharding)
    found = _resharding(sharding)(array)
    # See `ProcessStep._run_action`.
    return jax.block_until_ready(found) if jax.default_backend() == "cpu" else found


@functools.lru_cache(maxsize=256)
def _resharding(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: array, out_shardings=sharding)


def taken(array: Any, moves: Sequence[Move], devices: Mapping[Any, int]) -> Iterator[np.ndarray]:
    """The bytes of moves, in their order; waits for the array.

    The moves are from devices of this process, of the numbers of an array on the sending mesh,
    each of whose devices has a number.
    """
    if not moves:
        return
    held = {devices[shard.device]: shard.data for shard in numbers(array).addressable_shards}
    values = {number: np.asarray(held[number]) for number in {m.device for m in moves}}
    for move in moves:
        yield as_bytes(values[move.device][slices(move.take)])


def as_bytes(part: np.ndarray) -> np.ndarray:
    """Numbers as an array of uint8."""
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def placed(
    parts: Sequence[tuple[Move, np.ndarray]],
    tiles: Mapping[int, Tile],
    shape: tuple[int, ...],
    dtype: Any,
    sharding: NamedSharding,
) -> jax.Array:
    """The array on the receiving mesh, of this shape, dtype and sharding.

    The parts are all moves into tiles that devices of this process hold, which are given by number.
    """
    _, real_dtype = plain(shape, dtype)
    by_tile: dict[int, list[tuple[Move, np.ndarray]]] = {number: [] for number in tiles}
    for move, part in parts:
        by_tile[move.tile].append((move, part))
    whole = []
    for number, tile in tiles.items():
        found = by_tile[number]
        if len(found) == 1 and found[0][1].shape == tile.shape:
            value = found[0][1]
        else:
            value = np.empty(tile.shape, real_dtype)
            for move, part in found:
                value[slices(move.put)] = part
        whole.append((value, tile.devices))
    return assembled(whole, shape, dtype, sharding)
