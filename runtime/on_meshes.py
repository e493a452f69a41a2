"""Values on the meshes of several stages: where they are, and their copies on others."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.arrays.split_array import HOST_MEMORY, SplitArray, put
from autopar.passes.graph import jax_compat


@dataclass(frozen=True)
class HeldRows:
    """Where the parts of a split value are: the dimension, each part's end, and its stage."""

    axis: int
    ends: tuple[int, ...]
    stages: tuple[int, ...]

    def bounds(self) -> list[tuple[int, int]]:
        """The first row of each part, and the one after its last."""
        return list(itertools.pairwise((0, *self.ends)))


Home = int | HeldRows | None
"""The stage of a value, or of its parts; None: it belongs to none."""


@dataclass(frozen=True)
class Cut:
    """How an array that lies nowhere yet is cut: one dimension, by these axes where they divide."""

    dim: int
    axes: tuple[str, ...]


class OnMeshes:
    """An array, and its copies on the meshes that have read it."""

    def __init__(self, array: Any, cut: Cut | None = None):
        self.first, self.cut = array, cut
        self._copies: dict[tuple[jax.Device, ...], Any] = {}
        devices = _devices_of(array)
        if devices is not None and array.sharding.memory_kind != HOST_MEMORY:
            self._copies[devices] = array

    def on(self, mesh: Mesh) -> Any:
        """The array on the devices of a mesh."""
        if isinstance(self.first, SplitArray):
            devices: tuple[jax.Device, ...] = tuple(mesh.devices.flat)
            if devices not in self._copies:
                self._copies[devices] = put(self.first, NamedSharding(mesh, PartitionSpec()))
            return self._copies[devices]
        devices = tuple(mesh.devices.flat)
        found = self._copies.get(devices)
        if found is None:
            spec = spec_on(self.first, self.cut, mesh)
            found = jax.device_put(self.first, NamedSharding(mesh, spec))
            self._copies[devices] = found
        return found


def _devices_of(array: Any) -> tuple[jax.Device, ...] | None:
    """The devices of an array that is bound to them, in their order."""
    if not isinstance(array, jax.Array) or not array.committed:
        return None
    if isinstance(array.sharding, NamedSharding):
        mesh = array.sharding.mesh
        return tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else None
    devices = tuple(array.sharding.device_set)
    return devices if len(devices) == 1 else None


def spec_on(array: Any, cut: Cut | None, mesh: Mesh) -> PartitionSpec:
    """How an array is cut on a mesh: as it is where it lies, or as was asked for."""
    sharding, shape = getattr(array, "sharding", None), np.shape(array)
    if isinstance(sharding, NamedSharding) and array.committed:
        if dict(sharding.mesh.shape) == dict(mesh.shape):
            return sharding.spec
        cuts = [dim for dim, axes in enumerate(sharding.spec) if axes]
        cut = Cut(cuts[0], ()) if cuts else None
    if cut is None or cut.dim >= len(shape):
        return PartitionSpec()
    named = cut.axes if cut.axes and set(cut.axes) <= set(mesh.axis_names) else mesh.axis_names
    axes, parts = list[str](), 1
    for name in named:
        if shape[cut.dim] and shape[cut.dim] % (parts * mesh.shape[name]) == 0:
            parts *= mesh.shape[name]
            axes.append(name)
    return PartitionSpec(*[None] * cut.dim, tuple(axes)) if axes else PartitionSpec()


def is_var(atom: Any) -> bool:
    """Whether an atom is a variable, and no number."""
    return not isinstance(atom, Literal)


def is_by_rows(eqn: JaxprEqn, split: Mapping[Var, HeldRows]) -> bool:
    """Whether an elementwise equation has split operands of one shape, and numbers beside them."""
    shapes = {v.aval.shape for v in split} | {v.aval.shape for v in eqn.outvars}
    return len(shapes) == 1 and all(
        (is_var(v) and v in split) or v.aval.shape == () for v in eqn.invars
    )


def is_scan_of(eqn: JaxprEqn, split: Mapping[Var, HeldRows]) -> bool:
    """Whether what is split is what a scan runs over."""
    start = sum(jax_compat.scan_counts(eqn.params))
    before = {v for v in eqn.invars[:start] if is_var(v)}
    return before.isdisjoint(split) and all(rows.axis == 0 for rows in split.values())


def part_sliced(eqn: JaxprEqn, rows: HeldRows) -> int | None:
    """The part that a slice lies in, if it is one."""
    start, stop = (eqn.params[name][rows.axis] for name in ("start_indices", "limit_indices"))
    for number, (first, end) in enumerate(rows.bounds()):
        if first <= start and stop <= end:
            return number
    return None
