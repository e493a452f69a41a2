"""Tiles between devices and host memory in pieces, for devices with memory of their own.

While one piece is sent, the next ones are copied to the host: into pinned memory, to which copies
run without the CPU, where the backend has it, and from where they are sent. What arrives, in such
memory too, is copied to the device piece by piece, and put together there.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from autopar.arrays.split_array import HOST_MEMORY
from autopar.passes.graph.logical import no_mesh
from autopar.runtime.ray.transport.chunks import Arrival
from autopar.runtime.ray.transport.host_tiles import as_bytes, assembled, numbers, placed, plain
from autopar.runtime.ray.transport.pinned import PIECE_BYTES, bytes_of, has_pinned, lies_plainly
from autopar.runtime.ray.transport.routes import Box, Move, Tile, slices

AHEAD = 8
"""Pieces that are copied to the host while an earlier one is sent, of 8 MB each: of a message of 64
MB no copy waits for a lane."""

Until = Callable[[int], None]
"""Waits until so many bytes of a part are there."""


def cut_out(
    array: Any, moves: Sequence[Move], devices: Mapping[Any, int], piece_bytes: int = PIECE_BYTES
) -> list[jax.Array]:
    """What moves take, in pieces on the devices.

    Called when the array has been asked for, and nothing else since: a device takes its programs
    in their order, and what is cut later waits for what it computes next.
    """
    return [x for part in parts_of(array, moves, devices) for x in _pieces(part, piece_bytes)]


def copied_out(pieces: list[jax.Array]) -> Iterator[np.ndarray]:
    """The bytes of pieces, as `host_tiles.taken` gives them, copied ahead of what is used.

    The list is emptied, so that devices need not have them to the end.
    """
    under_way: collections.deque[jax.Array] = collections.deque()
    while pieces:
        under_way.append(_towards_host(pieces.pop(0)))
        if len(under_way) > AHEAD:
            yield _in_host(under_way.popleft())
    while under_way:
        yield _in_host(under_way.popleft())


def parts_of(array: Any, moves: Sequence[Move], devices: Mapping[Any, int]) -> Iterator[jax.Array]:
    """What each move takes, on the device that has it; its shape is that of the move."""
    held = {devices[x.device]: x.data for x in numbers(array).addressable_shards} if moves else {}
    for move in moves:
        shard = held[move.device]
        whole = tuple((0, size) for size in shard.shape)
        with no_mesh():
            yield shard if move.take == whole else _box(move.take)(shard)


def _pieces(part: jax.Array, piece_bytes: int) -> Sequence[jax.Array]:
    """The elements of an array in their order, in pieces."""
    most = max(piece_bytes // np.dtype(part.dtype).itemsize, 1)
    if part.size <= most:
        return [part]
    with no_mesh():
        return _cut(most)(part)


def _towards_host(piece: jax.Array) -> jax.Array:
    """Begin to copy to the host."""
    (device,) = piece.devices()
    if has_pinned(device):
        there = SingleDeviceSharding(device, memory_kind=HOST_MEMORY)
        return jax.device_put(piece, there, may_alias=False)
    piece.copy_to_host_async()
    return piece


def _in_host(piece: jax.Array) -> np.ndarray:
    """The bytes of a piece when its copy is there: where they lie in pinned memory, if they do.

    `np.asarray` would copy them once more, into memory that is new each time.
    """
    (device,) = piece.devices()
    if piece.sharding.memory_kind == HOST_MEMORY and lies_plainly(device, piece.dtype):
        return bytes_of(piece)
    return as_bytes(np.asarray(piece))


class Landing:
    """An array on the receiving mesh, of which this process gets parts.

    Args:
      tiles: that its devices hold, by number.
      shape, dtype, sharding: of the array.
      is_staged: whether parts are copied to devices while they arrive; else it is done at the end.

    Attributes:
      parts: what came, in its order: numbers in the host's memory, bytes in several pieces of it,
        or numbers on a device.
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
        self._pieces: dict[int, list[Any]] = {number: [] for number in tiles}
        self.parts: list[tuple[Move, Any]] = []

    def take(self, move: Move, values: np.ndarray, until: Until) -> None:
        """A part that is on its way: flat numbers, which are there when `until` says so."""
        self.parts.append((move, values.reshape(move.shape)))
        if self._is_staged:
            self._put(move, values, until)

    def take_of(self, move: Move, arrival: Arrival, start: int, until: Until) -> None:
        """A part that is on its way, which begins at this byte of a message."""
        _, dtype = plain(self._shape, self._dtype)
        stop = start + math.prod(move.shape) * dtype.itemsize
        views = arrival.views(start, stop)
        if not arrival.pinned:
            self.take(move, views[0].view(dtype), lambda count: until(start + count))
            return
        self.parts.append((move, views))
        device = self.device_of(move)
        if dtype.kind not in "iufV" or not lies_plainly(device, dtype):
            until(stop)  # few programs have arrays of such types that are large
            self._put(move, np.concatenate(views).view(dtype), lambda _: None)
            return
        pieces, cuts, come = [], [], start
        for number, first, last in arrival.where(start, stop):
            piece = arrival.pinned[number]
            come += last - first
            until(min(come + piece.data.size - last, arrival.size))
            pieces.append(piece.on(device))
            cuts.append((first, last))
        self._pieces[move.tile].append((move, pieces, tuple(cuts)))

    def put(self, move: Move, part: jax.Array) -> None:
        """A part that is on `device_of(move)`."""
        self.parts.append((move, part))
        self._pieces[move.tile].append((move, [part], (None,)))

    def _put(self, move: Move, values: np.ndarray, until: Until) -> None:
        device = self.device_of(move)
        most = max(self._piece_bytes // values.itemsize, 1)
        pieces = []
        for start in range(0, values.size, most):
            piece = values[start : start + most]
            until((start + piece.size) * values.itemsize)
            pieces.append(jax.device_put(piece, device))
        self._pieces[move.tile].append((move, pieces, (None,) * len(pieces)))

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
        whole, dtype = [], plain(self._shape, self._dtype)[1]
        for number, tile in self._tiles.items():
            found = self._pieces[number]
            layout = tuple((move.put, move.shape, cuts) for move, _, cuts in found)
            arrays = [piece for _, pieces, _ in found for piece in pieces]
            with no_mesh():
                joined = _joined(tile.shape, dtype, layout)(*arrays)
            jax.block_until_ready(arrays)  # the memory that they come from is used again
            whole.append((joined, tile.devices))
        return assembled(whole, self._shape, self._dtype, self._sharding)


@functools.lru_cache(maxsize=512)
def _box(take: Box) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda shard: shard[slices(take)])


