"""Arrays as memory: deleted ones, and one buffer behind several arrays.

XLA takes donated buffers over, and does not defend itself against a buffer that is gone or that is
donated twice: with several devices either can end the process. So both are found out before.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from autopar.arrays.ray_array import RayArray
from autopar.arrays.split_array import SplitArray, SplitSharding, put
from autopar.arrays.typed_keys import is_key


class Returned:
    """The leaves that the last call returned for the next one to donate.

    They are known to be alive in buffers of their own, which is cheaper to remember than to find
    out. They are held no longer than the caller holds the largest of them.
    """

    def __init__(self, largest: int | None):
        self._largest = largest
        self._rest: list[Any] | None = None
        self._reference: weakref.ref[Any] | None = None

    def remember(self, leaves: list[Any]) -> None:
        """Take over these leaves."""
        if self._largest is not None:
            rest = list(leaves)
            self._reference = weakref.ref(rest.pop(self._largest), self._forget)
            self._rest = rest

    def are(self, leaves: list[Any]) -> bool:
        """Whether these are the very leaves that are remembered, in their order."""
        rest, reference, largest = self._rest, self._reference, self._largest
        if rest is None or reference is None or largest is None:
            return largest is None
        if reference() is not leaves[largest]:
            return False
        others = leaves[:largest] + leaves[largest + 1 :]
        return all(map(operator.is_, others, rest))

    def _forget(self, reference: weakref.ref[Any]) -> None:
        if reference is self._reference:
            self._rest = self._reference = None


def own_copy(value: Any) -> Any:
    """An array in memory of its own, whatever becomes of the one that it is a copy of.

    `jax.device_put` takes over a NumPy array's memory where that is aligned, and the buffer of an
    array that lies on one of several devices, in another sharding also with `may_alias=False` (JAX
    0.10 to 0.12).
    """
    if not isinstance(value, jax.Array):
        return np.array(value)
    return jax.device_put(value, value.sharding, may_alias=False)  # for one sharding it copies


def any_deleted(leaves: Sequence[Any]) -> bool:
    """Whether one of the leaves is an array whose memory was donated or deleted."""
    kinds = set(map(type, leaves))
    if len(kinds) == 1:  # the usual state: only arrays
        is_deleted = getattr(kinds.pop(), "is_deleted", None)
        return is_deleted is not None and any(map(is_deleted, leaves))
    return any(leaf.is_deleted() for leaf in leaves if hasattr(leaf, "is_deleted"))


def share_a_leaf(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether one array is in both."""
    return not set(map(id, left)).isdisjoint(map(id, right))


def memory_of(leaf: Any) -> Iterator[tuple[Any, int]]:
    """Where a leaf's bytes are: the device and the address of each shard."""
    if isinstance(leaf, SplitArray):
        for part in leaf.parts:
            yield from memory_of(part)
        return
    if isinstance(leaf, RayArray):
        for resident in leaf.residents:
            yield resident.owner, resident.key
        return
    if not isinstance(leaf, jax.Array) or not leaf.size:
        return
    if is_key(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    for shard in leaf.addressable_shards:
        try:
            address = shard.data.unsafe_buffer_pointer()
        except jax.errors.JaxRuntimeError:  # a platform that does not tell
            address = id(leaf)
        yield shard.device, address


def copy_to(leaf: Any, sharding: Sharding | SplitSharding) -> Any:
    """A leaf in a sharding, in memory of its own: what the caller holds outlives a donation."""
    if isinstance(sharding, SplitSharding):
        given = put(leaf, sharding).parts
        parts = [copy_to(part, where) for part, where in zip(given, sharding.parts, strict=True)]
        return SplitArray(parts, sharding.axis)
    placed = put(leaf, sharding)
    # What is empty has no memory to tell it by, and is deleted all the same.
    if placed.size and set(memory_of(leaf)).isdisjoint(memory_of(placed)):
        return placed
    return own_copy(placed)
