"""Primitives of libraries that are written as functions of JAX: their equations stand for these.

Equinox has markers ("this is not batched") and loops of its own, Lineax its linear solves: each is
a primitive of its own, with rules for derivatives and `jax.vmap`. Where a program is traced these
have done their work, and XLA gets what JAX makes of the function.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from autopar.passes.graph import jax_compat, primitives


def stands_for(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What a library's equation stands for; None: it is JAX's, or none knows but XLA."""
    if eqn.primitive.name in primitives.TABLE or eqn.effects:
        return None
    function = jax_compat.library_function(eqn.primitive)
    if function is None:
        return None

    def results(*operands: Any) -> Any:
        return function(*operands, **eqn.params)

    shapes = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=_is_weak(v)) for v in eqn.invars
    ]
    closed = jax.make_jaxpr(results)(*shapes)
    found = [(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.outvars]
    return closed if found == [(v.aval.shape, v.aval.dtype) for v in eqn.outvars] else None


def _is_weak(atom: Any) -> bool:
    return bool(getattr(atom.aval, "weak_type", False))
