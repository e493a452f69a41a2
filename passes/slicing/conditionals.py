"""Conditionals taken apart, so that each result can be computed on a stage of its own.

`lax.cond(finite, update, skip, state)` is one equation that reads and writes everything. Results
that share no work become conditionals of their own, on the same condition.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat
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
    cones = [[_cone(branch, place) for branch in branches] for place in range(len(eqn.outvars))]
    groups = _grouped(cones, [_shared(branch) for branch in branches])
    if len(groups) == 1:
        return [eqn]
    return [_part(eqn, branches, group, cones) for group in groups]


def _cone(branch: Jaxpr, place: int) -> frozenset[int]:
    """Numbers of the equations that a result is computed from."""
    made_by = {var: i for i, eqn in enumerate(branch.eqns) for var in eqn.outvars}
    found: set[int] = set()
    stack = [branch.outvars[place]]
    while stack:
        atom = stack.pop()
        index = None if isinstance(atom, Literal) else made_by.get(atom)
        if index is not None and index not in found:
            found.add(index)
            stack += branch.eqns[index].invars
    return frozenset(found)


def _shared(branch: Jaxpr) -> frozenset[int]:
    """Numbers of the equations that are too large, or read too much, to be evaluated twice."""
    large = {var for var in branch.invars if not is_small(var.aval)}
    found = set()
    for index, eqn in enumerate(branch.eqns):
        if any(not isinstance(v, Literal) and v in large for v in eqn.invars):
            found.add(index)
            large.update(eqn.outvars)
    return frozenset(found)


def _grouped(
    cones: Sequence[Sequence[frozenset[int]]], shared: Sequence[frozenset[int]]
) -> list[list[int]]:
    """Results that share an equation, transitively."""
    group = list(range(len(cones)))
    owner: dict[tuple[int, int], int] = {}
    for place, per_branch in enumerate(cones):
        for branch, cone in enumerate(per_branch):
            for index in cone & shared[branch]:
                other = owner.setdefault((branch, index), place)
                old, new = group[place], group[other]
                if old != new:
                    group = [new if g == old else g for g in group]
    return [[p for p, g in enumerate(group) if g == name] for name in dict.fromkeys(group)]


def _part(
    eqn: JaxprEqn,
    branches: Sequence[Jaxpr],
    group: Sequence[int],
    cones: Sequence[Sequence[frozenset[int]]],
) -> JaxprEqn:
    """The conditional that gives some of the results."""
    kept: list[list[JaxprEqn]] = []
    read: set[int] = set()
    for number, branch in enumerate(branches):
        indices = sorted(frozenset().union(*(cones[place][number] for place in group)))
        eqns = [branch.eqns[index] for index in indices]
        atoms = [v for e in eqns for v in e.invars] + [branch.outvars[place] for place in group]
        used: set[Var] = {v for v in atoms if not isinstance(v, Literal)}
        read.update(place for place, var in enumerate(branch.invars) if var in used)
        kept.append(eqns)
    operands = sorted(read)
    made = tuple(
        ClosedJaxpr(
            jax_compat.replace_jaxpr(
                branch,
                invars=[branch.invars[place] for place in operands],
                outvars=[branch.outvars[place] for place in group],
                eqns=eqns,
            ),
            (),
        )
        for branch, eqns in zip(branches, kept, strict=True)
    )
    return eqn.replace(
        invars=[eqn.invars[0], *(eqn.invars[1 + place] for place in operands)],
        outvars=[eqn.outvars[place] for place in group],
        params={**eqn.params, "branches": made},
    )
