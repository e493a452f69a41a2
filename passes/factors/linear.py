"""In which operands an equation is linear: how partial sums pass through it."""

from __future__ import annotations

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from autopar.passes.factors.primitives import SCATTERS, names

OperandSets = tuple[frozenset[int], ...]

# Linear in their one operand.
_UNARY = names(
    """
    broadcast_in_dim copy copy_p cumsum device_put imag name neg real reduce_sum
    reduce_window_sum reshape rev slice split squeeze stop_gradient tile transpose unstack
    """
)
# Jointly linear in all operands.
_JOINT = names("add add_any sub concatenate stack complex pad select_and_scatter_add")
# Linear in each of the first two operands while the other is held fixed.
_BILINEAR = frozenset({"mul", "dot_general", "conv_general_dilated"})
# Linear in the first operand while the others (indices, a divisor, comparands) are held fixed.
_FIRST = frozenset({"div", "gather", "dynamic_slice", "select_and_gather_add"})


def linear_operands(eqn: JaxprEqn) -> OperandSets:
    """Sets of operand positions in which an equation is jointly linear, the others held fixed.

    Linear means f(x + y) = f(x) + f(y) for the operands of one set taken together (so an operand
    that is left out of a sum must be zero there). Integer division and casts that lose digits
    are not linear. An equation that is linear in nothing has no sets.

    >>> import jax
    >>> linear_operands(jax.make_jaxpr(lambda x, y: x * y)(1.0, 2.0).eqns[0])
    (frozenset({0}), frozenset({1}))
    """
    name = eqn.primitive.name
    if name in _JOINT or name == "optimization_barrier":
        return _one_set(range(len(eqn.invars)))
    if name in _BILINEAR:
        return frozenset({0}), frozenset({1})
    if name in _UNARY:
        return _one_set((0,))
    if name in _FIRST:
        integer = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer)
        return () if name == "div" and integer else _one_set((0,))
    if name == "convert_element_type":
        return _one_set((0,)) if _widens(eqn) else ()
    if name == "select_n":
        return _one_set(range(1, len(eqn.invars)))
    if name == "dynamic_update_slice":
        return _one_set((0, 1))
    if name in SCATTERS and SCATTERS[name] == "sum":
        return _one_set((0, 2))
    if name == "triangular_solve":
        return _one_set((1,))
    if name == "fft":
        return _one_set((0,))
    return ()


def _one_set(positions: range | tuple[int, ...]) -> OperandSets:
    return (frozenset(positions),)


def _widens(eqn: JaxprEqn) -> bool:
    """Whether a cast represents every value of the old dtype, so that it commutes with adding."""
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    for kind in (jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(old, kind) and jnp.issubdtype(new, kind):
            return jnp.promote_types(old, new) == new
    if jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.complexfloating):
        return jnp.promote_types(old, new) == new
    return False