@functools.lru_cache(maxsize=512)
def _cut(most: int) -> Callable[[jax.Array], list[jax.Array]]:
    def cut(part: jax.Array) -> list[jax.Array]:
        flat = part.reshape(-1)
        return [
            jax.lax.slice(flat, (start,), (min(start + most, part.size),))
            for start in range(0, part.size, most)
        ]

    return jax.jit(cut)


Layout = tuple[tuple[Box, tuple[int, ...], tuple[tuple[int, int] | None, ...]], ...]
"""Of each part of a tile: where it goes, its shape, and of each of its pieces what bytes it takes;
None: all of its numbers."""


@functools.lru_cache(maxsize=512)
def _joined(shape: tuple[int, ...], dtype: Any, layout: Layout) -> Callable[..., jax.Array]:
    """Makes a tile of pieces."""

    def joined(*pieces: jax.Array) -> jax.Array:
        whole, left = None, list(pieces)
        for put, part_shape, cuts in layout:
            own, left = left[: len(cuts)], left[len(cuts) :]
            taken = [(x, *cut) for x, cut in zip(own, cuts, strict=True) if cut is not None]
            if taken:
                part = _numbers_of(taken, dtype)
            else:
                part = jnp.concatenate([x.reshape(-1) for x in own])
            part = part.reshape(part_shape)
            if part_shape == shape:
                return part
            whole = jnp.zeros(shape, part.dtype) if whole is None else whole
            whole = jax.lax.dynamic_update_slice(whole, part, [first for first, _ in put])
        assert whole is not None
        return whole

    return jax.jit(joined)


def _numbers_of(pieces: Sequence[tuple[jax.Array, int, int]], dtype: Any) -> jax.Array:
    """What bytes of pieces are as numbers; each piece with the first of them and the end."""
    are_words = all(
        x.dtype.itemsize == 4 and first % 4 == last % 4 == 0 for x, first, last in pieces
    )
    size, flat = 4 if are_words else 1, []
    for x, first, last in pieces:
        same = x if x.dtype.itemsize == size else jax.lax.bitcast_convert_type(x, jnp.uint8)
        flat.append(same.reshape(-1)[first // size : last // size])
    joined = jnp.concatenate(flat)
    itemsize = np.dtype(dtype).itemsize
    if itemsize > size:
        joined = joined.reshape(-1, itemsize // size)
    return jax.lax.bitcast_convert_type(joined, dtype).reshape(-1)
