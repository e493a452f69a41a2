"""Tiles between devices and host memory in pieces, for devices with memory of their own.

While one piece is sent, the next ones are copied to the host: into pinned memory, to which copies
run without the CPU, where the backend has it, and from where they are sent. What arrives is copied
to the device piece by piece, and put together there.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from autopar.arrays.split_array import HOST_MEMORY
from autopar.passes.graph.logical import no_mesh
from autopar.runtime.ray.transport.host_tiles import as_bytes, assembled, numbers, placed, plain
from autopar.runtime.ray.transport.routes import Box, Move, Tile, slices

PIECE_BYTES = 8 << 20
"""What is copied between a device and the host at once: each copy is started by Python."""
AHEAD = 4
"""Pieces that are copied to the host while an earlier one is sent."""

Parts = Sequence[tuple[Move, np.ndarray]]
Until = Callable[[int], None]
"""Waits until so many bytes of a part are there."""


def copied_out(
    array: Any, moves: Sequence[Move], devices: Mapping[Any, int], piece_bytes: int = PIECE_BYTES
) -> Iterator[np.ndarray]:
    """The bytes of moves, as `host_tiles.taken` gives them, copied ahead of what is used."""
    under_way: collections.deque[jax.Array] = collections.deque()
    for part in parts_of(array, moves, devices):
        for piece in _pieces(part, piece_bytes):
            under_way.append(_towards_host(piece))
            if len(under_way) > AHEAD:
                yield as_bytes(_in_host(under_way.popleft()))
    while under_way:
        yield as_bytes(_in_host(under_way.popleft()))


def parts_of(array: Any, moves: Sequence[Move], devices: Mapping[Any, int]) -> Iterator[jax.Array]:
    """What each move takes, on the device that has it; its shape is that of the move."""
    held = {devices[x.device]: x.data for x in numbers(array).addressable_shards} if moves else {}
    for move in moves:
        shard = held[move.device]
        whole = tuple((0, size) for size in shard.shape)
        with no_mesh():
            yield shard if move.take == whole else _box(move.take)(shard)


def _pieces(part: jax.Array, piece_bytes: int) -> Iterator[jax.Array]:
    """The elements of an array in their order, in pieces."""
    most = max(piece_bytes // np.dtype(part.dtype).itemsize, 1)
    if part.size <= most:
        yield part
        return
    for start in range(0, part.size, most):
        count = min(most, part.size - start)
        with no_mesh():
            if part.size < 1 << 31:  # JAX counts in 32 bits
                yield _piece(count)(part, start)
            else:
                yield _piece_at(start, count)(part)


def _towards_host(piece: jax.Array) -> jax.Array:
    """Begin to copy to the host."""
    (device,) = piece.devices()
    if has_pinned(device):
        there = SingleDeviceSharding(device, memory_kind=HOST_MEMORY)
        return jax.device_put(piece, there, may_alias=False)
    piece.copy_to_host_async()
    return piece


class _Lies:
    """Memory of an array, for NumPy, which then keeps the array."""

    def __init__(self, array: jax.Array) -> None:
        self.array = array
        self.__array_interface__ = {
            "version": 3,
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "data": (array.unsafe_buffer_pointer(), True),
        }


def _in_host(piece: jax.Array) -> np.ndarray:
    """A piece when its copy is there: its bytes where they lie in pinned memory, else its numbers.

    `np.asarray` would copy them once more, into memory that is new each time.
    """
    (device,) = piece.devices()
    is_pinned = piece.sharding.memory_kind == HOST_MEMORY
    if is_pinned and device.platform in _PLAIN_LAYOUTS and piece.dtype.name not in _PACKED:
        return np.asarray(_Lies(piece.block_until_ready()))
    return np.asarray(piece)


_PLAIN_LAYOUTS = ("cpu", "gpu", "cuda", "rocm")
"""Platforms whose arrays lie in the host's memory row by row, without tiles."""
_PACKED = ("int4", "uint4", "int2", "uint2", "float4_e2m1fn")
"""Types of which several numbers share a byte there."""


@functools.cache
def has_pinned(device: jax.Device) -> bool:
    """Whether a device copies to and from pinned memory of its host."""
    return any(memory.kind == HOST_MEMORY for memory in device.addressable_memories())


