"""Pinned memory of the host, from and to which devices copy without its CPU.

What JAX copies from ordinary memory to a device goes through pinned memory of its own first, which
one core does at 7 GB/s or so; bytes that arrive over connections can lie there from the beginning.
Each piece of such memory is an array of JAX, which nobody but this file knows: its bytes are
written where they lie, and it is copied to a device as a whole.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from autopar.arrays.split_array import HOST_MEMORY

PIECE_BYTES = 8 << 20
"""What is copied between a device and the host at once: each copy is started by Python."""
_MOST_IDLE = 256 << 20
_PLAIN_LAYOUTS = ("cpu", "gpu", "cuda", "rocm")
"""Platforms whose arrays lie in the host's memory row by row, without tiles."""
_PACKED = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")
"""Types of which several numbers share a byte there."""


@functools.cache
def has_pinned(device: jax.Device) -> bool:
    """Whether a device copies to and from pinned memory of its host."""
    return any(memory.kind == HOST_MEMORY for memory in device.addressable_memories())


def lies_plainly(device: jax.Device, dtype: np.dtype) -> bool:
    """Whether arrays in a device's pinned memory are their numbers, one after the other."""
    return device.platform in _PLAIN_LAYOUTS and np.dtype(dtype).name not in _PACKED


def takes_bytes(device: jax.Device) -> bool:
    """Whether a device has pinned memory in which what arrives may lie as it comes."""
    return has_pinned(device) and lies_plainly(device, np.dtype(np.uint32))


class _Memory:
    """The memory of an array in the host, for NumPy, which then keeps the array."""

    def __init__(self, array: jax.Array) -> None:
        self.array = array
        address = array.unsafe_buffer_pointer()
        self.__array_interface__ = {
            "version": 3,
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def bytes_of(array: jax.Array) -> np.ndarray:
    """The bytes of an array on one device, where they lie in the host's memory; waits for them."""
    return np.asarray(_Memory(array.block_until_ready()))


class PinnedPiece:
    """So many bytes of pinned memory.

    Attributes:
      data: these bytes, to be written.
    """

    def __init__(self, array: jax.Array, give_back: Callable[[], None]) -> None:
        self._array = array
        self.data = bytes_of(array)
        self._copies: dict[jax.Device, jax.Array] = {}
        # What is made of these bytes holds them, but not what is behind them.
        weakref.finalize(self.data, give_back).atexit = False

    def on(self, device: jax.Device) -> jax.Array:
        """A copy on a device; from then until it is there, the bytes must not change."""
        if device not in self._copies:
            place = SingleDeviceSharding(device)
            self._copies[device] = jax.device_put(self._array, place, may_alias=False)
        return self._copies[device]


class PinnedMemory:
    """Pieces of the pinned memory of a device, each used again when nobody holds its bytes."""

    def __init__(self, device: jax.Device, piece_bytes: int = PIECE_BYTES) -> None:
        self._place = SingleDeviceSharding(device, memory_kind=HOST_MEMORY)
        self._piece_bytes = piece_bytes
        self._idle: dict[int, collections.deque[jax.Array]] = {}

    def pieces(self, size: int) -> list[PinnedPiece]:
        """So many bytes, in pieces of the same size but for the last."""
        sizes = [self._piece_bytes] * (size // self._piece_bytes)
        return [self._piece(count) for count in (*sizes, size % self._piece_bytes) if count]

    def _piece(self, size: int) -> PinnedPiece:
        try:
            array = self._idle[size].pop()
        except (KeyError, IndexError):
            # As words, of which devices make numbers of most types faster than of bytes.
            empty = np.zeros(size, np.uint8) if size % 4 else np.zeros(size // 4, np.uint32)
            array = jax.device_put(empty, self._place, may_alias=False)

        def give_back() -> None:
            # It may run wherever Python collects garbage, so it takes no lock.
            if sum(n * len(x) for n, x in list(self._idle.items())) + size <= _MOST_IDLE:
                self._idle.setdefault(size, collections.deque()).append(array)

        return PinnedPiece(array, give_back)
