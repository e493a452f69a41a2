"""Trees whose leaves live on different meshes, brought together.

With several pipeline stages a state's leaves are on their stages' devices, and JAX refuses to mix
arrays of different devices in one computation. Here they are put on all of the plan's devices,
which is where a function of the whole tree can run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.arrays.buffers import copy_to
from autopar.arrays.split_array import DEVICES, SplitArray, mesh_of, put
from autopar.passes.graph import jax_compat

__all__ = ["apply", "gather", "mesh_of", "name_stages"]

_stages: set[frozenset[jax.Device]] = set()


def name_stages(meshes: Iterable[Mesh]) -> None:
    """Let JAX's error for arrays of different stages say what brings them together."""
    if not _stages:
        jax_compat.when_devices_differ(_of_stages)
    _stages.update(frozenset(mesh.devices.flat) for mesh in meshes)


def _of_stages(places: list[frozenset[jax.Device]]) -> str:
    if _stages.isdisjoint(places):
        return ""
    return (
        "\nautopar: these arrays lie on the devices of different stages of a pipeline, where its "
        "steps need them. step.apply(fn, state) runs a function such as optax.global_norm on all "
        "of them, step.gather(tree) brings a tree together, and autopar.follow(step) runs a "
        "forward pass stage by stage."
    )


def gather(tree: Any, mesh: Mesh) -> Any:
    """The tree with every array whole on every device of `mesh`; other leaves as they are.

    Arrays have memory of their own: the next step takes over that of the state.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: copy_to(x, whole) if _is_array(x) else x, tree)


def apply(fn: Callable[..., Any], tree: Any, args: tuple[Any, ...], mesh: Mesh) -> Any:
    """`fn(tree, *args)`, compiled for all devices of `mesh`.

    Arrays are cut along a dimension that the devices divide, where there is one. A result that has
    the structure of `tree` comes back in the places of `tree`, leaf by leaf where shapes are equal;
    so an average of parameters can go on to the next step. Other results are whole on every device.
    """
    structure: Any
    leaves, structure = jax.tree.flatten((tree, *args))
    arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def on_arrays(*values: Any) -> Any:
        given = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            given[i] = value
        return fn(*structure.unflatten(given))

    placed = [put(leaves[i], _spread(leaves[i], mesh)) for i in arrays]
    result = jax.jit(on_arrays)(*placed)
    shape: Any = jax.tree.structure(tree)
    if jax.tree.structure(result) != shape:
        return gather(result, mesh)

    def in_place(old: Any, new: Any) -> Any:
        is_array = isinstance(old, jax.Array | SplitArray)
        return put(new, old.sharding) if is_array and np.shape(new) == old.shape else new

    return jax.tree.map(in_place, tree, result)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | SplitArray | np.ndarray | np.generic)


def _spread(leaf: Any, mesh: Mesh) -> NamedSharding:
    count, sizes = mesh.devices.size, leaf.shape
    for dim in sorted(range(len(sizes)), key=lambda d: -sizes[d]):
        if sizes[dim] and sizes[dim] % count == 0:
            return NamedSharding(mesh, PartitionSpec(*([None] * dim), DEVICES))
    return NamedSharding(mesh, PartitionSpec())
