"""Which dimensions hold the batch, and which state leaves are parameters, not optimizer state."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
from jax.extend import core as jex_core
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph.graph import Atom, Graph
from autopar.passes.graph.primitives import CONTROL_FLOW, EXCHANGE
from autopar.passes.graph.scans import ScanParts, WhileParts
from autopar.passes.primitives.factor_rule import Factor, Rules, ValueFactors

BatchDims = dict[Var, frozenset[int]]
NONE: frozenset[int] = frozenset()
Fact = TypeVar("Fact")


class BatchRows(NamedTuple):
    """Where rows of the batch are in a value: in this dimension, `size` of them.

    There are `outer` iterations around them, and all that is left of the dimension inside.
    """

    dim: int
    outer: int
    size: int


Places = frozenset[BatchRows]
NOWHERE: Places = frozenset()


def batch_dims(graph: Graph, rules: Rules) -> BatchDims:
    """A variable's dimensions in which rows of the batch are; a variable without may be missing.

    Of a batch that is taken apart (`x.reshape(A, B // A, T)`) these are several, also where it is
    not the outermost loop (`x.reshape(A * B, T)`). Variables of inner bodies are included.
    """
    return _dims(_batch_places(graph, rules))


def repeated_dims(graph: Graph, rules: Rules) -> BatchDims:
    """The same, and of what is not made from the batch but has as many rows where it meets it.

    Learned queries that are tiled for every example and attend to each other first, features of a
    graph's nodes that are repeated: a program says nothing of their rows before they are added to
    rows of the batch, or multiplied by such. It is looked back from there, into loops and branches.
    """
    found = _batch_places(graph, rules)
    _LookBack(found, rules, frozenset(graph.jaxpr.invars)).through(graph.jaxpr)
    return _dims(found)


def _dims(found: Mapping[Var, Places]) -> BatchDims:
    return {var: frozenset(x.dim for x in places) for var, places in found.items()}


@dataclass
class _LookBack:
    """Adds where operands have the rows that results have; not of the program's `inputs`."""

    found: dict[Var, Places]
    rules: Rules
    inputs: frozenset[Var]

    def through(self, jaxpr: Jaxpr) -> None:
        """From a program's last equation to its first."""
        for eqn in reversed(jaxpr.eqns):
            results = [*map(self.read, eqn.outvars)]
            if eqn.primitive.name == "scan":
                operands = self.scan(eqn, results)
            elif eqn.primitive.name == "cond":
                operands = self.cond(eqn, results)
            elif eqn.primitive.name == "while":
                operands = self.loop(eqn, results)
            elif eqn.primitive.name != EXCHANGE:
                operands = self.equation(eqn, results)
            else:
                operands = []
            self.add(eqn.invars, operands)

    def equation(self, eqn: JaxprEqn, results: Sequence[Places]) -> list[Places]:
        """Also where an operand alone tells: a product sums over the rows of two."""
        known = [*results, *map(self.read, eqn.invars)]
        if not any(known):
            return []
        rule = self.rules[eqn]
        read = (*rule.results, *rule.operands)
        return _followed(rule.factors, read, known, rule.operands) or []

    def read(self, atom: Atom) -> Places:
        return NOWHERE if isinstance(atom, Literal) else self.found.get(atom, NOWHERE)

    def add(self, atoms: Sequence[Atom], known: Sequence[Places]) -> bool:
        """Notes what is new; whether anything is."""
        new = {
            atom: places
            for atom, places in zip(atoms, known, strict=False)
            if isinstance(atom, Var)
            and places
            and atom not in self.inputs
            and not self.found.get(atom)
        }
        self.found.update(new)
        return bool(new)

    def body(self, body: Jaxpr, results: Sequence[Places], first_carry: int, carries: int) -> None:
        """Looks into a loop's body, as often as what is carried in tells of what is carried out."""
        self.add(body.outvars, results)
        self.through(body)
        while self.add(
            body.outvars[:carries],
            [*map(self.read, body.invars[first_carry : first_carry + carries])],
        ):
            self.through(body)

    def scan(self, eqn: JaxprEqn, results: Sequence[Places]) -> list[Places]:
        scan = ScanParts.of(eqn)
        carried, stacks = scan.results(results)
        made = [*carried, *map(_slices, stacks)]
        self.body(scan.body, made, scan.num_consts, scan.num_carry)
        consts, carries, slices = scan.operands([*map(self.read, scan.body.invars)])
        return [*consts, *carries, *map(_stacked, slices)]

    def loop(self, eqn: JaxprEqn, results: Sequence[Places]) -> list[Places]:
        loop = WhileParts.of(eqn)
        own = loop.num_body_consts
        self.body(loop.body, results, own, len(results))
        inside = [*map(self.read, loop.body.invars)]
        return [*[NOWHERE] * loop.num_condition_consts, *inside]

    def cond(self, eqn: JaxprEqn, results: Sequence[Places]) -> list[Places]:
        operands = [NOWHERE] * (len(eqn.invars) - 1)
        for branch in eqn.params["branches"]:
            self.add(branch.jaxpr.outvars, results)
            self.through(branch.jaxpr)
            operands = [
                x or self.read(v) for x, v in zip(operands, branch.jaxpr.invars, strict=True)
            ]
        return [NOWHERE, *operands]


