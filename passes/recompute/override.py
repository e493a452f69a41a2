"""A step without `jax.checkpoint`: what it computes again is read where it was computed first."""

from __future__ import annotations

from jax.extend.core import Var

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import (
    Atom,
    Graph,
    eliminate_dead_code,
    merge_equal_equations,
    read_atom,
    with_jaxpr,
)


def without_checkpoints(graph: Graph) -> Graph:
    """The same step, in which nothing is computed twice."""
    env: dict[Var, Atom] = {}
    eqns = []
    for eqn in graph.jaxpr.eqns:
        operands = [read_atom(env, atom) for atom in eqn.invars]
        if is_barrier(eqn):
            env.update(zip(eqn.outvars, operands, strict=True))
        else:
            eqns.append(eqn.replace(invars=operands))
    outvars = [read_atom(env, atom) for atom in graph.jaxpr.outvars]
    jaxpr = graph.jaxpr.replace(eqns=eqns, outvars=outvars)
    return with_jaxpr(graph, eliminate_dead_code(merge_equal_equations(jaxpr)))
