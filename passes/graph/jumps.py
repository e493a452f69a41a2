"""Equations whose results jump where an operand changes a little: comparisons and roundings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import variables
from autopar.passes.graph.primitives import CONTROL_FLOW, HEAVY, STEPS


def never(_: Var) -> bool:
    """Of no value."""
    return False


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


def compared(eqns: Sequence[JaxprEqn], is_given: Callable[[Var], bool] = never) -> set[Var]:
    """Real values that equations compare, or compute by anything but products to compare it.

    What they are compared with was made of the same bits: where one of both were computed again,
    it might be another one. All that is compared may follow from one value alone, as a variance
    that is at least 0: to compute that one again changes both sides, and it is none of these.

    Args:
      eqns: in order.
      is_given: whether a value is never computed again: what follows from it is the same bits.
    """
    follows = _Following(eqns, is_given)
    found: set[Var] = set()
    for number in reversed(range(len(eqns))):
        eqn = eqns[number]
        if is_barrier(eqn):
            pairs = zip(eqn.outvars, eqn.invars, strict=True)
            found.update(v for made, v in pairs if made in found and isinstance(v, Var))
        elif number in follows.mixing or (
            eqn.primitive.name not in HEAVY | CONTROL_FLOW and not found.isdisjoint(eqn.outvars)
        ):
            found.update(v for v in eqn.invars if isinstance(v, Var) and is_real(v))
        elif eqn.primitive.name == "scan":
            found |= follows.in_scans[number]
    return found


_SEVERAL = frozenset((object(), object()))


class _Following:
    """From how many real values that are read, and may be computed again, others follow.

    From none, one or several.

    Args:
      eqns: in order.
      is_given: as `compared`.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], is_given: Callable[[Var], bool]) -> None:
        self.is_given = is_given
        self.sources: dict[Var, frozenset[object]] = {}
        self.mixing: set[int] = set()  # equations that compare what follows from several
        self.in_scans: dict[int, set[Var]] = {}  # what scans compare so
        for number, eqn in enumerate(eqns):
            if is_barrier(eqn):
                each = zip(eqn.outvars, map(self._of, eqn.invars), strict=True)
                self.sources.update(each)
                continue
            together = frozenset[object]().union(*map(self._of, eqn.invars))
            if len(together) > 1:
                together = _SEVERAL
                if is_jump(eqn):
                    self.mixing.add(number)
            if eqn.primitive.name == "scan":
                body = eqn.params["jaxpr"].jaxpr
                pairs = list(zip(body.invars, eqn.invars, strict=True))
                given = {x for x, outer in pairs if not self._of(outer)}
                inside = compared(body.eqns, given.__contains__)
                compares = {v for x, v in pairs if x in inside and isinstance(v, Var)}
                self.in_scans[number] = compares
            self.sources.update(dict.fromkeys(eqn.outvars, together))

    def _of(self, atom: Var | Literal) -> frozenset[object]:
        if isinstance(atom, Literal):
            return frozenset()
        if atom in self.sources:
            return self.sources[atom]
        return frozenset(() if self.is_given(atom) or not is_real(atom) else (atom,))
