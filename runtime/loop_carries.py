"""What the device's loops carry from trip to trip."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.arrays.typed_keys import is_key
from autopar.passes.sharding.compiler_rules import CompilerRules
from autopar.passes.sharding.run_order import is_gradient_sum
from autopar.passes.sharding.spmd_program import Relayout


def as_carried(value: Any, reference: Any) -> Any:
    """A carry must keep its dtype and weak type through the loop."""
    value = jnp.asarray(value)
    if is_key(value.dtype) or (
        value.dtype == reference.dtype and value.weak_type == getattr(reference, "weak_type", False)
    ):
        return value
    return lax.convert_element_type(value, reference.dtype)


def added_in_loop(instruction: Relayout, value: Any, rules: CompilerRules) -> Any:
    """A device's part of a sum over devices, which compilers cannot move out of the loop.

    One of all devices' may move: what is carried is as large then.
    """
    is_part = any(step.kind == "reduce-scatter" for step in instruction.steps)
    if rules.moves_scatters and is_part and is_gradient_sum(instruction):
        return lax.optimization_barrier(value)
    return value
