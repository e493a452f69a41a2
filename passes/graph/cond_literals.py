"""Numbers that a `cond` is given stand in its branches: nobody else need know of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr, JaxprEqn

from autopar.passes.graph import jax_compat
from autopar.passes.graph.held_constants import closed_bodies


def with_literals_inside(
    eqn: JaxprEqn, operands: Sequence[Any]
) -> tuple[list[Any], list[ClosedJaxpr]]:
    """Control flow's operands and bodies; of a `cond`, numbers stand in the branches instead."""
    bodies = closed_bodies(eqn)
    if eqn.primitive.name != "cond":
        return list(operands), bodies
    index, *passed = operands
    given = [isinstance(atom, jex_core.Literal) for atom in passed]
    taken = [atom for atom, is_given in zip(passed, given, strict=True) if not is_given]

    def inside(branch: ClosedJaxpr) -> ClosedJaxpr:
        jaxpr = branch.jaxpr
        places = list(zip(jaxpr.invars, passed, given, strict=True))
        env = {var: atom for var, atom, is_given in places if is_given}

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, jex_core.Literal) else env.get(atom, atom)

        changed = jax_compat.replace_jaxpr(
            jaxpr,
            invars=[var for var, _, is_given in places if not is_given],
            outvars=list(map(read, jaxpr.outvars)),
            eqns=[each.replace(invars=list(map(read, each.invars))) for each in jaxpr.eqns],
        )
        return ClosedJaxpr(changed, branch.consts)

    return [index, *taken], list(map(inside, bodies)) if any(given) else bodies
