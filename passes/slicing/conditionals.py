"""Conditionals taken apart, so that each result can be computed on a stage of its own.

`lax.cond(finite, update, skip, state)` is one equation that reads and writes everything. Results
that share no work become conditionals of their own, on the same condition.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import eliminate_dead_code, made_from, used_vars, variables
from autopar.passes.graph.microbatched import Microbatched
from autopar.passes.slicing.anatomy import is_small


def split_conditionals(step: Microbatched) -> Microbatched:
    """The program with every conditional outside of loops split into independent ones."""
    eqns: list[JaxprEqn] = []
    before = step.graph.jaxpr.eqns
    for eqn in before:
        eqns += _split(eqn) if eqn.primitive.name == "cond" and not eqn.effects else [eqn]
    return step if len(eqns) == len(before) else step.with_eqns(eqns)


def _split(eqn: JaxprEqn) -> list[JaxprEqn]:
    branches = [closed.jaxpr for closed in eqn.params["branches"]]
    if len(eqn.outvars) == 1 or any(branch.constvars for branch in branches):
        return [eqn]
    groups = _grouped(branches, len(eqn.outvars))
    return [eqn] if len(groups) == 1 else [_part(eqn, branches, group) for group in groups]


def _shared(branch: Jaxpr) -> set[int]:
    """Numbers of the equations that are too large, or read too much, to be evaluated twice."""
    large = {var for var in branch.invars if not is_small(var.aval)}
    found = set()
    for index, eqn in enumerate(branch.eqns):
        if not large.isdisjoint(variables(eqn.invars)):
            found.add(index)
            large.update(eqn.outvars)
    return found


def _grouped(branches: Sequence[Jaxpr], count: int) -> list[list[int]]:
    """Which of `count` results share an equation, transitively."""
    group = list(range(count))
    for branch in branches:
        shared, owner = _shared(branch), dict[int, int]()
        for place, atom in enumerate(branch.outvars):
            for index in made_from(branch.eqns, [atom]) & shared:
                old, new = group[place], group[owner.setdefault(index, place)]
                group = [new if name == old else name for name in group]
    return [[p for p, g in enumerate(group) if g == name] for name in dict.fromkeys(group)]


def _part(eqn: JaxprEqn, branches: Sequence[Jaxpr], group: Sequence[int]) -> JaxprEqn:
    """The conditional that gives some of the results."""
    parts, used = list[Jaxpr](), set[int]()
    for branch in branches:
        results = [branch.outvars[place] for place in group]
        part = eliminate_dead_code(jax_compat.replace_jaxpr(branch, outvars=results))
        here = used_vars(part)
        used.update(place for place, var in enumerate(part.invars) if var in here)
        parts.append(part)
    read = sorted(used)
    new = (jax_compat.replace_jaxpr(p, invars=[p.invars[place] for place in read]) for p in parts)
    return eqn.replace(
        invars=[eqn.invars[0], *(eqn.invars[1 + place] for place in read)],
        outvars=[eqn.outvars[place] for place in group],
        params={**eqn.params, "branches": tuple(ClosedJaxpr(part, ()) for part in new)},
    )
