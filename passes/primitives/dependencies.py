"""What values are made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import Jaxpr, Literal, Var


def dependencies(jaxpr: Jaxpr) -> Callable[[Any], frozenset[int]]:
    """A function that says from which inputs of a jaxpr an atom is made, by their numbers."""
    known: dict[Var, frozenset[int]] = {v: frozenset({i}) for i, v in enumerate(jaxpr.invars)}

    def read(atom: Any) -> frozenset[int]:
        if isinstance(atom, Literal):
            return frozenset()
        return known.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        union = frozenset[int]().union(*map(read, eqn.invars))
        known.update(dict.fromkeys(eqn.outvars, union))
    return read
