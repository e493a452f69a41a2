"""Equations whose results jump where an operand changes a little: comparisons and roundings."""

from __future__ import annotations

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.passes.graph.primitives import STEPS


def is_real(atom: Var | Literal) -> bool:
    """Whether a value holds real or complex numbers."""
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))


def is_jump(eqn: JaxprEqn) -> bool:
    """Whether the result jumps where an operand of real numbers changes a little.

    A last bit of an operand decides there. Two programs may round it differently (XLA contracts a
    product and a sum to one operation or not), and then no element would equal the maximum.
    """
    if eqn.primitive.name == "convert_element_type":
        return is_real(eqn.invars[0]) and not is_real(eqn.outvars[0])
    return eqn.primitive.name in STEPS and any(map(is_real, eqn.invars))
