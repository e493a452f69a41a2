"""What a program's loops are to tensor and expert parallelism, found in its equations.

A *weight* holds no batch and is made from the state; an *activation* holds the batch. Loops are
joined dimensions (see `tied_dims.py`):

- `batch`: the loop over examples.
- `stream`: what layers read and add to. Some sum has it in both operands, and one of them has been
  through a product with a weight that contracts it (and others) once more than the other has: `x`
  and `f(x)`. Or a single product with a weight leads from the loop to itself, as in a recurrence.
- `sequence`: the other loops of such sums.
- `expert`: a product has it in an activation, in a weight and in its result, or it is the groups
  of a grouped product.
- `inner`: any other loop of a weight's product, or the rows of a table of weights: heads, the width
  of an MLP, the vocabulary. But for those of the data, and those that products of activations
  contract: a head's features.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph.graph import Atom, Graph, inner_jaxprs
from autopar.passes.graph.primitives import ADDS, BLOCK_PRODUCT, CONTROL_FLOW, PRODUCTS
from autopar.passes.primitives.factor_rule import FactorRule, Rules
from autopar.passes.sharding.batch_dims import (
    BatchDims,
    batch_dims,
    made_from_batch,
    made_from_state,
)
from autopar.passes.sharding.tied_dims import Place, TiedDims, places_of, ties

BATCH, STREAM, SEQUENCE, EXPERT, INNER = "batch", "stream", "sequence", "expert", "inner"
MIXED = "mixed"  # what products of activations contract
KINDS = (BATCH, STREAM, SEQUENCE, EXPERT, INNER)
"""A loop that is several things is the first of them."""

Depths = Mapping[Place, int]
"""How often each loop has been contracted with a weight on the way to a value."""


@dataclass(frozen=True)
class LoopKinds:
    """The kinds of a program's loops, and the greatest common divisor of each one's sizes."""

    dims: TiedDims = field(default_factory=TiedDims)
    kinds: Mapping[Place, str] = field(default_factory=dict)
    sizes: Mapping[Place, int] = field(default_factory=dict)

    def of(self, atom: Atom, parts: int = 1) -> tuple[str, ...]:
        """The kind of each dimension; empty where it has none.

        Or where an inner loop or one over experts, of which others are parts, does not divide.
        """
        if isinstance(atom, Literal):
            return ("",) * len(atom.aval.shape)
        found = []
        for dim, size in enumerate(atom.aval.shape):
            root = self.dims.root((atom, dim))
            kind = self.kinds.get(root, "") if size > 1 else ""
            divides = kind not in (INNER, EXPERT) or self.sizes[root] % parts == 0
            found.append(kind if divides else "")
        return tuple(found)

    def all_sizes(self, kind: str) -> tuple[int, ...]:
        """The sizes of the program's loops of a kind."""
        return tuple(sorted({self.sizes[root] for root, k in self.kinds.items() if k == kind}))


def loop_kinds(graph: Graph, rules: Rules) -> LoopKinds:
    """The kinds of all loops of a program; what its inputs are labelled with goes first."""
    walk = _KindsWalk(graph, rules)
    walk.run(graph.jaxpr, {})
    return walk.kinds()


def label_loops(graph: Graph, kinds: LoopKinds) -> Graph:
    """The graph with the kinds of its inputs' dimensions on their labels.

    A stage of it holds few of the equations that tell them.
    """
    labels = zip(graph.jaxpr.invars, graph.inputs, strict=True)
    return replace(graph, inputs=tuple(replace(x, loops=kinds.of(var)) for var, x in labels))


