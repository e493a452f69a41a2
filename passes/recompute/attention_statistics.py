"""Attention by cuDNN with and without the statistics of its softmax, which its gradient reads.

A forward scan whose body has `jax.checkpoint` around it computes attention as an inference does, or
drops the statistics; the backward scan computes it again with them, so that what one has computed
is not what the other reads. Where nothing is to be computed again, the forward scan makes them too.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import readers_of, variables, walk

ATTENTION = "dot_product_attention_fwd_wrapper"


def with_statistics(jaxpr: Jaxpr) -> Jaxpr:
    """All attention in scans and outside makes its statistics, read or not, if any does."""
    attention = (eqn for eqn in walk(jaxpr) if eqn.primitive.name == ATTENTION)
    is_made = any(not isinstance(v, DropVar) for eqn in attention for v in eqn.outvars[1:])
    return _changed(jaxpr, _making) if is_made else jaxpr


def without_unread_statistics(jaxpr: Jaxpr) -> Jaxpr:
    """Attention whose statistics nobody reads makes none."""
    return _changed(jaxpr, _not_making)


def _changed(jaxpr: Jaxpr, change: Callable[[JaxprEqn, bool], JaxprEqn]) -> Jaxpr:
    read = {*readers_of(jaxpr.eqns), *variables(jaxpr.outvars)}
    eqns = list[JaxprEqn]()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            closed = eqn.params["jaxpr"]
            body = ClosedJaxpr(_changed(closed.jaxpr, change), closed.consts)
            eqn = eqn.replace(params={**eqn.params, "jaxpr": body})
        elif eqn.primitive.name == ATTENTION:
            eqn = change(eqn, any(v in read for v in eqn.outvars[1:]))
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _making(eqn: JaxprEqn, is_read: bool) -> JaxprEqn:
    if is_read:
        return eqn
    params = {**eqn.params, "is_training": True}
    given = (jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars)
    made = jax.make_jaxpr(lambda *xs: eqn.primitive.bind(*xs, **params))(*given)
    outvars = [eqn.outvars[0], *map(jax_compat.new_var, made.out_avals[1:])]
    return eqn.replace(params=params, outvars=outvars)


def _not_making(eqn: JaxprEqn, is_read: bool) -> JaxprEqn:
    if is_read or not eqn.params["is_training"]:
        return eqn
    return eqn.replace(params={**eqn.params, "is_training": False}, outvars=eqn.outvars[:1])
