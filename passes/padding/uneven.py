"""Which loops of a program are worth padding so that devices can cut them.

A vocabulary of 50257, or 12 heads on 8 devices: one *loop* of the program, found by following the
factor rules from dimension to dimension. It is padded as a whole: parameters, activations,
gradients and what an optimizer computes of them. A dimension may hold the loop as its outermost
part: 768 features are 12 heads of 64.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.arrays.typed_keys import is_key
from autopar.passes.graph.graph import Atom, Graph, inner_jaxprs
from autopar.passes.graph.primitives import (
    CUMULATIVE,
    ELEMENTWISE,
    MONOID_REDUCTIONS,
    PRODUCTS,
    SCATTERS,
    SORTS,
)
from autopar.passes.graph.scans import ScanParts
from autopar.passes.primitives.factor_rule import FactorRule, Rules
from autopar.passes.primitives.flops import flops, total_flops
from autopar.passes.sharding.batch_dims import batch_dims

MOST_WASTE = (4, 3)  # the padded size is at most 4/3 of the size
LITTLE_WASTE = (33, 32)
LEAST_SHARE = 0.02  # of the program's operations are products over the loop
LEAST_BYTES = 2**20  # of the largest value that it goes through; what is smaller costs latency
Place = tuple[Var, int]
PaddedDims = Mapping[Place, int]
"""The padded size of every dimension that is padded."""

_PADDED = (
    ELEMENTWISE
    | set(MONOID_REDUCTIONS)
    | set(SCATTERS)
    | CUMULATIVE
    | SORTS
    | {"broadcast_in_dim", "reshape", "squeeze", "transpose", "iota", "optimization_barrier"}
    | {"dot_general", "gather", "slice", "pad", "concatenate", "split", "stack", "unstack", "rev"}
    | {"dynamic_slice", "dynamic_update_slice", "argmax", "argmin"}
)
"""Equations that are evaluated on padded dimensions; all others are given the true ones."""


@dataclass(frozen=True)
class UnevenLoop:
    """A loop that may be padded: its size, its new size, and those of all its dimensions."""

    size: int
    padded: int
    dims: PaddedDims


@dataclass
class _Loop:
    """What is known of the dimensions that one loop goes through."""

    size: int = 0  # the greatest common divisor of the factors
    flops: int = 0  # of products with a value over the loop that holds no batch
    has_batch: bool = False
    has_state: bool = False
    places: list[Place] = field(default_factory=list)


def loops_to_pad(graph: Graph, rules: Rules, devices: int) -> tuple[tuple[UnevenLoop, ...], ...]:
    """Which loops to pad together: those that hardly grow; all of them, if these are more."""
    loops = _uneven_loops(graph, rules, devices) if devices > 1 else ()
    most, of = LITTLE_WASTE
    cheap = tuple(loop for loop in loops if loop.padded * of <= loop.size * most)
    both = (cheap, loops) if len(cheap) < len(loops) else (loops,)
    return tuple(some for some in both if some)


def _uneven_loops(graph: Graph, rules: Rules, devices: int) -> tuple[UnevenLoop, ...]:
    """Loops that devices cut into smaller parts once they are padded.

    They hold parameters and no batch, and a share of the program's operations are products over
    them with what holds no batch, a weight: the loop over a sequence is none.
    """
    batch = batch_dims(graph, rules)
    loops = _Union()
    for jaxpr in _jaxprs(graph.jaxpr):
        for eqn in jaxpr.eqns:
            for places, _ in _ties(eqn, rules):
                loops.join(places)
    found: dict[Place, _Loop] = defaultdict(_Loop)
    for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True):
        for dim in range(len(var.aval.shape)):
            loop = found[loops.root((var, dim))]
            loop.has_batch |= dim == label.batch_axis
            loop.has_state |= label.role == "state"
    for jaxpr, times in _with_trips(graph.jaxpr, 1):
        for eqn in jaxpr.eqns:
            for places, size in _ties(eqn, rules):
                loop = found[loops.root(places[0])]
                loop.size = math.gcd(loop.size, size)
                if eqn.primitive.name in PRODUCTS and any(
                    atom in eqn.invars and not batch.get(atom) for atom, _ in places
                ):
                    loop.flops += times * flops(eqn, rules[eqn])
    for place in loops.parents:
        found[loops.root(place)].places.append(place)
    least = LEAST_SHARE * total_flops(graph.jaxpr, rules)
    uneven = []
    for loop in found.values():
        size = max((_bytes(var) for var, _ in loop.places), default=0)
        wanted = loop.has_state and not loop.has_batch and loop.flops >= least
        wanted &= size >= LEAST_BYTES
        larger = padded_size(loop.size, devices) if wanted else None
        if larger is not None:
            dims = {(v, dim): v.aval.shape[dim] // loop.size * larger for v, dim in loop.places}
            uneven.append(UnevenLoop(loop.size, larger, dims))
    return tuple(uneven)


def padded_size(size: int, devices: int) -> int | None:
    """The size to which a loop is padded for this many devices; None: there is no use.

    >>> padded_size(50257, 8), padded_size(12, 8), padded_size(768, 8), padded_size(10, 8)
    (50264, 16, None, None)
    """
    most, of = MOST_WASTE
    larger = -(-size // devices) * devices
    return larger if size < larger and larger * of <= size * most else None


def kept_factors(eqn: JaxprEqn, rule: FactorRule, padded: PaddedDims) -> frozenset[int]:
    """The factors of an equation over which it is evaluated at their padded size."""
    found = set()
    for factor in _tied_factors(eqn, rule):
        place = next(_places(eqn, rule, factor), None)
        if place in padded:
            found.add(factor)
    return frozenset(found)


def outermost(rule: FactorRule, dim: tuple[int, ...]) -> int | None:
    """The outermost factor of a dimension that is a real loop."""
    return next((f for f in dim if rule.factors[f].size > 1), None)


def _ties(eqn: JaxprEqn, rules: Rules) -> Iterator[tuple[list[Place], int]]:
    """Dimensions of an equation's values that are one loop, and its size there."""
    name = eqn.primitive.name
    if name == "scan":
        yield from _scan_ties(eqn)
    elif name in _PADDED:
        rule = rules[eqn]
        for factor in _tied_factors(eqn, rule):
            if places := list(_places(eqn, rule, factor)):
                yield places, rule.factors[factor].size


