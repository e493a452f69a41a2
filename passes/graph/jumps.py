"""Equations whose results jump where an operand changes a little: comparisons and roundings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import variables
from autopar.passes.graph.primitives import CONTROL_FLOW, HEAVY, STEPS


def is_real(atom: Var | Literal) -> bool:
    """Whether a value holds real or complex numbers."""
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))


def is_jump(eqn: JaxprEqn) -> bool:
    """Whether the result jumps where an operand of real numbers changes a little.

    A last bit of an operand decides there. Two programs may round it differently (XLA contracts a
    product and a sum to one operation or not), and then no element would equal the maximum.
    """
    if eqn.primitive.name == "convert_element_type":
        return is_real(eqn.invars[0]) and not is_real(eqn.outvars[0])
    return eqn.primitive.name in STEPS and any(map(is_real, eqn.invars))


def made_from_nothing(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """What equations make of literals alone: the same bits, whenever it is made."""
    made = set[Var]()
    for eqn in eqns:
        if made.issuperset(variables(eqn.invars)) and not eqn.effects:
            made.update(eqn.outvars)
    return made


def compared(eqns: Sequence[JaxprEqn], is_given: Callable[[Var], bool] | None = None) -> set[Var]:
    """Real values that equations compare, or compute by anything but products to compare it.

    What they are compared with was made of the same bits: where one of both were computed again,
    it might be another one. If `is_given` says of which values that is not so, all that is compared
    may follow from one other value alone, as a variance that is at least 0: to compute that one
    again changes both sides, and it is none of these. Not in the bodies of scans.

    Args:
      eqns: in order; nothing that is read was decided by what may be computed again.
      is_given: whether a value is never computed again: what follows from it is the same bits.
    """
    mixing = None if is_given is None else _mixing(eqns, is_given)
    found: set[Var] = set()
    for number in reversed(range(len(eqns))):
        eqn = eqns[number]
        compares = is_jump(eqn) and (mixing is None or number in mixing)
        if is_barrier(eqn):
            pairs = zip(eqn.outvars, eqn.invars, strict=True)
            found.update(v for made, v in pairs if made in found and isinstance(v, Var))
        elif compares or (
            eqn.primitive.name not in HEAVY | CONTROL_FLOW and not found.isdisjoint(eqn.outvars)
        ):
            found.update(v for v in eqn.invars if isinstance(v, Var) and is_real(v))
        elif eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            inside, pairs = compared(body.eqns), zip(eqn.invars, body.invars, strict=True)
            found.update(v for v, inner in pairs if inner in inside and isinstance(v, Var))
    return found


def compared_by(eqns: Sequence[JaxprEqn], late: Collection[int]) -> set[Var]:
    """What the `late` ones of a program's equations compare, by numbers, of what others make.

    Where they read what the others have decided, all of it: decided again, it may be otherwise.
    """
    readers = [eqns[number] for number in sorted(late)]
    kept = _decided([eqn for number, eqn in enumerate(eqns) if number not in late])
    if any(not kept.isdisjoint(variables(eqn.invars)) for eqn in readers):
        return compared(readers)
    made = {var for eqn in eqns for var in eqn.outvars} - made_from_nothing(eqns)
    return compared(readers, lambda var: var not in made)


def _decided(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """What is no real value and follows from real ones: comparisons, places of maxima, masks."""
    made = set[Var]()
    for eqn in eqns:
        reads = variables(eqn.invars)
        if any(map(is_real, reads)) or not made.isdisjoint(reads):
            made.update(v for v in eqn.outvars if not is_real(v))
    return made


_SEVERAL = frozenset((object(), object()))


def _mixing(eqns: Sequence[JaxprEqn], is_given: Callable[[Var], bool]) -> set[int]:
    """The equations that compare what follows from several real values that are read."""
    sources: dict[Var, frozenset[object]] = {}

    def sources_of(atom: Var | Literal) -> frozenset[object]:
        if isinstance(atom, Literal):
            return frozenset()
        if atom in sources:
            return sources[atom]
        return frozenset(() if is_given(atom) or not is_real(atom) else (atom,))

    mixing = set[int]()
    for number, eqn in enumerate(eqns):
        if is_barrier(eqn):
            sources.update(zip(eqn.outvars, map(sources_of, eqn.invars), strict=True))
            continue
        together = frozenset[object]().union(*map(sources_of, eqn.invars))
        if len(together) > 1:
            together = _SEVERAL
            mixing.add(number)
        sources.update(dict.fromkeys(eqn.outvars, together))
    return mixing
