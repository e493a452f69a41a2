"""`SplitArray`: one leaf whose rows lie on several meshes, and `put`, which moves leaves anywhere.

A pipeline that is cut inside a scan over layers keeps the layers' stacked leaves where the layers
are: rows 0 to 5 on the first stage's mesh, 6 to 11 on the second's. JAX has no array over different
meshes, so such a leaf of the state is a `SplitArray` between steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from autopar.arrays.operators import WholeArray

DEVICES = "devices"
"""The axis of a mesh of all devices."""

HOST_MEMORY = "pinned_host"
"""JAX's name of the memory of a device's host."""


@dataclass(frozen=True)
class SplitSharding:
    """Where the parts of a `SplitArray` are, each on a mesh of its own.

    `axis` is the dimension that is split, and `ends` are after the last row of each part.
    """

    axis: int
    ends: tuple[int, ...]
    parts: tuple[Sharding, ...]

    _is_concrete = False  # jnp.zeros_like asks: what it makes cannot lie here

    @property
    def device_set(self) -> set[jax.Device]:
        """The devices of all parts."""
        return {device for part in self.parts for device in part.device_set}

    def is_equivalent_to(self, other: Any, ndim: int) -> bool:
        """Whether an array of `ndim` dimensions is cut and placed alike."""
        if not isinstance(other, SplitSharding):
            return False
        pairs = zip(self.parts, other.parts, strict=True)
        same_rows = (self.axis, self.ends) == (other.axis, other.ends)
        return same_rows and all(a.is_equivalent_to(b, ndim) for a, b in pairs)

    def indices(self) -> list[tuple[slice, ...]]:
        """The rows of each part as an index."""
        before = (slice(None),) * self.axis
        return [(*before, slice(*rows)) for rows in itertools.pairwise((0, *self.ends))]


class SplitArray(WholeArray):
    """An array in parts along one dimension, each a `jax.Array` on a mesh of its own.

    NumPy's functions, `jax.device_get`, printing and `jax.block_until_ready` work as for a
    `jax.Array`. Indexing, operators and methods (`sum`, `astype`) bring it together on all of its
    devices first. JAX's own functions need `jax.numpy.asarray(array)`, which does the same, or the
    step's `gather` and `apply`. The step takes it back without a copy.

    Args:
      parts: what lies on each mesh, in order; they differ in the size of one dimension only.
      axis: that dimension.
    """

    weak_type = False

    def __init__(self, parts: Sequence[jax.Array], axis: int = 0):
        self.parts = tuple(parts)
        self.axis = axis
        first = self.parts[0]
        self.ends = tuple(itertools.accumulate(part.shape[axis] for part in self.parts))
        self.shape = (*first.shape[:axis], self.ends[-1], *first.shape[axis + 1 :])
        self.dtype = first.dtype

    @property
    def sharding(self) -> SplitSharding:
        """Where the parts are."""
        return SplitSharding(self.axis, self.ends, tuple(part.sharding for part in self.parts))

    def is_deleted(self) -> bool:
        """Whether a part's memory was given away."""
        return any(part.is_deleted() for part in self.parts)

    def delete(self) -> None:
        """Give up the memory of all parts."""
        for part in self.parts:
            part.delete()

    def block_until_ready(self) -> SplitArray:
        """Wait until every part is computed."""
        for part in self.parts:
            part.block_until_ready()
        return self

    def copy_to_host_async(self) -> None:
        """Start to copy all parts to the host."""
        for part in self.parts:
            part.copy_to_host_async()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a SplitArray becomes a NumPy array only by copying its parts")
        whole = np.concatenate([np.asarray(part) for part in self.parts], axis=self.axis)
        return whole if dtype is None else whole.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        return joined(self, NamedSharding(mesh_of([self.sharding]), PartitionSpec()))

    def __repr__(self) -> str:
        if self.is_deleted():
            return f"SplitArray({self.dtype}{list(self.shape)}, deleted)"
        return f"SplitArray({np.asarray(self)!r}, rows end at {list(self.ends)})"


