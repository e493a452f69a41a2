"""What is taken out of a widened array is widened after it was taken: the wide one need not be.

A loss in float32 picks each row's logit with its label out of logits that were cast. XLA:TPU reads
what a gather takes from memory, so it would write all logits in float32 beside those in bfloat16,
and may keep them to the end of the step, because nothing waits for the loss. Elements go through a
gather unchanged, so the numbers are the same.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Graph, with_jaxpr


def with_casts_after(graph: Graph) -> Graph:
    """The same program, where gathers read what was not widened yet."""
    jaxpr = _rewritten(graph.jaxpr)
    return graph if jaxpr is graph.jaxpr else with_jaxpr(graph, jaxpr)


def _rewritten(jaxpr: Jaxpr) -> Jaxpr:
    casts: dict[Var, JaxprEqn] = {}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if _widens(eqn):
            casts[eqn.outvars[0]] = eqn
        operand = eqn.invars[0] if eqn.invars else None
        cast = casts.get(operand) if isinstance(operand, Var) else None
        if cast is None or not _only_takes(eqn):
            eqns.append(eqn)
            continue
        source, (result,) = cast.invars[0].aval, eqn.outvars
        taken = jax_compat.new_var(
            jax_compat.array_type(result.aval.shape, source.dtype, source.weak_type)
        )
        eqns.append(eqn.replace(invars=[cast.invars[0], *eqn.invars[1:]], outvars=[taken]))
        eqns.append(cast.replace(invars=[taken], outvars=[result]))
    return jaxpr if len(eqns) == len(jaxpr.eqns) else jaxpr.replace(eqns=eqns)


def _widens(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "convert_element_type" or eqn.params.get("sharding") is not None:
        return False
    if not isinstance(eqn.invars[0], Var):
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new))
    return floats and new.itemsize > old.itemsize


def _only_takes(eqn: JaxprEqn) -> bool:
    """Whether an equation's elements are those of its first operand, or what stands for none."""
    if eqn.primitive.name != "gather":
        return False
    fill = eqn.params["fill_value"]
    return fill is None or bool(fill != fill)  # NaN, which is NaN in every dtype
