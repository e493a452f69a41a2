"""Sums over microbatches whose terms may be made on several stages.

A shared parameter's gradient is `a + b` in the loop's body, `a` from one layer and `b` from
another. If these are on different stages, each stage accumulates its own terms, and the sums are
added up once, after the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Literal

from autopar.passes.graph.graph import Atom, makers_of, variables
from autopar.passes.graph.microbatched import Accumulator
from autopar.passes.graph.primitives import ADDS, PASSED
from autopar.passes.slicing.anatomy import Anatomy


@dataclass(frozen=True)
class Terms:
    """An accumulator, and what is added to it in one iteration.

    Args:
      carried: the accumulator.
      terms: the values whose sum, passed through `chain`, is accumulated.
      sums: numbers of the body's equations that add the terms up.
      chain: numbers of the equations that the sum passes through, in order.
    """

    carried: Accumulator
    terms: tuple[Atom, ...]
    sums: tuple[int, ...] = ()
    chain: tuple[int, ...] = ()

    @property
    def absorbed(self) -> tuple[int, ...]:
        """Numbers of the equations that go where the terms go."""
        return (*self.sums, *self.chain, *self.carried.combine)


def find_terms(parts: Anatomy) -> tuple[Terms, ...]:
    """The terms of every accumulator. Only plain sums are taken apart."""
    body = parts.body
    atoms = (*(v for eqn in body.eqns for v in eqn.invars), *body.outvars)
    uses, made_by = Counter(variables(atoms)), makers_of(body.eqns)
    combining = parts.loop.combining

    def maker(atom: Atom) -> int | None:
        """The equation of a value that is used here only."""
        if isinstance(atom, Literal) or uses[atom] != 1:
            return None
        index = made_by.get(atom)
        return None if index in combining else index

    found = []
    for carried in parts.loop.accumulators:
        outside = _outside(body.eqns, carried)
        if not _is_sum(body.eqns, carried) or len(outside) != 1:
            found.append(Terms(carried, outside))
            continue
        atom = outside[0]
        chain: list[int] = []
        while (index := maker(atom)) is not None and _passes(body.eqns[index]):
            chain.append(index)
            atom = body.eqns[index].invars[0]
        sums: list[int] = []
        terms: list[Atom] = []
        stack = [atom]
        while stack:
            atom = stack.pop()
            index = maker(atom)
            if index is not None and _adds(body.eqns[index]):
                sums.append(index)
                stack += reversed(body.eqns[index].invars)
            else:
                terms.append(atom)
        if len(terms) == 1:
            chain, terms = [], [*outside]
        found.append(Terms(carried, tuple(terms), tuple(sorted(sums)), tuple(reversed(chain))))
    return tuple(found)


def _outside(eqns: Sequence[JaxprEqn], carried: Accumulator) -> tuple[Atom, ...]:
    """What the combining equations read apart from the carry and each other's results."""
    combining = [eqns[index] for index in carried.combine]
    own = {carried.carry, *(var for eqn in combining for var in eqn.outvars)}
    read = variables(v for eqn in combining for v in eqn.invars)
    return tuple(dict.fromkeys(v for v in read if v not in own))


def _is_sum(eqns: Sequence[JaxprEqn], carried: Accumulator) -> bool:
    """Whether an accumulator is carry + term."""
    if len(carried.combine) != 1:
        return False
    eqn = eqns[carried.combine[0]]
    return eqn.primitive.name == "add" and eqn.outvars[0] is carried.result


def _passes(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in PASSED and len(eqn.invars) == 1


def _adds(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ADDS and all(
        not isinstance(v, Literal) and v.aval.shape == eqn.outvars[0].aval.shape for v in eqn.invars
    )


def absorbed_by(terms: tuple[Terms, ...]) -> Mapping[int, int]:
    """The body's equations that go where an accumulator's terms go, each with its accumulator."""
    return {index: number for number, item in enumerate(terms) for index in item.absorbed}
