"""Buffers that are filled with a number before something writes into them part by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.passes.graph.scans import ScanParts
from autopar.passes.sharding.layout import local_shape
from autopar.passes.sharding.spmd_program import Loop


def stacks_of(loop: Loop, mesh: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
    """What a device has of the stacks that a loop makes."""
    _, stacks = ScanParts.of(loop.eqn).results(loop.results)
    avals = [(v.atom.aval, v.layout) for v in stacks]
    return [
        jax.ShapeDtypeStruct(local_shape(aval.shape, layout, mesh), aval.dtype)
        for aval, layout in avals
    ]


def filled(like: Sequence[jax.Array | jax.ShapeDtypeStruct], after: Any) -> tuple[list[Any], Any]:
    """Buffers once another array is there: like arrays of one number each, or of zeros.

    Args:
      like: such an array; of zeros, what a device has.
      after: what they wait for.

    Returns:
      The buffers; and what they wait for, which is read as it is returned.
    """
    numbers = [
        jnp.zeros((), x.dtype)
        if isinstance(x, jax.ShapeDtypeStruct)
        else lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
        for x in like
    ]
    numbers, after = lax.optimization_barrier((numbers, after))
    return [*map(lax.broadcast, numbers, (x.shape for x in like))], after
