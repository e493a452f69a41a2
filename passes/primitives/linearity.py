"""In which operands an equation is linear: how partial sums pass through it."""

from __future__ import annotations

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from autopar.passes.graph.primitives import LINEAR_ALL, LINEAR_EACH, LINEAR_FIRST, SCATTERS
from autopar.passes.primitives.shardings import dtype_of, is_tiny_float

OperandSets = tuple[frozenset[int], ...]


def linear_operands(eqn: JaxprEqn, rounding: bool = False) -> OperandSets:
    """Sets of operand positions in which an equation is jointly linear, the others held fixed.

    Linear means f(x + y) = f(x) + f(y) for the operands of one set taken together (so an operand
    that is left out of a sum must be zero there). Integer division and casts that lose digits
    are not linear, nor is anything of floats of eight bits or of booleans; with `rounding`, casts
    to floats of at least 16 bits are: each summand is then rounded as the sum would be. An equation
    that is linear in nothing has no sets.

    >>> import jax
    >>> linear_operands(jax.make_jaxpr(lambda x, y: x * y)(1.0, 2.0).eqns[0])
    (frozenset({0}), frozenset({1}))
    """
    if any(is_tiny_float(dtype := dtype_of(v)) or dtype == jnp.bool_ for v in eqn.outvars):
        return ()
    tiny = {k for k, var in enumerate(eqn.invars) if is_tiny_float(dtype_of(var))}
    found = _linear_sets(eqn, rounding)
    return tuple(positions for positions in found if tiny.isdisjoint(positions))


def _linear_sets(eqn: JaxprEqn, rounding: bool) -> OperandSets:
    name = eqn.primitive.name
    if name in LINEAR_ALL:
        return _one_set(range(len(eqn.invars)))
    if name in LINEAR_EACH:
        return frozenset({0}), frozenset({1})
    if name in LINEAR_FIRST:
        rounds = name == "div" and jnp.issubdtype(dtype_of(eqn.outvars[0]), jnp.integer)
        return () if rounds or (name == "gather" and _fills(eqn)) else _one_set((0,))
    if name == "convert_element_type":
        return _one_set((0,)) if _widens(eqn) or (rounding and _rounds(eqn)) else ()
    if name == "select_n":
        return _one_set(range(1, len(eqn.invars)))
    if name == "dynamic_update_slice":
        return _one_set((0, 1))
    if SCATTERS.get(name) == "sum":
        return _one_set((0, 2))
    if name == "triangular_solve":
        return _one_set((1,))
    return ()


def _one_set(positions: range | tuple[int, ...]) -> OperandSets:
    return (frozenset(positions),)


def _fills(eqn: JaxprEqn) -> bool:
    """Whether a gather gives some number (not 0 or NaN) for an index that is out of bounds."""
    if eqn.params["mode"] != GatherScatterMode.FILL_OR_DROP:
        return False
    value = eqn.params["fill_value"]
    if value is None:
        return not jnp.issubdtype(dtype_of(eqn.outvars[0]), jnp.inexact)
    return not (value == 0 or value != value)


def _widens(eqn: JaxprEqn) -> bool:
    """Whether a cast represents every value of the old dtype, so that it commutes with adding."""
    old, new = dtype_of(eqn.invars[0]), dtype_of(eqn.outvars[0])
    if is_tiny_float(old) or is_tiny_float(new):  # JAX does not say which of them holds which
        return False
    kind = jnp.inexact if jnp.issubdtype(old, jnp.floating) else jnp.complexfloating
    if jnp.issubdtype(old, jnp.inexact) and jnp.issubdtype(new, kind):
        return jnp.promote_types(old, new) == new
    return False


def _rounds(eqn: JaxprEqn) -> bool:
    """Whether a cast rounds numbers of the old dtype to a float of at least 16 bits."""
    old, new = dtype_of(eqn.invars[0]), dtype_of(eqn.outvars[0])
    floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new))
    return floats and min(old.itemsize, new.itemsize) >= 2
