"""A step without `jax.checkpoint`: what it computes again is read where it was computed first."""

from __future__ import annotations

from collections.abc import Collection

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import (
    Atom,
    Graph,
    eliminate_dead_code,
    merge_equal_equations,
    read_atom,
    readers_of,
    variables,
    with_jaxpr,
)
from autopar.passes.recompute.attention_statistics import (
    with_statistics,
    without_unread_statistics,
)
from autopar.passes.recompute.computed_before import ComputedBefore, OfNothing, Outside
from autopar.passes.recompute.scan_stacks import scan_pairs


def without_checkpoints(graph: Graph) -> Graph:
    """The same step, in which nothing is computed twice.

    A backward scan computes again what the forward scan has computed in another loop: here the
    forward scan stacks what the derivatives read, as it would without `jax.checkpoint`.
    """
    jaxpr = _without(with_statistics(graph.jaxpr))
    return with_jaxpr(graph, without_unread_statistics(jaxpr))


def _without(jaxpr: Jaxpr) -> Jaxpr:
    env: dict[Var, Atom] = {}
    eqns = list[JaxprEqn]()
    for eqn in jaxpr.eqns:
        operands = [read_atom(env, atom) for atom in eqn.invars]
        if is_barrier(eqn):
            env.update(zip(eqn.outvars, operands, strict=True))
        else:
            eqns.append(_with_plain_body(eqn.replace(invars=operands)))
    outvars = [read_atom(env, atom) for atom in jaxpr.outvars]
    eqns = _with_whole_stacks(eqns, set(variables(outvars)), set(jaxpr.invars))
    jaxpr = jaxpr.replace(eqns=eqns, outvars=outvars)
    return eliminate_dead_code(merge_equal_equations(jaxpr))


def _with_plain_body(eqn: JaxprEqn) -> JaxprEqn:
    """A scan whose body computes nothing twice."""
    if eqn.primitive.name != "scan":
        return eqn
    closed = eqn.params["jaxpr"]
    body = ClosedJaxpr(_without(closed.jaxpr), closed.consts)
    return eqn.replace(params={**eqn.params, "jaxpr": body})


def _with_whole_stacks(
    eqns: list[JaxprEqn], results: Collection[Var], given: Collection[Var]
) -> list[JaxprEqn]:
    """The equations of a scope, whose backward scans read what forward scans have computed."""
    pairs = [(number, reader) for number, reader, _ in scan_pairs(eqns, results, given)]
    if not pairs:
        return eqns
    nothing, readers, eqns = OfNothing.of(eqns), readers_of(eqns), [*eqns]
    for number, reader in pairs:
        # What the backward scan reads now besides is made before the forward one, as that is now.
        outside = Outside.before(eqns[:number], nothing)
        computed = ComputedBefore(eqns[number], eqns[reader], outside)
        if computed.again:
            others = {v for v in eqns[number].outvars if readers.get(v, [reader]) != [reader]}
            eqns[number], eqns[reader] = computed.rewritten(others.union(results))
    return eqns
