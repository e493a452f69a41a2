"""Rows that a step sorts by expert, the whole batch's at once, sorted for each example by itself.

A mixture without capacities sorts the choices of all tokens by expert (`argsort`), takes the tokens
in that order, multiplies each group of rows with the matrices of its expert (`ragged_dot`), and
puts the rows back. So every row meets every other one, and a step that does this has no
microbatches, and no devices that keep their tokens. But what happens to a row depends on its own
expert alone: sorted for each example by itself, with the counts of that example, all rows have the
same results, and gradients are the same sums. That is proven here for what comes between the sort
and the way back:

- rows are sorted by keys of known bounds, and group sizes are the counts of the same keys;
- an index that is computed from the sort's order takes, from each example's part of an array, rows
  of the same example (`row_functions.py`);
- of sorted rows are made other sorted rows, each of its own row, or sums over all of them.

A sort of which it is not proven stays as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from autopar.base.row_sorts import RowSort
from autopar.passes.experts.blocks import traced
from autopar.passes.experts.orders import MixedRowsError, Order, SortedRows
from autopar.passes.experts.row_by_row import is_grouped
from autopar.passes.experts.row_functions import Facts, RowFunction
from autopar.passes.experts.sorted_rows import SortedScope
from autopar.passes.graph import jax_compat, source_infos
from autopar.passes.graph.graph import (
    Atom,
    Graph,
    batch_sizes,
    eliminate_dead_code,
    flatten,
    merge_equal_equations,
    user_source,
    walk,
)
from autopar.passes.graph.scans import ScanParts
from autopar.passes.primitives.cuts import bind_with
from autopar.passes.primitives.shardings import shape_of

MOST_PARTS, FEWEST_ROWS = 4096, 512
"""Where a batch has more examples than devices and microbatches ask for, as one of single tokens
has, each part has so many rows."""


def by_example(graph: Graph) -> Graph:
    """The same step, with rows sorted by expert for each example, where that is proven to be."""
    sizes = batch_sizes(graph)
    if len(sizes) != 1 or not any(map(is_grouped, walk(graph.jaxpr))):
        return graph
    examples = _num_parts(graph, *sizes)
    if examples < 2:
        return graph
    sorts: Sorts = {}
    made = _rewritten(graph.jaxpr, examples, Facts, {}, frozenset(), sorts)
    graph = dataclasses.replace(graph, row_sorts=tuple(sorts.values()))
    return graph if made is None else dataclasses.replace(graph, jaxpr=made.jaxpr)


def _num_parts(graph: Graph, examples: int) -> int:
    """For how many parts of the batch rows are sorted: its examples, or several small ones."""
    rows = min(shape_of(eqn.invars[0])[0] for eqn in walk(graph.jaxpr) if is_grouped(eqn))
    while examples % 2 == 0 and examples > MOST_PARTS and rows < FEWEST_ROWS * examples:
        examples //= 2
    return examples


@dataclasses.dataclass(frozen=True)
class KeptRows:
    """What a loop's trip keeps for the same trip of a later loop.

    Rows in an order, perhaps numbers; or, instead of all rows' counts, those of so many groups of
    each example; or what is the same for all rows.
    """

    order: Order | None
    function: RowFunction | None = None
    groups: int = 0
    constant: Any = None


@dataclasses.dataclass(frozen=True)
class RewrittenBody:
    """A body with rows sorted for each example, and what it keeps of them, by its results."""

    jaxpr: Jaxpr
    kept: Sequence[KeptRows | None]


Sorts = dict[int, RowSort]
"""What became of sorts, by their identity."""


def _rewritten(
    jaxpr: Jaxpr,
    examples: int,
    known: Callable[[], Facts],
    given: Mapping[Var, KeptRows],
    stay: frozenset[int],
    sorts: Sorts,
    num_carry: int | None = None,
) -> RewrittenBody | None:
    """A program or a body; None: nothing changes.

    Args:
      jaxpr: of either.
      examples: for each of which rows are sorted.
      known: what is known of its arguments.
      given: those that an earlier loop kept.
      stay: sorts that stay as they are, by identity.
      sorts: takes what becomes of them.
      num_carry: of a body, how many results are carried; the others may be kept.
    """
    own = {id(eqn) for eqn in walk(jaxpr)}
    while True:
        scope = ScopeByExample(jaxpr, examples, known(), given, stay, sorts, num_carry)
        try:
            closed = traced(scope.run, [scope.argument(var) for var in jaxpr.invars])
        except MixedRowsError as mixed:
            if id(mixed.order.eqn) not in own:
                raise
            alike = {id(eqn) for eqn in walk(jaxpr) if _are_alike(eqn, mixed.order.eqn)}
            stay |= alike
            if not scope.sorts_an_order(mixed.order.keys):  # as the way back does
                sorts.update((key, mixed.told) for key in alike)
            continue
        useless = {id(order.eqn) for order in scope.orders} - scope.multiplied
        if useless:
            stay |= useless
            continue
        for order in scope.orders:
            sorts.setdefault(id(order.eqn), RowSort(user_source(order.eqn)))
        if not scope.multiplied and not scope.has_new_bodies and not given:
            return None
        made = eliminate_dead_code(merge_equal_equations(flatten(closed).jaxpr))
        return RewrittenBody(made, scope.kept)


class ScopeByExample(SortedScope):
    """One program or body, with its loops."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        examples: int,
        facts: Facts,
        given: Mapping[Var, KeptRows],
        stay: frozenset[int],
        sorts: Sorts,
        num_carry: int | None,
    ):
        super().__init__(jaxpr, examples, facts, stay)
        self.given, self.sorts, self.num_carry = given, sorts, num_carry
        self.kept: list[KeptRows | None] = []
        self.stacks: dict[Var, tuple[Any, KeptRows]] = {}
        self.has_new_bodies = False

    def evaluate(self, eqn: JaxprEqn) -> None:
        if eqn.primitive.name == "scan":
            self.scan(eqn)
        else:
            super().evaluate(eqn)

    def sorts_an_order(self, keys: Var) -> bool:
        """Whether keys are themselves what a sort made, perhaps in an earlier loop."""
        maker = self.makers.get(keys)
        while maker is not None and len(maker.invars) == 1 and isinstance(maker.invars[0], Var):
            keys = maker.invars[0]
            maker = self.makers.get(keys)
        return keys in self.jaxpr.invars if maker is None else maker.primitive.name == "sort"

    def evaluate_at(self, eqn: JaxprEqn) -> None:
        try:
            self.evaluate(eqn)
        except MixedRowsError as mixed:
            mixed.at = mixed.at or eqn
            raise

    def is_there(self, atom: Atom) -> bool:
        return super().is_there(atom) or atom in self.stacks

    def read(self, atom: Atom) -> Any:
        if isinstance(atom, Literal) or atom in self.whole or atom not in self.stacks:
            return super().read(atom)
        array, kept = self.stacks[atom]
        if kept.order is not None and not kept.groups:
            raise MixedRowsError(kept.order)
        is_sizes = kept.groups > 0  # of each example, for each trip
        self.whole[atom] = jnp.sum(array, axis=1, dtype=array.dtype) if is_sizes else array
        return self.whole[atom]

    def run(self, *arrays: Any) -> list[Any]:
        """The results of the program, or body."""
        for var, array in zip(self.jaxpr.invars, arrays, strict=True):
            self.take(var, array)
            self.learn_keys(var)
        for eqn in self.jaxpr.eqns:
            with source_infos.source_context(eqn):
                self.evaluate_at(eqn)
            self.facts.learn(eqn)
            for var in eqn.outvars:
                self.learn_keys(var)
                self.learn_constant(var)
        self.kept = [self.keeps(number, atom) for number, atom in enumerate(self.jaxpr.outvars)]
        return [
            jax_compat.with_type_of(jnp.asarray(x), atom.aval) if not _is_key(atom) else x
            for x, atom in map(self.result, self.jaxpr.outvars, self.kept)
        ]

    def argument(self, var: Var) -> Var:
        """The variable, or one like it for what a loop kept instead."""
        kept = self.given.get(var)
        if kept is None or not kept.groups:
            return var
        return jax_compat.new_var(var.aval.update(shape=(self.examples, kept.groups)))

    def take(self, var: Var, array: Any) -> None:
        """An argument, which may be what an earlier loop kept."""
        kept = self.given.get(var)
        if kept is None:
            self.whole[var] = array
        elif kept.order is None:
            self.facts.constants[var] = kept.constant
        elif kept.groups:
            self.sizes[id(kept.order), kept.groups] = array
            self.counted[var] = kept.order
            self.whole[var] = jnp.sum(array, axis=0, dtype=array.dtype)
        else:
            self.rows[var] = SortedRows(array, kept.order)
            if kept.function is not None:
                self.facts.functions[var] = kept.function

    def keeps(self, number: int, atom: Atom) -> KeptRows | None:
        """What a result is, if a later loop is to know it."""
        if self.num_carry is None or number < self.num_carry or isinstance(atom, Literal):
            return None
        if atom in self.rows:
            return KeptRows(self.rows[atom].order, self.number_of(atom))
        constant = self.facts.constant(atom)
        if constant is not None and constant.size == 1:
            return KeptRows(None, constant=constant)
        for order in self.orders if atom in self.facts.counts else ():
            if self.are_counts(atom, order):
                return KeptRows(order, groups=shape_of(atom)[0])
        return None

    def result(self, atom: Atom, kept: KeptRows | None) -> tuple[Any, Atom]:
        if kept is None or kept.order is None:
            return self.read(atom), atom
        if kept.groups:
            made = self.sizes_of(kept.order, kept.groups).astype(atom.aval.dtype)
            return made, jax_compat.new_var(atom.aval.update(shape=made.shape))
        return self.rows[atom].array, atom

    def scan(self, eqn: JaxprEqn) -> None:
        """A loop, with its body rewritten where that can be."""
        scan = ScanParts.of(eqn)
        first = scan.num_consts + scan.num_carry
        given = {
            var: self.stacks[atom][1]
            for atom, var in zip(eqn.invars[first:], scan.body.invars[first:], strict=True)
            if isinstance(atom, Var) and atom in self.stacks
        }
        made = None
        if given or any(map(is_grouped, walk(scan.body))):
            consts = slice(scan.num_consts)
            pairs = [*zip(eqn.invars[consts], scan.body.invars[consts], strict=True)]
            known = functools.partial(self.facts.passed, pairs)
            asked = scan.body, self.examples, known, given, self.stay, self.sorts
            made = _rewritten(*asked, scan.num_carry)
        operands = [
            self.stacks[atom][0]
            if number >= first and scan.body.invars[number] in given
            else self.read(atom)
            for number, atom in enumerate(eqn.invars)
        ]
        if made is None:
            results = bind_with(eqn, operands, {})
            self.whole.update(zip(eqn.outvars, results, strict=True))
            return
        self.has_new_bodies = True
        closed = ClosedJaxpr(made.jaxpr, [])
        params = jax_compat.scan_params(eqn.params, closed, scan.num_consts, scan.num_carry)
        typed = [
            jax_compat.with_type_of(x, var.aval)
            if isinstance(x, jax.Array) and var not in given
            else x
            for x, var in zip(operands, scan.body.invars, strict=True)
        ]
        results = eqn.primitive.bind(*typed, **params)
        for var, array, kept in zip(eqn.outvars, results, made.kept, strict=True):
            if kept is None:
                self.whole[var] = array
            else:
                self.stacks[var] = array, kept


def _are_alike(eqn: JaxprEqn, other: JaxprEqn) -> bool:
    """Whether two sorts are of one line of the user's: those of layers stay together."""
    if eqn is other:
        return True
    lines = source_infos.user_frame(eqn), source_infos.user_frame(other)
    return eqn.primitive.name == "sort" and lines[0] is not None and lines[0] == lines[1]


def _is_key(atom: Atom) -> bool:
    return jax.dtypes.issubdtype(atom.aval.dtype, jax.dtypes.extended)
