"""Sums over microbatches whose terms may be made on several stages.

A shared parameter's gradient is `a + b` in the loop's body, `a` from one layer and `b` from
another. If these are on different stages, each stage accumulates its own terms, and the sums are
added up once, after the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Literal

from autopar.passes.graph.graph import Atom, makers_of, variables
from autopar.passes.graph.microbatched import Accumulator
from autopar.passes.graph.primitives import ADDS, PASSED
from autopar.passes.slicing.anatomy import Anatomy


@dataclass(frozen=True)
class Terms:
    """An accumulator, and the terms whose sum is added to it in one iteration.

    Numbers of equations of the body: `sums` add up, `chain` are those the sum passes through then.
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

    def adder(atom: Atom) -> int | None:
        index = maker(atom)
        return index if index is not None and _adds(body.eqns[index]) else None

    found = []
    for carried in parts.loop.accumulators:
        outside = _outside(body.eqns, carried)
        if not _is_sum(body.eqns, carried) or len(outside) != 1:
            found.append(Terms(carried, outside))
            continue
        atom = outside[0]
        chain: list[int] = []
        while (index := maker(atom)) is not None:
            eqn = body.eqns[index]
            if eqn.primitive.name not in PASSED or len(eqn.invars) != 1:
                break
            chain.append(index)
            atom = eqn.invars[0]
        sums, terms = sum_tree([atom], adder, body.eqns)
        if len(terms) == 1:
            chain, terms = [], [*outside]
        found.append(Terms(carried, tuple(terms), tuple(sorted(sums)), tuple(reversed(chain))))
    return tuple(found)


def sum_tree(
    atoms: Iterable[Atom], adder: Callable[[Atom], int | None], eqns: Sequence[JaxprEqn]
) -> tuple[list[int], list[Atom]]:
    """Numbers of the equations that add these atoms up, as `adder` says, and the terms in order."""
    sums: list[int] = []
    terms: list[Atom] = []
    stack = [*atoms][::-1]
    while stack:
        atom = stack.pop()
        index = adder(atom)
        if index is None:
            terms.append(atom)
        else:
            sums.append(index)
            stack += reversed(eqns[index].invars)
    return sums, terms


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


def _adds(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ADDS and all(
        not isinstance(v, Literal) and v.aval.shape == eqn.outvars[0].aval.shape for v in eqn.invars
    )


def absorbed_by(terms: tuple[Terms, ...]) -> Mapping[int, int]:
    """The body's equations that go where an accumulator's terms go, each with its accumulator."""
    return {index: number for number, item in enumerate(terms) for index in item.absorbed}