def _slices(places: Places) -> Places:
    """Where rows are in the slices of a stack, which has them there."""
    return frozenset(x._replace(dim=x.dim - 1) for x in places if x.dim)


def _stacked(places: Places) -> Places:
    """Where rows are in a stack of values that have them there."""
    return frozenset(x._replace(dim=x.dim + 1) for x in places)


def _batch_places(graph: Graph, rules: Rules) -> dict[Var, Places]:
    found: dict[Var, Places] = {}
    followed: dict[object, list[Places] | None] = {}  # by rule: layers are alike
    for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True):
        axes = () if label.batch_axis is None else (label.batch_axis,)
        found[var] = _whole(var, axes)

    def transfer(eqn: JaxprEqn, operands: Sequence[Places]) -> list[Places] | None:
        if eqn.primitive.name in CONTROL_FLOW:
            return None
        if eqn.primitive.name == EXCHANGE:
            # What is cut among devices are blocks of experts then; examples are their rows.
            blocks = [int(eqn.params["to_blocks"])] if any(operands) else []
            return [_whole(eqn.outvars[0], blocks)]
        if not any(operands):
            return None
        rule = rules[eqn]
        key = (id(rule), *operands)
        if key not in followed:
            followed[key] = _followed(rule.factors, rule.operands, operands, rule.results)
        results = followed[key]
        if eqn.primitive.name in _TAKE_ROWS and not (results and results[0]):
            results = [_whole(eqn.outvars[0], _taken_rows(eqn, {x.dim for x in operands[0]}))]
        return results

    _propagate(
        graph.jaxpr,
        found,
        transfer,
        NOWHERE,
        _slices,
        _stacked,
        through_while=True,
    )
    return found


def _whole(var: Var, dims: Iterable[int]) -> Places:
    """Nothing but rows of the batch in these dimensions."""
    return frozenset(BatchRows(dim, 1, var.aval.shape[dim]) for dim in dims)


