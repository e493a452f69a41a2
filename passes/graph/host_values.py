"""Values that wait in the memory of the hosts until they are read again.

The equation is the identity. What reads its result brings it back, as it does a leaf of the state.
"""

from __future__ import annotations

from typing import Any

from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn, Var
from jax.interpreters import mlir

from autopar.passes.graph import jax_compat
from autopar.passes.graph.primitives import TO_HOST

to_host_p = jex_core.Primitive(TO_HOST)
to_host_p.def_impl(lambda x: x)
to_host_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(to_host_p, lambda context, x: [x])


def put_away(value: Var, info: Any) -> JaxprEqn:
    """The equation after which a value is in the hosts' memory."""
    there = jax_compat.new_var(value.aval)
    return jex_core.new_jaxpr_eqn([value], [there], to_host_p, {}, jex_core.no_effects, info)


def is_put_away(eqn: JaxprEqn) -> bool:
    """Whether an equation puts its operand into the hosts' memory."""
    return eqn.primitive is to_host_p