class _KindsWalk:
    """What a walk over the products and sums of a program tells of its loops."""

    def __init__(self, graph: Graph, rules: Rules):
        self.graph, self.rules = graph, rules
        self.batch: BatchDims = batch_dims(graph, rules)
        self.from_state, self.from_batch = made_from_state(graph), made_from_batch(graph)
        self.dims = TiedDims()
        self.sizes: dict[Place, int] = defaultdict(int)
        self.marks: dict[Place, set[str]] = defaultdict(set)
        tied = list(_ties(graph.jaxpr, rules))
        for places, _ in tied:
            self.dims.join(places)
        for places, size in tied:
            root = self.dims.root(places[0])
            self.sizes[root] = math.gcd(self.sizes[root], size)

    def kinds(self) -> LoopKinds:
        """Every loop's kind."""
        root = self.dims.root
        for var, dims in self.batch.items():
            for dim in dims:
                self.marks[root((var, dim))].add(BATCH)
        labelled: dict[Place, set[str]] = defaultdict(set)
        data: set[Place] = set()
        for var, label in zip(self.graph.jaxpr.invars, self.graph.inputs, strict=True):
            for dim in range(len(var.aval.shape)):
                if label.role == "batch":
                    data.add(root((var, dim)))
                if label.loops and label.loops[dim]:
                    labelled[root((var, dim))].add(label.loops[dim])
        found: dict[Place, str] = {}
        for place in dict.fromkeys((*labelled, *self.marks)):
            marks = labelled.get(place) or self.marks[place]
            kind = next((kind for kind in KINDS if kind in marks), None)
            of_data = place in data or (MIXED in marks and place not in labelled)
            if kind is not None and not (kind == INNER and of_data):
                found[place] = kind
        sizes = {place: self.sizes.get(place) or place[0].aval.shape[place[1]] for place in found}
        return LoopKinds(self.dims, found, sizes)

    def run(self, jaxpr: Jaxpr, depths: dict[Var, Depths]) -> None:
        """Walk through a body, whose inputs begin without a history."""
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in CONTROL_FLOW:
                for body in _inside(eqn):
                    self.run(body, {})
                continue
            atoms = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
            known = _deepest([depths[atom] for atom in atoms if atom in depths])
            name = eqn.primitive.name
            if name in PRODUCTS:
                known = self.product(eqn, known)
            elif name == "gather":
                self.looked_up(eqn)
            elif name in ADDS and len(atoms) == 2 and all(map(self.batch.get, atoms)):
                self.added(eqn, [depths.get(atom, {}) for atom in atoms])
            if known:
                depths.update((var, known) for var in eqn.outvars)

    def product(self, eqn: JaxprEqn, known: Depths) -> Depths:
        """Note the loops of a product with a weight; what it contracts is one deeper."""
        rule, (left, right) = self.rules[eqn], eqn.invars[:2]
        sides = [*zip((left, right), rule.operands[:2], strict=True)]
        for place, group in self.groups(eqn, rule):
            if rule.factors[group].size > 1:
                self.marks[place].add(EXPERT)
        (result,) = eqn.outvars
        if all(map(self.batch_of, (left, right, result))):
            summed = {f for dim in rule.operands[0] for f in dim}
            summed -= {f for dim in rule.results[0] for f in dim}
            for contracted in summed:
                for place in places_of(eqn, rule, contracted):
                    self.marks[self.dims.root(place)].add(MIXED)
        for (atom, own), (other, others) in (sides, sides[::-1]):
            if not self.is_weight(atom) or self.is_weight(other) or isinstance(other, Literal):
                continue
            kept = {f for dim in rule.results[0] for f in dim}
            shared = {f for dim in others for f in dim}
            deeper = dict(known)
            roots = {True: set[Place](), False: set[Place]()}  # of what is contracted, and is free
            for dim in range(len(own)):
                factor = rule.outermost(own[dim])
                root = self.dims.root((atom, dim))
                if factor is None:
                    continue
                if factor in shared and factor in kept:
                    self.marks[root].add(EXPERT)
                elif factor in shared or factor in kept:
                    self.marks[root].add(INNER)
                    roots[factor in shared].add(root)
            for root in roots[True]:
                deeper[root] = deeper.get(root, 0) + 1
            for root in roots[True] & roots[False]:
                self.marks[root].add(STREAM)
            known = deeper
        return known

    def looked_up(self, eqn: JaxprEqn) -> None:
        """Note the rows of a table of weights from which each example takes some."""
        table, index = eqn.invars[:2]
        if self.is_weight(table) and self.batch_of(index):
            rule = self.rules[eqn]
            for dim in range(len(table.aval.shape)):
                factor = rule.outermost(rule.operands[0][dim])
                if factor is not None and rule.factors[factor].kind == "sum":
                    self.marks[self.dims.root((table, dim))].add(INNER)

    def groups(self, eqn: JaxprEqn, rule: FactorRule) -> Iterator[tuple[Place, int]]:
        """Loops of a grouped product over its groups: of one operand alone, and summed.

        Or over blocks of groups, which all values have.
        """
        if eqn.primitive.name == BLOCK_PRODUCT:
            yield self.dims.root((eqn.invars[1], 0)), rule.operands[1][0][0]
        if eqn.primitive.name != "ragged_dot_general":
            return
        left, right = ({f for dim in value for f in dim} for value in rule.operands[:2])
        for dim, factors in enumerate(rule.operands[1]):
            for factor in factors:
                if factor not in left and rule.factors[factor].kind == "sum":
                    yield self.dims.root((eqn.invars[1], dim)), factor
        for dim, factors in enumerate(rule.results[0]):  # gradients of the matrices
            for factor in factors:
                if factor not in left | right:
                    yield self.dims.root((eqn.outvars[0], dim)), factor

    def added(self, eqn: JaxprEqn, depths: list[Depths]) -> None:
        """Note a residual connection."""
        (var,) = eqn.outvars
        roots = [self.dims.root((var, dim)) for dim in range(len(var.aval.shape))]
        batch = self.batch.get(var, frozenset())
        less, more = (
            {root for root in roots if first.get(root, 0) > second.get(root, 0)}
            for first, second in (depths, depths[::-1])
        )
        streams = (less | more) - {roots[dim] for dim in batch}
        if streams:
            for root, size in zip(roots, var.aval.shape, strict=True):
                if size > 1:
                    self.marks[root].add(STREAM if root in streams else SEQUENCE)

    def batch_of(self, atom: Atom) -> frozenset[int]:
        """The dimensions that hold the batch."""
        return frozenset() if isinstance(atom, Literal) else self.batch.get(atom, frozenset())

    def is_weight(self, atom: Atom) -> bool:
        """Whether a value is made from the state, without the batch."""
        if isinstance(atom, Literal) or atom in self.from_batch:
            return False
        return atom in self.from_state


