"""What devices make of their values together: sums, products, bits and extremes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

_BITWISE = {"and": jnp.bitwise_and, "or": jnp.bitwise_or}


def all_reduce(value: Any, names: tuple[str, ...], monoid: str) -> Any:
    """The devices' values combined by a monoid, within `jax.shard_map`."""
    if monoid == "sum":
        return lax.psum(value, names)
    if monoid == "prod":
        return jnp.prod(lax.all_gather(value, names), axis=0, dtype=value.dtype)
    if monoid in _BITWISE and value.dtype != jnp.bool_:  # of numbers, these are no extremes
        return _BITWISE[monoid].reduce(lax.all_gather(value, names), axis=0)
    greatest = monoid in ("max", "or")
    extreme = lax.pmax if greatest else lax.pmin
    if value.dtype == jnp.bool_:
        return extreme(value.astype(jnp.int32), names).astype(jnp.bool_)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return extreme(value, names)
    if value.dtype.itemsize == 1:  # of eight bits, some have no pattern for what follows
        return all_reduce(value.astype(jnp.float32), names, monoid).astype(value.dtype)
    return _from_ordered(extreme(_ordered(value, greatest), names), value.dtype)


# XLA's and NCCL's extremes over devices drop NaN, those of integers have nothing to drop: the bits
# of floats in the order of their numbers, with NaN at the end that wins.


def _ordered(value: Any, nan_is_greatest: bool) -> Any:
    """Integers of the same size in the same order."""
    integer = jnp.dtype(f"int{8 * value.dtype.itemsize}")
    limits = jnp.iinfo(integer)
    ordered = _flipped(lax.bitcast_convert_type(value, integer))
    nan = limits.max if nan_is_greatest else limits.min
    return jnp.where(jnp.isnan(value), jnp.array(nan, integer), ordered)


def _from_ordered(ordered: Any, dtype: Any) -> Any:
    return lax.bitcast_convert_type(_flipped(ordered), dtype)


def _flipped(bits: Any) -> Any:
    """The magnitude's bits of negative numbers turned round: its own inverse."""
    largest = jnp.iinfo(bits.dtype).max
    return jnp.where(bits < 0, bits ^ jnp.array(largest, bits.dtype), bits)