class Landing:
    """An array on the receiving mesh, of which this process gets parts.

    Args:
      tiles: that its devices hold, by number.
      shape, dtype, sharding: of the array.
      is_staged: whether parts are copied to devices while they arrive; else it is done at the end.

    Attributes:
      parts: what came, in its order, in the host's memory or on a device.
    """

    def __init__(
        self,
        tiles: Mapping[int, Tile],
        shape: tuple[int, ...],
        dtype: Any,
        sharding: NamedSharding,
        *,
        is_staged: bool,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._tiles, self._shape, self._dtype = tiles, shape, dtype
        self._sharding, self._piece_bytes = sharding, piece_bytes
        self._is_staged = is_staged
        self._devices = list(sharding.mesh.devices.flat)
        self._pieces: dict[int, list[tuple[Move, list[jax.Array]]]] = {x: [] for x in tiles}
        self.parts: list[tuple[Move, Any]] = []

    def take(self, move: Move, values: np.ndarray, until: Until) -> None:
        """A part that is on its way: flat numbers, which are there when `until` says so."""
        self.parts.append((move, values.reshape(move.shape)))
        if self._is_staged:
            self._pieces[move.tile].append((move, self._put(move, values, until)))

    def put(self, move: Move, part: jax.Array) -> None:
        """A part that is on `device_of(move)`."""
        self.parts.append((move, part))
        self._pieces[move.tile].append((move, [part]))

    def _put(self, move: Move, values: np.ndarray, until: Until) -> list[jax.Array]:
        device = self.device_of(move)
        most = max(self._piece_bytes // values.itemsize, 1)
        pieces = []
        for start in range(0, values.size, most):
            piece = values[start : start + most]
            until((start + piece.size) * values.itemsize)
            pieces.append(jax.device_put(piece, device))
        return pieces

    def device_of(self, move: Move) -> jax.Device:
        """Where a part should come: the first of the devices that want it."""
        device: jax.Device = self._devices[self._tiles[move.tile].devices[0]]
        return device

    def shape_of(self, move: Move) -> jax.ShapeDtypeStruct:
        """What a part is, where it should come."""
        _, dtype = plain(self._shape, self._dtype)
        place = SingleDeviceSharding(self.device_of(move))
        return jax.ShapeDtypeStruct(move.shape, dtype, sharding=place)

    def array(self) -> jax.Array:
        """The array, when all parts are there."""
        if not any(self._pieces.values()):
            return placed(self.parts, self._tiles, self._shape, self._dtype, self._sharding)
        whole = []
        for number, tile in self._tiles.items():
            found = self._pieces[number]
            layout = tuple((move.put, move.shape, len(pieces)) for move, pieces in found)
            with no_mesh():
                joined = _joined(tile.shape, layout)(*(p for _, pieces in found for p in pieces))
            whole.append((joined, tile.devices))
        return assembled(whole, self._shape, self._dtype, self._sharding)


@functools.lru_cache(maxsize=512)
def _box(take: Box) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda shard: shard[slices(take)])


@functools.lru_cache(maxsize=512)
def _piece(count: int) -> Callable[[jax.Array, int], jax.Array]:
    def piece(part: jax.Array, start: Any) -> jax.Array:
        return jax.lax.dynamic_slice(part.reshape(-1), (start,), (count,))

    return jax.jit(piece)


@functools.lru_cache(maxsize=512)
def _piece_at(start: int, count: int) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda part: jax.lax.slice(part.reshape(-1), (start,), (start + count,)))


@functools.lru_cache(maxsize=512)
def _joined(
    shape: tuple[int, ...], layout: tuple[tuple[Box, tuple[int, ...], int], ...]
) -> Callable[..., jax.Array]:
    """Makes a tile of pieces; the layout says where a part goes, its shape and how many it has."""

    def joined(*pieces: jax.Array) -> jax.Array:
        whole, start = None, 0
        for put, part_shape, count in layout:
            own = pieces[start : start + count]
            start += count
            part = jnp.concatenate([x.reshape(-1) for x in own]).reshape(part_shape)
            if part_shape == shape:
                return part
            whole = jnp.zeros(shape, part.dtype) if whole is None else whole
            whole = jax.lax.dynamic_update_slice(whole, part, [first for first, _ in put])
        assert whole is not None
        return whole

    return jax.jit(joined)
