"""Where slices begin that a step's values say: inside of the array, as JAX promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn


def within_bounds(
    eqn: JaxprEqn, operands: Sequence[Any], changes: Mapping[str, Any]
) -> Sequence[Any]:
    """Operands of an equation that is run with some params changed; starts are clamped.

    A slice that begins outside is moved inside. XLA (jaxlib 0.10 to 0.12) forgets that where a
    slice is sliced again, as a device or a microbatch takes its part of it: it adds both starts.
    """
    if eqn.primitive.name != "dynamic_slice":
        return operands
    array, *starts = operands
    sizes = changes.get("slice_sizes", eqn.params["slice_sizes"])
    most = (whole - size for whole, size in zip(jnp.shape(array), sizes, strict=True))
    pairs = zip(map(jnp.asarray, starts), most, strict=True)
    return [array, *(lax.clamp(_like(0, x), x, _like(end, x)) for x, end in pairs)]


def _like(number: int, start: Any) -> Any:
    """A number in the dtype of a start, or the largest one that this holds."""
    return jnp.asarray(min(number, jnp.iinfo(start.dtype).max), start.dtype)
