"""Where the user's code first reads what a program is given."""

from __future__ import annotations

from collections.abc import Mapping

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph import source_infos
from autopar.passes.graph.graph import inner_jaxprs, user_source


def first_readers(jaxpr: Jaxpr) -> list[str]:
    """For each input, `file.py:12 (function)` of the user's line that reads it first, or ""."""
    found: dict[int, str] = {}
    _look(jaxpr, {var: index for index, var in enumerate(jaxpr.invars)}, found)
    return [found.get(index, "") for index in range(len(jaxpr.invars))]


def _look(jaxpr: Jaxpr, given: Mapping[Var, int], found: dict[int, str]) -> None:
    for eqn in jaxpr.eqns:
        read = {
            given[atom]
            for atom in eqn.invars
            if not isinstance(atom, Literal) and atom in given and given[atom] not in found
        }
        if not read:
            continue
        for inner, outer in _bodies(eqn):
            pairs = zip(inner.invars, outer, strict=True)
            passed = {v: given[o] for v, o in pairs if not isinstance(o, Literal) and o in given}
            _look(inner, passed, found)
        if source_infos.user_frame(eqn) is not None:
            for index in read:
                found.setdefault(index, user_source(eqn))


def _bodies(eqn: JaxprEqn) -> list[tuple[Jaxpr, list[Var | Literal]]]:
    """Inner programs with the operands that they are given, where these are in one order."""
    outer, name = list(eqn.invars), eqn.primitive.name
    if name == "scan":
        return [(inner, outer) for inner in inner_jaxprs(eqn)]
    if name == "cond":
        return [(inner, outer[1:]) for inner in inner_jaxprs(eqn)]
    return []
