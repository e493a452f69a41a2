"""What a scan is given that is made of nothing is made in its body.

JAX takes what does not depend on a carry or a slice out of a scan that it differentiates, causal
masks for one: outside, they are arrays of the whole batch, which stay in memory and are read in
every iteration of both passes. Made in the body, of positions and numbers, they are fused into
what reads them, as where a loop is unrolled or has `jax.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import (
    Atom,
    Graph,
    eliminate_dead_code,
    made_from,
    read_atom,
    variables,
    with_jaxpr,
)
from autopar.passes.graph.microbatched import LoopPhase, scan_like
from autopar.passes.graph.primitives import CHEAP

LARGE = 1 << 16  # elements; caches hold what is smaller, and it may be read there


def with_sunk_constants(graph: Graph) -> Graph:
    """The same program, whose scans make large arrays of numbers alone where they read them."""
    jaxpr = _sunk(graph.jaxpr)
    return graph if jaxpr is graph.jaxpr else with_jaxpr(graph, jaxpr)


def _sunk(jaxpr: Jaxpr) -> Jaxpr:
    if not any(eqn.primitive.name == "scan" for eqn in jaxpr.eqns):
        return jaxpr
    nothing = _made_of_nothing(jaxpr.eqns)
    eqns = [_with_sunk(eqn, jaxpr.eqns, nothing) for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return eliminate_dead_code(jaxpr.replace(eqns=eqns))


def _made_of_nothing(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """What is made of numbers alone, by cheap operations element by element."""
    found = set[Var]()
    for eqn in eqns:
        is_cheap = eqn.primitive.name in CHEAP and not eqn.effects
        if is_cheap and found.issuperset(variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _with_sunk(scan: JaxprEqn, eqns: Sequence[JaxprEqn], nothing: Collection[Var]) -> JaxprEqn:
    """A scan that is given none of it, and so the scans in its body."""
    if scan.primitive.name != "scan" or scan.params["jaxpr"].consts:
        return scan
    loop = LoopPhase(scan)
    consts = variables(loop.consts.values())
    large = {outer for outer in consts if outer in nothing and outer.aval.size >= LARGE}
    if large:
        names: dict[Var, Atom] = {}
        made = [_renamed(eqns[number], names) for number in sorted(made_from(eqns, large))]
        pairs = loop.consts.items()
        same = {x: names[y] for x, y in pairs if not isinstance(y, Literal) and y in large}
        made += (eqn.replace(invars=_read(same, eqn.invars)) for eqn in loop.body.eqns)
        scan = scan_like(
            scan,
            [pair for pair in pairs if pair[0] not in same],
            [replace(item, result=read_atom(same, item.result)) for item in loop.accumulators],
            [*loop.slices.items()],
            [(read_atom(same, atom), outer) for atom, outer in loop.stacks],
            made,
        )
    closed = scan.params["jaxpr"]
    body = _sunk(closed.jaxpr)
    if body is closed.jaxpr:
        return scan
    return scan.replace(params={**scan.params, "jaxpr": ClosedJaxpr(body, closed.consts)})


def _renamed(eqn: JaxprEqn, names: dict[Var, Atom]) -> JaxprEqn:
    """An equation with results of its own, on what its operands have become."""
    operands = _read(names, eqn.invars)
    names.update((var, jax_compat.new_var(var.aval)) for var in eqn.outvars)
    return eqn.replace(invars=operands, outvars=_read(names, eqn.outvars))


def _read(names: Mapping[Var, Atom], atoms: Sequence[Atom]) -> list[Atom]:
    return [read_atom(names, atom) for atom in atoms]
