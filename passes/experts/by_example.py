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
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.experts.blocks import traced
from autopar.passes.experts.row_by_row import adds_rows, keeps_rows, puts_rows, takes_rows
from autopar.passes.experts.row_functions import Facts, Numbers, RowFunction, numbers_themselves
from autopar.passes.graph import jax_compat
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import (
    Atom,
    Graph,
    batch_sizes,
    eliminate_dead_code,
    flatten,
    merge_equal_equations,
    walk,
)
from autopar.passes.graph.primitives import ELEMENTWISE, SCATTERS
from autopar.passes.graph.scans import ScanParts
from autopar.passes.primitives.cuts import bind_with
from autopar.passes.primitives.ragged_products import RaggedDims
from autopar.passes.primitives.shardings import shape_of


def by_example(graph: Graph) -> Graph:
    """The same step, with rows sorted by expert for each example, where that is proven to be."""
    sizes = batch_sizes(graph)
    if len(sizes) != 1 or not any(map(_is_grouped, walk(graph.jaxpr))):
        return graph
    (examples,) = sizes
    made = _rewritten(graph.jaxpr, examples, Facts, {}, frozenset()) if examples > 1 else None
    return graph if made is None else dataclasses.replace(graph, jaxpr=made.jaxpr)


def _is_grouped(eqn: JaxprEqn) -> bool:
    """Whether an equation multiplies rows, sorted in one list, by groups."""
    if eqn.primitive.name != "ragged_dot_general" or eqn.params["group_offset"] is not None:
        return False
    dims = RaggedDims.of(eqn)
    return len(shape_of(eqn.invars[2])) == 1 and dims.rows == 0 and not dims.left_batch


@dataclasses.dataclass(frozen=True, eq=False)
class _Order:
    """One sort: of how many rows for each example, by the keys of a variable."""

    eqn: JaxprEqn
    rows: int
    keys: Var
    by_example: Any


class _MixedError(Exception):
    """Rows of different examples meet, for all that is known."""

    def __init__(self, order: _Order, eqn: JaxprEqn | None):
        super().__init__(f"{eqn}")
        self.order = order


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A value with rows in the order of one sort, or numbers of rows within their example."""

    array: Any
    order: _Order


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What a loop's trip keeps for the same trip of a later loop.

    Rows in an order, perhaps numbers; or, instead of all rows' counts, those of so many groups of
    each example; or what is the same for all rows.
    """

    order: _Order | None
    function: RowFunction | None = None
    groups: int = 0
    constant: Any = None


@dataclasses.dataclass(frozen=True)
class _Rewritten:
    """A body with rows sorted for each example, and what it keeps of them, by its results."""

    jaxpr: Jaxpr
    kept: Sequence[_Kept | None]


def _rewritten(
    jaxpr: Jaxpr,
    examples: int,
    known: Callable[[], Facts],
    given: Mapping[Var, _Kept],
    stay: frozenset[int],
    num_carry: int | None = None,
) -> _Rewritten | None:
    """A program or a body; None: nothing changes.

    Args:
      jaxpr: of either.
      examples: for each of which rows are sorted.
      known: what is known of its arguments.
      given: those that an earlier loop kept.
      stay: sorts that stay as they are, by identity.
      num_carry: of a body, how many results are carried; the others may be kept.
    """
    own = {id(eqn) for eqn in walk(jaxpr)}
    while True:
        scope = _Scope(jaxpr, examples, known(), given, stay, num_carry)
        try:
            closed = traced(scope.run, [scope.argument(var) for var in jaxpr.invars])
        except _MixedError as mixed:
            if id(mixed.order.eqn) not in own:
                raise
            stay |= {id(mixed.order.eqn)}
            continue
        useless = {id(order.eqn) for order in scope.orders} - scope.multiplied
        if useless:
            stay |= useless
            continue
        if not scope.multiplied and not scope.has_new_bodies and not given:
            return None
        made = eliminate_dead_code(merge_equal_equations(flatten(closed).jaxpr))
        return _Rewritten(made, scope.kept)


