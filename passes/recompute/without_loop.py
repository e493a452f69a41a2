"""A loop over one microbatch, the whole batch, written as the equations of its body.

What runs again is chosen in the form of a loop (`in_one_microbatch`); a loop that runs once would
be taken apart by XLA anyway, but late: what the program has told it of the order in which it runs
is about the end of the loop's body then, and gradients of weights were left to the end of the step,
with all that had been computed again for them (a graph network on H100s: 2.7 GiB where 1.5 were
planned, `benchmarks/compilers.py --memory 80%`).
"""

from __future__ import annotations

from jax.extend.core import JaxprEqn, Literal, Var

from autopar.passes.graph.graph import Atom, eliminate_dead_code, makers_of, read_atom, with_jaxpr
from autopar.passes.graph.microbatched import LoopPhase, Microbatched, in_phases

_ADDITIONS = ("add", "add_any")
_EXPANSIONS = ("broadcast_in_dim", "reshape")


def without_loop(step: Microbatched) -> Microbatched:
    """The program of `in_one_microbatch`, perhaps rewritten in its body, without its loop."""
    loop, jaxpr = step.loop, step.graph.jaxpr
    assert loop is not None and loop.num_microbatches == 1 and len(step.loops) == 1
    maker = makers_of(jaxpr.eqns)
    env: dict[Var, Atom] = {**loop.consts}
    for inner, outer in loop.slices.items():
        assert isinstance(outer, Var)
        expansion = jaxpr.eqns[maker[outer]]
        assert expansion.primitive.name in _EXPANSIONS, str(expansion)
        env[inner] = expansion.invars[0]
    after: dict[Var, Atom] = {}
    added = set[int]()
    for total, index, value in _sums(loop):
        after[total] = value
        added.add(index)
    stacked = {outer: inner for inner, outer in loop.stacks}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn is loop.scan:
            inside = (x for i, x in enumerate(loop.body.eqns) if i not in added)
            eqns += (_reading(env, x) for x in inside)
            after = {var: read_atom(env, atom) for var, atom in after.items()}
        elif eqn.primitive.name == "squeeze" and eqn.invars[0] in stacked:
            after[eqn.outvars[0]] = read_atom(env, stacked[eqn.invars[0]])
        else:
            eqns.append(_reading(after, eqn))
    outvars = [read_atom(after, atom) for atom in jaxpr.outvars]
    whole = eliminate_dead_code(jaxpr.replace(eqns=eqns, outvars=outvars))
    return in_phases(with_jaxpr(step.graph, whole))


def _sums(loop: LoopPhase) -> list[tuple[Var, int, Atom]]:
    """The totals that are sums of one addend each: the addition, and what is added to zero."""
    found = []
    maker = makers_of(loop.body.eqns)
    for item in loop.accumulators:
        assert isinstance(item.result, Var)
        index = maker[item.result]
        eqn = loop.body.eqns[index]
        (addend,) = (atom for atom in eqn.invars if atom is not item.carry)
        assert eqn.primitive.name in _ADDITIONS, str(eqn)
        found.append((item.total, index, addend))
    return found


def _reading(env: dict[Var, Atom], eqn: JaxprEqn) -> JaxprEqn:
    if not any(not isinstance(atom, Literal) and atom in env for atom in eqn.invars):
        return eqn
    return eqn.replace(invars=[read_atom(env, atom) for atom in eqn.invars])