def _deepest(several: list[Depths]) -> Depths:
    """The larger of all numbers."""
    found: Depths = {}
    for depths in several:
        if not found or depths is found:
            found = depths
        elif any(found.get(place, 0) < depth for place, depth in depths.items()):
            places = {**found, **depths}
            found = {p: max(found.get(p, 0), depths.get(p, 0)) for p in places}
    return found


def _ties(jaxpr: Jaxpr, rules: Rules) -> Iterator[tuple[list[Place], int]]:
    """The dimensions that are one loop in any equation.

    But for those of what is made from nothing: zeros may begin many sums, of loops as long, and be
    what a branch returns for all that another one has made.
    """
    bodies, made = [*_bodies(jaxpr)], set[Var]()
    for body in bodies:
        for eqn in body.eqns:
            if all(isinstance(atom, Literal) or atom in made for atom in eqn.invars):
                made.update(eqn.outvars)
    for body in bodies:
        for eqn in body.eqns:
            for places, size in ties(eqn, rules):
                if places := [place for place in places if place[0] not in made]:
                    yield places, size


def _bodies(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """A program, and those inside its scans and branches."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for body in _inside(eqn):
            yield from _bodies(body)


def _inside(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    return iter(inner_jaxprs(eqn) if eqn.primitive.name in ("scan", "cond") else ())