def mesh_of(shardings: Sequence[Sharding | SplitSharding]) -> Mesh:
    """One axis over all devices of these shardings, in the order of their ids."""
    devices = {device for sharding in shardings for device in sharding.device_set}
    in_order = sorted(devices, key=lambda device: device.id)
    return Mesh(np.asarray(in_order), (DEVICES,), axis_types=(AxisType.Auto,))


def joined(array: SplitArray, sharding: Sharding) -> jax.Array:
    """The whole array in a sharding that JAX knows."""
    if not isinstance(sharding, NamedSharding):
        whole = NamedSharding(mesh_of([sharding]), PartitionSpec())
        return placed(joined(array, whole), sharding)
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    parts = [placed(part, whole) for part in array.parts]
    concatenate = jax.jit(jnp.concatenate, static_argnames="axis", out_shardings=sharding)
    return concatenate(parts, axis=array.axis)


def placed(leaf: Any, sharding: Sharding, *, may_alias: bool | None = None) -> jax.Array:
    """`jax.device_put`, also to other devices and another kind of memory, which JAX refuses."""
    if isinstance(leaf, jax.Array) and leaf.sharding.device_set != sharding.device_set:
        was_away, is_away = (x.memory_kind == HOST_MEMORY for x in (leaf.sharding, sharding))
        if was_away != is_away:  # from host to host, which have more memory
            between = sharding if was_away else leaf.sharding
            leaf = jax.device_put(leaf, between.with_memory_kind(HOST_MEMORY))
    return jax.device_put(leaf, sharding, may_alias=may_alias)


def put(leaf: Any, sharding: Sharding | SplitSharding) -> Any:
    """`jax.device_put`, of an array of any kind or a number, that knows split arrays."""
    if isinstance(sharding, SplitSharding):
        return SplitArray(put_parts(leaf, sharding), sharding.axis)
    return joined(leaf, sharding) if isinstance(leaf, SplitArray) else placed(leaf, sharding)


def assembled(
    shape: tuple[int, ...],
    sharding: Sharding | SplitSharding,
    read: Callable[[tuple[slice, ...]], np.ndarray],
) -> jax.Array | SplitArray:
    """An array of which each device is given its part, as `read` reads it.

    Only the parts of this process's devices are read, one after the other.
    """
    if not isinstance(sharding, SplitSharding):
        known: dict[Any, np.ndarray] = {}

        def part(rows: tuple[slice, ...] | None) -> np.ndarray:
            rows = rows or ()
            bounds = tuple(rows[d].indices(n)[:2] for d, n in enumerate(shape))
            if bounds not in known:
                known.clear()  # replicas come one after the other, or are read again
                known[bounds] = read(tuple(slice(*pair) for pair in bounds))
            return known[bounds]

        return jax.make_array_from_callback(shape, sharding, part)
    parts: list[Any] = []
    for start, stop, where in zip((0, *sharding.ends), sharding.ends, sharding.parts, strict=False):

        def moved(rows: tuple[slice, ...], start: int = start) -> np.ndarray:
            own = list(rows)
            own[sharding.axis] = slice(
                rows[sharding.axis].start + start, rows[sharding.axis].stop + start
            )
            return read(tuple(own))

        sizes = (*shape[: sharding.axis], stop - start, *shape[sharding.axis + 1 :])
        parts.append(assembled(sizes, where, moved))
    return SplitArray(parts, sharding.axis)


def put_parts(leaf: Any, sharding: SplitSharding) -> list[jax.Array]:
    """The parts of a leaf, each in its place."""
    if isinstance(leaf, SplitArray):
        if (leaf.axis, leaf.ends) == (sharding.axis, sharding.ends):
            return [placed(a, b) for a, b in zip(leaf.parts, sharding.parts, strict=True)]
        leaf = leaf.__jax_array__()
    places = zip(sharding.indices(), sharding.parts, strict=True)
    return [placed(leaf[rows], part) for rows, part in places]