def _tied_factors(eqn: JaxprEqn, rule: FactorRule) -> Iterator[int]:
    """Factors that are outermost wherever they occur, and pick no places."""
    atoms = (*eqn.invars, *eqn.outvars)
    if eqn.primitive.name not in _PADDED or any(is_key(atom.aval.dtype) for atom in atoms):
        return
    picks = eqn.primitive.name == "gather" or eqn.primitive.name in SCATTERS
    inner: set[int] = set()
    for value in (*rule.operands, *rule.results):
        for dim in value:
            inner.update(f for f in dim if f != outermost(rule, dim))
    if picks:
        inner.update(f for dim in rule.operands[1] for f in dim)
    for factor, about in enumerate(rule.factors):
        if about.size > 1 and about.kind != "replicated" and factor not in inner:
            yield factor


def _places(eqn: JaxprEqn, rule: FactorRule, factor: int) -> Iterator[Place]:
    atoms = (*eqn.invars, *eqn.outvars)
    for atom, value in zip(atoms, (*rule.operands, *rule.results), strict=True):
        if not isinstance(atom, Literal):
            yield from ((atom, d) for d, factors in enumerate(value) if factor in factors)


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
    for (first, *others), shift in groups:
        for dim, size in enumerate(first.aval.shape):
            places = [(atom, dim + (shift if atom in others else 0)) for atom in (first, *others)]
            yield [(atom, d) for atom, d in places if not isinstance(atom, Literal)], size


def _bytes(var: Var) -> int:
    return math.prod(var.aval.shape) * int(getattr(var.aval.dtype, "itemsize", 0))


def _jaxprs(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    return (inner for inner, _ in _with_trips(jaxpr, 1))


def _with_trips(jaxpr: Jaxpr, times: int) -> Iterator[tuple[Jaxpr, int]]:
    """A program, and the bodies of its scans, with how often a step runs them."""
    yield jaxpr, times
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            for body in inner_jaxprs(eqn):
                yield from _with_trips(body, times * eqn.params["length"])


class _Union:
    """Sets of places that are joined (union-find)."""

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