def _followed(
    loops: Sequence[Factor],
    read: Sequence[ValueFactors],
    places_read: Sequence[Places],
    made: Sequence[ValueFactors],
) -> list[Places] | None:
    """Where an equation's results have the rows that its operands have; or the other way round."""
    inside: dict[int, tuple[int, int]] = {}  # of a factor's iterations: those around rows, and rows
    for places, value in zip(places_read, read, strict=True):
        for rows in sorted(places):
            around = 1
            for factor in value[rows.dim]:
                end = around * loops[factor].size
                first, last = max(around, rows.outer), min(end, rows.outer * rows.size)
                if first < last and not (first % around or last % first):
                    inside.setdefault(factor, (first // around, last // first))
                around = end
    if not inside:
        return None
    return [
        frozenset(
            rows for dim, factors in enumerate(value) for rows in _rows(dim, factors, loops, inside)
        )
        for value in made
    ]


def _rows(
    dim: int,
    factors: Sequence[int],
    loops: Sequence[Factor],
    inside: Mapping[int, tuple[int, int]],
) -> list[BatchRows]:
    """The rows in one dimension; those of neighbouring loops are together."""
    found: list[BatchRows] = []
    around = 1
    for factor in factors:
        if factor in inside:
            outer, size = inside[factor]
            outer *= around
            if found and found[-1].outer * found[-1].size == outer:
                found[-1] = found[-1]._replace(size=found[-1].size * size)
            else:
                found.append(BatchRows(dim, outer, size))
        around *= loops[factor].size
    return found


_TAKE_ROWS = frozenset({"dynamic_slice", "gather", "slice"})


def _taken_rows(eqn: JaxprEqn, dims: Collection[int]) -> Collection[int]:
    """Where the rows of a batch are that are taken out of it.

    By number, as many as there were: so a batch is shuffled, reversed, or drawn with repetitions.
    Or several neighbours.
    """
    if eqn.primitive.name != "gather":
        return [dim for dim in dims if eqn.outvars[0].aval.shape[dim] > 1]
    numbers, shape = eqn.params["dimension_numbers"], eqn.outvars[0].aval.shape
    taken = {*dims}.intersection(numbers.start_index_map)
    sizes = {eqn.invars[0].aval.shape[dim] for dim in taken}
    places = (d for d in range(len(shape)) if d not in numbers.offset_dims and shape[d] in sizes)
    return tuple(places)[:1]


def _propagate(
    jaxpr: Jaxpr,
    known: dict[Var, Fact],
    transfer: Callable[[JaxprEqn, Sequence[Fact]], Sequence[Fact] | None],
    nothing: Fact,
    slice_of: Callable[[Fact], Fact] = lambda fact: fact,
    stack_of: Callable[[Fact], Fact] = lambda fact: fact,
    join: Callable[[Fact, Fact], Fact] = operator.or_,
    through_while: bool = False,
) -> None:
    """Carry facts about variables through a program's equations, and into bodies.

    Args:
      jaxpr: the program.
      known: the facts about its inputs, to which those of all variables are added.
      transfer: an equation's facts about its results from those about its operands; None leaves
        the results out.
      nothing: what is known of a literal, and of a variable that is left out.
      slice_of: what is known of a stack's slices.
      stack_of: what is known of a stack of such slices.
      join: what is known of a value that is one of two.
      through_while: whether loops of unknown length are looked into, or are as other equations.
    """

    def read(atom: Atom) -> Fact:
        return nothing if isinstance(atom, jex_core.Literal) else known.get(atom, nothing)

    def evaluate(body: Jaxpr, operands: Sequence[Fact]) -> list[Fact]:
        known.update(zip(body.invars, operands, strict=True))
        _propagate(body, known, transfer, nothing, slice_of, stack_of, join, through_while)
        return [read(atom) for atom in body.outvars]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        results: Sequence[Fact] | None
        if eqn.primitive.name == "scan":
            scan = ScanParts.of(eqn)
            consts, carries, stacks = scan.operands(operands)
            slices = [slice_of(fact) for fact in stacks]
            while True:  # until one more iteration tells nothing new
                found = evaluate(scan.body, [*consts, *carries, *slices])
                carried, rows = scan.results(found)
                joined = list(map(join, carries, carried))
                if joined == carries:
                    break
                carries = joined
            results = [*carried, *map(stack_of, rows)]
        elif eqn.primitive.name == "while" and through_while:
            first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
            own, carries = operands[eqn.params["cond_nconsts"] : first], operands[first:]
            while True:
                found = evaluate(eqn.params["body_jaxpr"].jaxpr, [*own, *carries])
                joined = list(map(join, carries, found))
                if joined == carries:
                    break
                carries = joined
            results = carries
        elif eqn.primitive.name == "cond":
            results = [nothing] * len(eqn.outvars)
            for branch in eqn.params["branches"]:
                found = evaluate(branch.jaxpr, operands[1:])
                results = list(map(join, results, found))
        else:
            results = transfer(eqn, operands)
        if results is not None:
            known.update(zip(eqn.outvars, results, strict=True))


def parameters(graph: Graph, dims: BatchDims) -> frozenset[int]:
    """Indices of state inputs that meet the batch, so not of what an optimizer alone reads."""
    met = 0
    reach: dict[Var, int] = {  # which inputs a variable is made from, one bit for each
        var: 1 << index
        for index, (var, label) in enumerate(zip(graph.jaxpr.invars, graph.inputs, strict=True))
        if label.role == "state"
    }

    def transfer(eqn: JaxprEqn, operands: Sequence[int]) -> list[int] | None:
        nonlocal met
        union = functools.reduce(operator.or_, operands, 0)
        atoms = (a for a in (*eqn.invars, *eqn.outvars) if not isinstance(a, jex_core.Literal))
        if union and any(dims.get(var) for var in atoms):
            met |= union
            return None
        return [union] * len(eqn.outvars)

    _propagate(graph.jaxpr, reach, transfer, 0)
    return frozenset(i for i in range(len(graph.inputs)) if met >> i & 1)


def made_from_state(graph: Graph) -> frozenset[Var]:
    """Variables, of inner bodies too, that depend on leaves of the state larger than a scalar.

    PRNG keys do not count.
    """
    found = {
        var: True
        for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True)
        if label.role == "state"
        and not jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.extended)
        and math.prod(var.aval.shape) > (4 if var.aval.dtype == "uint32" else 1)  # raw keys
    }
    _propagate(graph.jaxpr, found, lambda eqn, facts: [any(facts)] * len(eqn.outvars), False)
    return frozenset(var for var, depends in found.items() if depends)


def made_from_batch(graph: Graph) -> frozenset[Var]:
    """Variables, of inner bodies too, that depend on the batch, or on what a stage received."""
    labels = zip(graph.jaxpr.invars, graph.inputs, strict=True)
    found = {var: True for var, label in labels if label.role in ("batch", "received")}
    _propagate(graph.jaxpr, found, lambda eqn, facts: [any(facts)] * len(eqn.outvars), False)
    return frozenset(var for var, depends in found.items() if depends)
