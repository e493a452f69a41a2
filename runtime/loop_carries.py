"""What the device's loops carry from trip to trip, and what they stack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from autopar.arrays.typed_keys import is_key
from autopar.passes.sharding.compiler_rules import CompilerRules
from autopar.passes.sharding.run_order import is_gradient_sum
from autopar.passes.sharding.spmd_program import Relayout

STACKED_BYTES = 64 << 20
"""Of what a trip adds to a stack, from which a copy of the stack is worth avoiding."""


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


def in_order(slices: Iterable[Any], rules: CompilerRules) -> list[Any]:
    """Slices of stacks, the large ones in the order of dimensions that they have.

    XLA:GPU lays a stack as the loop that writes it computes its slices, with the trips not
    outermost, say, and copies the whole stack for a loop that reads it otherwise. Attention that
    keeps all probabilities, of a Llama 3 8B with four scanned layers and 8,192 tokens on each of
    eight H100s: 87.6 GiB, and 56.2 so (jax 0.10.2).
    """
    return [_in_order(value) if rules.keeps_order else value for value in slices]


def _in_order(value: Any) -> Any:
    value = jnp.asarray(value)
    if is_key(value.dtype) or value.ndim <= 2 or value.nbytes < STACKED_BYTES:
        return value
    return with_layout_constraint(value, Layout(tuple(range(value.ndim))))
