"""Dimensions of a program's values that are one loop, by the factor rules of its equations.

A place is a dimension of a variable. The places that a factor is outermost in are one loop, and so
are those that loops share through an equation, a scan or a branch. A dimension may hold a loop as
its outermost part: 768 features are 12 heads of 64.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.arrays.typed_keys import is_key
from autopar.passes.graph.graph import Atom, inner_jaxprs
from autopar.passes.graph.primitives import CONTROL_FLOW, EXCHANGE, SCATTERS
from autopar.passes.graph.scans import ScanParts
from autopar.passes.primitives.factor_rule import FactorRule, Rules

Place = tuple[Var, int]


class TiedDims:
    """Sets of places that are joined (union-find); a set is known by one of its places."""

    def __init__(self) -> None:
        self.parents: dict[Place, Place] = {}

    def root(self, place: Place) -> Place:
        self.parents.setdefault(place, place)
        while (parent := self.parents[place]) != place:
            self.parents[place] = self.parents[parent]
            place = parent
        return place

    def join(self, places: list[Place]) -> None:
        roots = [self.root(place) for place in places]
        for root in roots[1:]:
            self.parents[self.root(root)] = self.root(roots[0])


def ties(
    eqn: JaxprEqn, rules: Rules, names: Set[str] | None = None
) -> Iterator[tuple[list[Place], int]]:
    """Dimensions of an equation's values that are one loop, and its size there.

    `names`: the primitives that tie dimensions, beside scans; None: all, and branches.
    """
    name = eqn.primitive.name
    if name == "scan":
        yield from _scan_ties(eqn)
    elif name == "cond" and names is None:
        for branch in eqn.params["branches"]:
            body = branch.jaxpr
            pairs = [*zip(body.invars, eqn.invars[1:], strict=True)]
            pairs += zip(body.outvars, eqn.outvars, strict=True)
            yield from _same_dims([(pair, 0) for pair in pairs])
    elif name not in CONTROL_FLOW and (names is None or name in names):
        rule = rules[eqn]
        for factor in tied_factors(eqn, rule):
            if places := list(places_of(eqn, rule, factor)):
                yield places, rule.factors[factor].size


def tied_factors(eqn: JaxprEqn, rule: FactorRule) -> Iterator[int]:
    """Factors that are outermost wherever they occur, and pick no places or devices."""
    if any(is_key(atom.aval.dtype) for atom in (*eqn.invars, *eqn.outvars)):
        return
    inner = set(rule.nested)
    if eqn.primitive.name == "gather" or eqn.primitive.name in SCATTERS:
        inner.update(f for dim in rule.operands[1] for f in dim)
    if eqn.primitive.name == EXCHANGE:  # rows of any share go to any block
        inner.update(rule.operands[0][0])
    for factor, about in enumerate(rule.factors):
        if about.size > 1 and about.kind != "replicated" and factor not in inner:
            yield factor


def places_of(eqn: JaxprEqn, rule: FactorRule, factor: int) -> Iterator[Place]:
    """The dimensions of an equation's operands and results that a factor is in."""
    count = len(eqn.invars)
    assert (len(rule.operands), len(rule.results)) == (count, len(eqn.outvars))
    for number, dim in rule.dims_of_factors[factor]:
        atom = eqn.invars[number] if number < count else eqn.outvars[number - count]
        if not isinstance(atom, Literal):
            yield atom, dim


def _scan_ties(eqn: JaxprEqn) -> Iterator[tuple[list[Place], int]]:
    """What enters and leaves a loop has the same dimensions inside; stacks have one more."""
    scan = ScanParts.of(eqn)
    outside = scan.operands(eqn.invars)
    inside = scan.operands(scan.body.invars)
    carried, rows = scan.results(scan.body.outvars)
    carries, stacks = scan.results(eqn.outvars)
    groups: list[tuple[tuple[Atom, ...], int]] = []
    groups += [(pair, 0) for pair in zip(outside[0], inside[0], strict=True)]
    groups += [(g, 0) for g in zip(inside[1], outside[1], carried, carries, strict=True)]
    groups += [(pair, 1) for pair in zip(inside[2], outside[2], strict=True)]
    groups += [(pair, 1) for pair in zip(rows, stacks, strict=True)]
    yield from _same_dims(groups)


def _same_dims(
    groups: list[tuple[tuple[Atom, ...], int]],
) -> Iterator[tuple[list[Place], int]]:
    """The dimensions of each group's first value are those of the others, moved by a number."""
    for (first, *others), shift in groups:
        for dim, size in enumerate(first.aval.shape):
            places = [(atom, dim + (shift if atom in others else 0)) for atom in (first, *others)]
            yield [(atom, d) for atom, d in places if not isinstance(atom, Literal)], size


def with_trips(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[Jaxpr, int]]:
    """A program, and the bodies of its scans, with how often a step runs them."""
    yield jaxpr, times
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            for body in inner_jaxprs(eqn):
                yield from with_trips(body, times * eqn.params["length"])
