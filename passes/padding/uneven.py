"""Which loops of a program are worth padding so that devices can cut them.

A vocabulary of 50257, or 12 heads on 8 devices: one *loop* of the program, found by following the
factor rules from dimension to dimension. It is padded as a whole: parameters, activations,
gradients and what an optimizer computes of them. A dimension may hold the loop as its outermost
part: 768 features are 12 heads of 64.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.extend.core import JaxprEqn, Var

from autopar.passes.graph.graph import Graph
from autopar.passes.graph.primitives import (
    CUMULATIVE,
    ELEMENTWISE,
    MONOID_REDUCTIONS,
    PRODUCTS,
    SCATTERS,
    SORTS,
)
from autopar.passes.primitives.factor_rule import FactorRule, Rules
from autopar.passes.primitives.flops import flops, total_flops
from autopar.passes.sharding.batch_dims import batch_dims
from autopar.passes.sharding.tied_dims import (
    Place,
    TiedDims,
    places_of,
    tied_factors,
    ties,
    with_trips,
)

MOST_WASTE = (4, 3)  # the padded size is at most 4/3 of the size
LITTLE_WASTE = (33, 32)
LEAST_SHARE = 0.02  # of the program's operations are products over the loop
LEAST_BYTES = 2**20  # of the largest value that it goes through; what is smaller costs latency
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
    loops = TiedDims()
    for jaxpr, _ in with_trips(graph.jaxpr):
        for eqn in jaxpr.eqns:
            for places, _ in ties(eqn, rules, _PADDED):
                loops.join(places)
    found: dict[Place, _Loop] = defaultdict(_Loop)
    for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True):
        for dim in range(len(var.aval.shape)):
            loop = found[loops.root((var, dim))]
            loop.has_batch |= dim == label.batch_axis
            loop.has_state |= label.role == "state"
    for jaxpr, times in with_trips(graph.jaxpr):
        for eqn in jaxpr.eqns:
            for places, size in ties(eqn, rules, _PADDED):
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
    found: set[int] = set()
    if eqn.primitive.name not in _PADDED:
        return frozenset()
    for factor in tied_factors(eqn, rule):
        place = next(places_of(eqn, rule, factor), None)
        if place in padded:
            found.add(factor)
    return frozenset(found)


def _bytes(var: Var) -> int:
    return math.prod(var.aval.shape) * int(getattr(var.aval.dtype, "itemsize", 0))
