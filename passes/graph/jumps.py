"""Equations whose results jump where an operand changes a little: comparisons and roundings."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.passes.graph.primitives import CONTROL_FLOW, HEAVY, STEPS


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


def compared(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """Real values that equations compare, or compute by anything but products to compare it.

    What they are compared with was made of the same bits: where one of both were computed again,
    it might be another one.
    """
    found: set[Var] = set()
    for eqn in reversed(eqns):
        if is_jump(eqn) or (
            eqn.primitive.name not in HEAVY | CONTROL_FLOW and not found.isdisjoint(eqn.outvars)
        ):
            found.update(v for v in eqn.invars if isinstance(v, Var) and is_real(v))
        elif eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            inside, pairs = compared(body.eqns), zip(eqn.invars, body.invars, strict=True)
            found.update(v for v, inner in pairs if inner in inside and isinstance(v, Var))
    return found
