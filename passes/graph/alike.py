"""Programs that compute the same, whatever their variables and scopes are called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from autopar.passes.graph.graph import Atom, user_source


def pairs_if_alike(one: Jaxpr, other: Jaxpr) -> list[tuple[JaxprEqn, JaxprEqn]] | None:
    """The equations of two programs that compute the same, in pairs; None where they do not.

    Those inside of control flow too. Alike are programs with the same equations in the same order,
    on variables of the same types, with equal parameters, from the same lines of the user's.
    """
    found: list[tuple[JaxprEqn, JaxprEqn]] = []
    return found if _alike(one, other, found) else None


def _alike(one: Jaxpr, other: Jaxpr, found: list[tuple[JaxprEqn, JaxprEqn]]) -> bool:
    names: dict[Var, Var] = {}

    def defined(a: Var, b: Var) -> bool:
        names[a] = b
        return _type(a) == _type(b)

    def used(a: Atom, b: Atom) -> bool:
        if isinstance(a, jex_core.Literal) or isinstance(b, jex_core.Literal):
            return type(a) is type(b) and _type(a) == _type(b) and _equal(a.val, b.val)
        return names.get(a) is b

    def all_of(test: Any, left: Any, right: Any) -> bool:
        return len(left) == len(right) and all(map(test, left, right))

    if len(one.eqns) != len(other.eqns):
        return False
    if not all_of(defined, (*one.constvars, *one.invars), (*other.constvars, *other.invars)):
        return False
    for a, b in zip(one.eqns, other.eqns, strict=True):
        if a.primitive is not b.primitive or a.effects != b.effects:
            return False
        if not all_of(used, a.invars, b.invars) or a.params.keys() != b.params.keys():
            return False
        if not all(_equal_param(a.params[key], b.params[key], found) for key in a.params):
            return False
        if not all_of(defined, a.outvars, b.outvars) or user_source(a) != user_source(b):
            return False
        found.append((a, b))
    return all_of(used, one.outvars, other.outvars)


def _type(atom: Atom) -> tuple[Any, bool]:
    return atom.aval, bool(getattr(atom.aval, "weak_type", False))


def _equal_param(a: Any, b: Any, found: list[tuple[JaxprEqn, JaxprEqn]]) -> bool:
    if a is b:
        # Bodies that are one program are still pairs of equations.
        found += ((eqn, eqn) for jaxpr in _bodies(a) for eqn in jaxpr.eqns)
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, ClosedJaxpr):
        same = len(a.consts) == len(b.consts) and all(map(_equal, a.consts, b.consts))
        return same and _alike(a.jaxpr, b.jaxpr, found)
    if isinstance(a, Jaxpr):
        return _alike(a, b, found)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(
            _equal_param(x, y, found) for x, y in zip(a, b, strict=True)
        )
    return _equal(a, b)


def _bodies(value: Any) -> Iterator[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _bodies(item)


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are the same: of arrays, bit for bit; of what cannot say, the object."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return a.hex() == b.hex()
    return not hasattr(a, "__array__") and bool(a == b)