class _Scope:
    """Evaluates the equations of one program or body, while JAX traces that."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        examples: int,
        facts: Facts,
        given: Mapping[Var, _Kept],
        stay: frozenset[int],
        num_carry: int | None,
    ):
        self.jaxpr, self.examples, self.facts, self.stay = jaxpr, examples, facts, stay
        self.given, self.num_carry = given, num_carry
        self.kept: list[_Kept | None] = []
        self.stacks: dict[Var, tuple[Any, _Kept]] = {}
        self.whole: dict[Var, Any] = {}
        self.rows: dict[Var, _Rows] = {}
        self.makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.orders: list[_Order] = []
        self.multiplied: set[int] = set()
        self.has_new_bodies = False
        self.sizes: dict[tuple[int, int], Any] = {}
        self.counted: dict[Var, _Order] = {}
        self.keys: dict[Var, RowFunction] = {}
        for eqn in jaxpr.eqns:
            if self.is_sort(eqn) and isinstance(eqn.invars[0], Var):
                self.know_keys(eqn.invars[0])

    def know_keys(self, keys: Var) -> None:
        """Rows have these keys, also before they were put into one line."""
        (rows,), var = shape_of(keys), keys
        while True:
            lead = len(shape_of(var))
            self.keys[var] = numbers_themselves(Numbers("keys", keys), lead, rows)
            maker = self.makers.get(var)
            if maker is None or maker.primitive.name not in ("reshape", "squeeze"):
                return
            (before,) = maker.invars
            if not isinstance(before, Var):
                return
            var = before

    def run(self, *arrays: Any) -> list[Any]:
        """The results of the program, or body."""
        for var, array in zip(self.jaxpr.invars, arrays, strict=True):
            self.take(var, array)
            self.learn_keys(var)
        for eqn in self.jaxpr.eqns:
            with jax_compat.source_context(eqn):
                self.evaluate(eqn)
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
            self.rows[var] = _Rows(array, kept.order)
            if kept.function is not None:
                self.facts.functions[var] = kept.function

    def keeps(self, number: int, atom: Atom) -> _Kept | None:
        """What a result is, if a later loop is to know it."""
        if self.num_carry is None or number < self.num_carry or isinstance(atom, Literal):
            return None
        if atom in self.rows:
            return _Kept(self.rows[atom].order, self.facts.function(atom))
        constant = self.facts.constant(atom)
        if constant is not None and constant.size == 1:
            return _Kept(None, constant=constant)
        for order in self.orders if atom in self.facts.counts else ():
            if self.are_counts(atom, order):
                return _Kept(order, groups=shape_of(atom)[0])
        return None

    def result(self, atom: Atom, kept: _Kept | None) -> tuple[Any, Atom]:
        if kept is None or kept.order is None:
            return self.read(atom, None), atom
        if kept.groups:
            made = self.sizes_of(kept.order, kept.groups).astype(atom.aval.dtype)
            return made, jax_compat.new_var(atom.aval.update(shape=made.shape))
        return self.rows[atom].array, atom

    def learn_keys(self, var: Var) -> None:
        if var in self.keys and var not in self.facts.functions:
            self.facts.functions[var] = self.keys[var]

    def learn_constant(self, var: Var) -> None:
        """A mask that is the same for all rows, whatever their numbers are."""
        function = self.facts.function(var)
        if function is None or function.numbers.kind == "keys" or var in self.facts.constants:
            return
        if var.aval.dtype == jnp.bool_ and (same := function.constant()) is not None:
            lead = (1,) * function.lead
            self.facts.constants[var] = same.reshape(*lead, *same.shape[1:])

    def read(self, atom: Atom, eqn: JaxprEqn | None) -> Any:
        """A value as the program has it, whole."""
        if isinstance(atom, Literal):
            return atom.val
        if atom in self.whole:
            return self.whole[atom]
        if atom in self.stacks:
            array, kept = self.stacks[atom]
            if kept.order is not None and not kept.groups:
                raise _MixedError(kept.order, eqn)
            is_sizes = kept.groups > 0  # of each example, for each trip
            self.whole[atom] = jnp.sum(array, axis=1, dtype=array.dtype) if is_sizes else array
            return self.whole[atom]
        constant = self.facts.constant(atom)
        if constant is not None and constant.size == 1:
            dtype = atom.aval.dtype
            self.whole[atom] = lax.full(shape_of(atom), constant.astype(dtype).item(), dtype)
            return self.whole[atom]
        raise _MixedError(self.order_of(atom), eqn)

    def order_of(self, atom: Var) -> _Order:
        if atom in self.rows:
            return self.rows[atom].order
        function = self.facts.functions[atom]
        assert isinstance(function.numbers.of, _Order)
        return function.numbers.of

    def evaluate(self, eqn: JaxprEqn) -> None:
        name = eqn.primitive.name
        if self.is_sort(eqn) and self.sort(eqn):
            return
        if name == "scan":
            self.scan(eqn)
            return
        local = [
            self.rows[atom] for atom in eqn.invars if isinstance(atom, Var) and atom in self.rows
        ]
        orders = {id(x.order) for x in local}
        if local and is_barrier(eqn):
            self.barrier(eqn)
        elif len(orders) > 1:
            raise _MixedError(local[0].order, eqn)
        elif local and _is_grouped(eqn):
            self.product(eqn, local[0].order)
        elif local:
            move = self.gather if name == "gather" else self.scatter if name in SCATTERS else None
            if move is None or not move(eqn):
                self.row_by_row(eqn, local[0].order)
        elif all(map(self.is_there, eqn.invars)):
            operands = [self.read(atom, eqn) for atom in eqn.invars]
            self.whole.update(zip(eqn.outvars, bind_with(eqn, operands, {}), strict=True))
        else:
            self.of_functions(eqn)

    def is_there(self, atom: Atom) -> bool:
        return isinstance(atom, Literal) or atom in self.whole or atom in self.stacks

    def of_functions(self, eqn: JaxprEqn) -> None:
        """Of an operand nothing is there but what is known: as it is, or as a constant."""
        self.facts.learn(eqn)
        if len(eqn.outvars) == 1 and self.facts.function(eqn.outvars[0]) is not None:
            return
        operands = [self.read(atom, eqn) for atom in eqn.invars]
        self.whole.update(zip(eqn.outvars, bind_with(eqn, operands, {}), strict=True))

    # Sorts.

    def is_sort(self, eqn: JaxprEqn) -> bool:
        if eqn.primitive.name != "sort" or id(eqn) in self.stay or eqn.params["num_keys"] != 1:
            return False
        shape = shape_of(eqn.invars[0])
        return len(shape) == 1 and shape[0] % self.examples == 0 and len(eqn.invars) > 1

    def sort(self, eqn: JaxprEqn) -> bool:
        """Each example's rows; False: it is evaluated as it is."""
        keys, *others = eqn.invars
        (count,) = shape_of(keys)
        places = [self.is_place(atom) for atom in others]
        if isinstance(keys, Literal) or not any(places):
            return False
        function = self.facts.function(keys)
        back = function is not None and function.numbers.kind == "order"
        if not back and keys in self.rows:
            return False
        if any(isinstance(x, Var) and x in self.rows for x in others):
            return False
        if back and not all(places):
            return False
        shape = self.examples, count // self.examples
        given = self.rows[keys] if back else None
        own = self.read(keys, eqn) if given is None else given.array
        here = lax.broadcasted_iota(others[places.index(True)].aval.dtype, shape, 1)
        operands = [own.reshape(shape)]
        operands += [
            here if is_place else self.read(atom, eqn).reshape(shape)
            for atom, is_place in zip(others, places, strict=True)
        ]
        made = [x.reshape(count) for x in bind_with(eqn, operands, {"dimension": 1})]
        if given is None:
            order = _Order(eqn, count // self.examples, keys, operands[0])
            self.orders.append(order)
            numbers = Numbers("order", order)
        else:
            order, numbers = given.order, Numbers("rank", given.order)
        for var, array, is_place in zip(eqn.outvars, made, [False, *places], strict=True):
            self.rows[var] = _Rows(array, order)
            if is_place:
                self.facts.functions[var] = numbers_themselves(numbers, 1, count)
            elif given is not None:  # the sorted order
                self.facts.functions[var] = numbers_themselves(Numbers("place"), 1, count)
                del self.rows[var]
        return True

    def is_place(self, atom: Atom) -> bool:
        """Whether each element is its own place."""
        function = self.facts.function(atom)
        return function is not None and function.numbers.kind == "place" and function.is_number

    # Rows that are taken, and put back.

    def gather(self, eqn: JaxprEqn) -> bool:
        """Rows by their numbers; False: by something else."""
        operand, indices = eqn.invars
        function = self.facts.function(indices)
        if function is None or not isinstance(indices, Var) or indices not in self.rows:
            return False
        order = self.rows[indices].order
        if not takes_rows(eqn) or isinstance(operand, Literal):
            raise _MixedError(order, eqn)
        given = self.facts.function(operand)
        (var,) = eqn.outvars
        if function.numbers.kind == "rank":
            known = self.rows.get(operand)
            if known is None or known.order is not order or not function.is_number or given:
                raise _MixedError(order, eqn)
            self.whole[var] = self.in_examples(eqn, [known.array, self.rows[indices].array])
            return True
        if given is not None and given.numbers == Numbers("rank", order) and function.is_number:
            # What is known of each row of the places, in this order: of each place.
            self.facts.functions[var] = dataclasses.replace(given, numbers=Numbers("place"))
            return True
        if operand in self.rows or not function.is_local(self.examples, shape_of(operand)[0]):
            raise _MixedError(order, eqn)
        made = self.in_examples(eqn, [self.read(operand, eqn), self.rows[indices].array])
        self.rows[var] = _Rows(made, order)
        return True

    def scatter(self, eqn: JaxprEqn) -> bool:
        """Rows to where their numbers say; False: to where something else does."""
        base, indices, updates = eqn.invars
        function = self.facts.function(indices)
        if function is None or not isinstance(indices, Var) or indices not in self.rows:
            return False
        order, (var,) = self.rows[indices].order, eqn.outvars
        if not puts_rows(eqn):
            raise _MixedError(order, eqn)
        given = self.facts.function(updates)
        own = self.rows[indices].array
        if function.numbers.kind == "rank":
            is_sorted = isinstance(updates, Var) and updates in self.rows
            if is_sorted or not function.is_number or not self.is_same_for_all(base):
                raise _MixedError(order, eqn)
            operands = [self.read(base, eqn), own, self.read(updates, eqn)]
            self.rows[var] = _Rows(self.in_examples(eqn, operands), order)
            return True
        if isinstance(base, Var) and base in self.rows:
            raise _MixedError(order, eqn)
        if isinstance(updates, Var) and updates in self.rows and given is None:
            if not function.is_local(self.examples, shape_of(base)[0]):
                raise _MixedError(order, eqn)
            operands = [self.read(base, eqn), own, self.rows[updates].array]
            self.whole[var] = self.in_examples(eqn, operands)
            return True
        is_numbered = given is not None and given.numbers.kind == "place"
        if is_numbered and eqn.primitive.name == "scatter" and function.is_number:
            # Every row gets what is known of the place to which it was put.
            assert given is not None
            numbers = Numbers("rank", order)
            self.facts.functions[var] = dataclasses.replace(given, numbers=numbers)
            return True
        raise _MixedError(order, eqn)

    def in_examples(self, eqn: JaxprEqn, arrays: Sequence[Any]) -> Any:
        """An equation for each example: all operands' rows, and the result's, are of all."""
        parts = [x.reshape(self.examples, -1, *x.shape[1:]) for x in arrays]
        made = jax.vmap(lambda *xs: bind_with(eqn, xs, {})[0])(*parts)
        return made.reshape(shape_of(eqn.outvars[0]))

    # Products, loops, barriers, and what is computed of each row.

    def product(self, eqn: JaxprEqn, order: _Order) -> None:
        left, right, sizes = eqn.invars
        groups = shape_of(sizes)[0]
        if not self.are_counts(sizes, order):
            raise _MixedError(order, eqn)
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        dims = RaggedDims.of(eqn)
        (contracted, other), batch = numbers.dot_dimension_numbers
        contracted = [dim + 1 for dim in contracted]
        operands = [self.sorted(left, order, eqn)]
        if dims.sums_rows:
            if dims.right_rows != 0:
                raise _MixedError(order, eqn)
            contracted, other = [0, *contracted], [0, *(dim + 1 for dim in other)]
            operands.append(self.sorted(right, order, eqn))
        else:
            operands.append(self.read(right, eqn))
        operands.append(self.sizes_of(order, groups))
        parts = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=((contracted, other), batch),
            lhs_ragged_dimensions=[1],
            rhs_group_dimensions=numbers.rhs_group_dimensions,
        )
        (made,) = bind_with(eqn, operands, {"ragged_dot_dimension_numbers": parts})
        self.multiplied.add(id(order.eqn))
        (var,) = eqn.outvars
        if dims.sums_rows:
            self.whole[var] = made
        else:
            self.rows[var] = _Rows(made.reshape(shape_of(var)), order)

    def are_counts(self, sizes: Atom, order: _Order) -> bool:
        """Whether these are the counts of the keys by which an order sorts."""
        if isinstance(sizes, Literal):
            return False
        if sizes in self.counted:
            return self.counted[sizes] is order
        counts, bounds = self.facts.counts.get(sizes), self.facts.bounds.get(order.keys)
        if counts is None or counts.keys is not order.keys or bounds is None:
            return False
        return counts.are_of(shape_of(sizes)[0], bounds)

    def sizes_of(self, order: _Order, groups: int) -> Any:
        """How many rows of each group every example has, [examples, groups]."""
        key = id(order), groups
        if key not in self.sizes:
            if order not in self.orders:  # of another body, which kept no sizes
                raise _MixedError(order, None)
            is_of = order.by_example[:, :, None] == jnp.arange(groups, dtype=order.keys.aval.dtype)
            self.sizes[key] = jnp.sum(is_of, axis=1, dtype=jnp.int32)
        return self.sizes[key]

    def sorted(self, atom: Atom, order: _Order, eqn: JaxprEqn) -> Any:
        """Rows in an order, [examples, rows, ...]."""
        if isinstance(atom, Var) and atom in self.rows:
            if self.facts.function(atom) is not None:
                raise _MixedError(order, eqn)
            array = self.rows[atom].array
        elif self.is_same_for_all(atom):
            array = jnp.broadcast_to(self.read(atom, eqn), shape_of(atom))
        else:
            raise _MixedError(order, eqn)
        return array.reshape(self.examples, order.rows, *array.shape[1:])

    def is_same_for_all(self, atom: Atom) -> bool:
        """Whether all rows of a value are equal."""
        shape = shape_of(atom)
        if not shape or shape[0] == 1:
            return True
        known = self.facts.constant(atom)
        if known is not None and (not known.ndim or known.shape[0] == 1):
            return True
        maker = None if isinstance(atom, Literal) else self.makers.get(atom)
        if maker is None or atom in self.rows:
            return False
        if maker.primitive.name == "broadcast_in_dim":
            dims = tuple(maker.params["broadcast_dimensions"])
            return 0 not in dims or shape_of(maker.invars[0])[dims.index(0)] == 1
        is_one = maker.primitive.name in ELEMENTWISE
        return is_one and all(map(self.is_same_for_all, maker.invars))

    def row_by_row(self, eqn: JaxprEqn, order: _Order) -> None:
        """What is computed of each row alone, or a sum over all of them."""
        functions = [self.facts.function(a) for a in eqn.invars if self.is_local(a)]
        if any(f is not None for f in functions):  # numbers of rows
            self.facts.learn(eqn)
            if len(eqn.outvars) != 1 or self.facts.function(eqn.outvars[0]) is None:
                raise _MixedError(order, eqn)
            self.rows[eqn.outvars[0]] = _Rows(self.bound(eqn)[0], order)
            return
        if adds_rows(eqn, self.is_local, self.is_same_for_all):
            self.whole[eqn.outvars[0]] = self.bound(eqn)[0]
            return
        if not keeps_rows(eqn, self.is_local, self.is_same_for_all):
            raise _MixedError(order, eqn)
        for var, made in zip(eqn.outvars, self.bound(eqn), strict=True):
            self.rows[var] = _Rows(made, order)

    def is_local(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and atom in self.rows

    def bound(self, eqn: JaxprEqn) -> list[Any]:
        operands = [
            self.rows[atom].array if self.is_local(atom) else self.read(atom, eqn)
            for atom in eqn.invars
        ]
        return bind_with(eqn, operands, {})

    def barrier(self, eqn: JaxprEqn) -> None:
        """Each value passes as it is."""
        arrays = [
            self.rows[atom].array if self.is_local(atom) else self.read(atom, eqn)
            for atom in eqn.invars
        ]
        for atom, var, made in zip(
            eqn.invars, eqn.outvars, bind_with(eqn, arrays, {}), strict=True
        ):
            if self.is_local(atom):
                self.rows[var] = _Rows(made, self.rows[atom].order)
            else:
                self.whole[var] = made
            function = self.facts.function(atom)
            if function is not None:
                self.facts.functions[var] = function

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
        if given or any(map(_is_grouped, walk(scan.body))):
            consts = slice(scan.num_consts)
            pairs = [*zip(eqn.invars[consts], scan.body.invars[consts], strict=True)]
            known = functools.partial(self.facts.passed, pairs)
            asked = scan.body, self.examples, known, given, self.stay
            made = _rewritten(*asked, scan.num_carry)
        operands = [
            self.stacks[atom][0]
            if number >= first and scan.body.invars[number] in given
            else self.read(atom, eqn)
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


def _is_key(atom: Atom) -> bool:
    return jax.dtypes.issubdtype(atom.aval.dtype, jax.dtypes.extended)
