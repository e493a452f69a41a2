"""Values as the numbers that are moved when their layout changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autopar.arrays.typed_keys import is_key

TWO_BITS = (jnp.int2, jnp.uint2)
"""XLA:CPU corrupts its memory in collectives of these, so that they move as bytes (jax 0.10.2)."""


def is_sent_otherwise(dtype: Any) -> bool:
    """Whether what moves are other numbers: those that a typed key wraps, or bytes."""
    return is_key(dtype) or dtype in TWO_BITS


def as_sent(value: Any, send: Callable[[Any], Any]) -> Any:
    """What a step of a resharding makes of such a value: it moves these numbers."""
    if not is_key(value.dtype):
        return send(value.astype(jnp.int8)).astype(value.dtype)
    numbers = send(jax.random.key_data(value))
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(value))
