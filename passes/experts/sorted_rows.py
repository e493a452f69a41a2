"""Equations evaluated with rows sorted for each example, and what is proven of each one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.passes.experts.orders import MixedRowsError, Order, SortedRows
from autopar.passes.experts.row_by_row import (
    adds_rows,
    is_grouped,
    keeps_rows,
    puts_rows,
    takes_rows,
)
from autopar.passes.experts.row_functions import RowNumbers
from autopar.passes.experts.row_scope import RowScope
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import Atom
from autopar.passes.graph.primitives import ELEMENTWISE, SCATTERS
from autopar.passes.primitives.cuts import bind_with
from autopar.passes.primitives.ragged_products import RaggedDims
from autopar.passes.primitives.shardings import shape_of


class SortedScope(RowScope):
    """Evaluates the equations of one program or body, while JAX traces that."""

    def evaluate(self, eqn: JaxprEqn) -> None:
        name = eqn.primitive.name
        if self.is_sort(eqn) and self.sort(eqn):
            return
        local = [
            self.rows[atom] for atom in eqn.invars if isinstance(atom, Var) and atom in self.rows
        ]
        orders = {id(x.order) for x in local}
        if local and is_barrier(eqn):
            self.barrier(eqn)
        elif len(orders) > 1:
            raise MixedRowsError(local[0].order)
        elif local and is_grouped(eqn):
            self.product(eqn, local[0].order)
        elif local:
            move = self.gather if name == "gather" else self.scatter if name in SCATTERS else None
            if move is None or not move(eqn):
                self.row_by_row(eqn, local[0].order)
        elif all(map(self.is_there, eqn.invars)):
            operands = [self.read(atom) for atom in eqn.invars]
            self.whole.update(zip(eqn.outvars, bind_with(eqn, operands, {}), strict=True))
        else:
            self.of_functions(eqn)

    def of_functions(self, eqn: JaxprEqn) -> None:
        """Of an operand nothing is there but what is known: as it is, or as a constant."""
        self.facts.learn(eqn)
        if len(eqn.outvars) == 1 and self.facts.function(eqn.outvars[0]) is not None:
            known = (a for a in eqn.invars if isinstance(a, Var) and a in self.without_array)
            self.without_array[eqn.outvars[0]] = self.without_array[next(known)]
            return
        operands = [self.read(atom) for atom in eqn.invars]
        self.whole.update(zip(eqn.outvars, bind_with(eqn, operands, {}), strict=True))

    # Rows that are taken, and put back.

    def gather(self, eqn: JaxprEqn) -> bool:
        """Rows by their numbers; False: by something else."""
        operand, indices = eqn.invars
        function = self.number_of(indices)
        if function is None or not isinstance(indices, Var) or indices not in self.rows:
            return False
        order = self.rows[indices].order
        if not takes_rows(eqn) or isinstance(operand, Literal):
            raise MixedRowsError(order)
        given = self.number_of(operand)
        (var,) = eqn.outvars
        if function.numbers.kind == "rank":
            known = self.rows.get(operand)
            if known is None or known.order is not order or not function.is_number or given:
                raise MixedRowsError(order)
            self.whole[var] = self.in_examples(eqn, [known.array, self.rows[indices].array])
            return True
        if given is not None and given.numbers == RowNumbers("rank", order) and function.is_number:
            # What is known of each row of the places, in this order: of each place.
            self.facts.functions[var] = dataclasses.replace(given, numbers=RowNumbers("place"))
            self.without_array[var] = order
            return True
        if self.of_place(operand) is not None and function.is_number and given is not None:
            # What follows from each place, in this order.
            if given.rows != function.rows:
                raise MixedRowsError(order)
            first = self.read(operand)[: order.rows]
            (made,) = bind_with(eqn, [first, self.rows[indices].array], _in_any_order(eqn))
            self.facts.functions[var] = dataclasses.replace(given, numbers=function.numbers)
            self.rows[var] = SortedRows(made, order)
            return True
        if operand in self.rows or not function.is_local(self.examples, shape_of(operand)[0]):
            raise MixedRowsError(order)
        made = self.in_examples(eqn, [self.read(operand), self.rows[indices].array])
        self.rows[var] = SortedRows(made, order)
        of_key = self.facts.function(operand)
        if of_key is not None and of_key.numbers.keys is order.keys and function.is_number:
            numbers = RowNumbers("sorted", order)
            self.facts.functions[var] = dataclasses.replace(of_key, numbers=numbers)
        return True

    def scatter(self, eqn: JaxprEqn) -> bool:
        """Rows to where their numbers say; False: to where something else does."""
        base, indices, updates = eqn.invars
        function = self.number_of(indices)
        if function is None or not isinstance(indices, Var) or indices not in self.rows:
            return False
        order, (var,) = self.rows[indices].order, eqn.outvars
        if not puts_rows(eqn):
            raise MixedRowsError(order)
        given = self.number_of(updates)
        own = self.rows[indices].array
        if function.numbers.kind == "rank":
            is_sorted = isinstance(updates, Var) and updates in self.rows
            is_whole = shape_of(base)[0] == function.rows and self.is_same_for_all(base)
            if is_sorted or not function.is_number or not is_whole:
                raise MixedRowsError(order)
            operands = [self.read(base), own, self.read(updates)]
            self.rows[var] = SortedRows(self.in_examples(eqn, operands), order)
            return True
        if isinstance(base, Var) and base in self.rows:
            raise MixedRowsError(order)
        if isinstance(updates, Var) and updates in self.rows and given is None:
            if not function.is_local(self.examples, shape_of(base)[0]):
                raise MixedRowsError(order)
            operands = [self.read(base), own, self.rows[updates].array]
            self.whole[var] = self.in_examples(eqn, operands)
            return True
        is_put = eqn.primitive.name == "scatter" and function.is_number
        if is_put and given is not None and given.numbers.kind == "place" and given.lead == 1:
            # Every row gets what is known of the place to which it was put.
            if not shape_of(base)[0] == function.rows == given.rows:
                raise MixedRowsError(order)
            numbers = RowNumbers("rank", order)
            self.facts.functions[var] = dataclasses.replace(given, numbers=numbers)
            if given.is_number:
                shape = self.examples, order.rows
                here = lax.broadcasted_iota(updates.aval.dtype, shape, 1)
                arrays = [self.read(base), own, here.reshape(shape_of(updates))]
                self.rows[var] = SortedRows(self.in_examples(eqn, arrays), order)
            else:
                self.without_array[var] = order
            return True
        raise MixedRowsError(order)

    def in_examples(self, eqn: JaxprEqn, arrays: Sequence[Any]) -> Any:
        """An equation for each example: all operands' rows, and the result's, are of all."""
        parts = [x.reshape(self.examples, -1, *x.shape[1:]) for x in arrays]
        made = jax.vmap(lambda *xs: bind_with(eqn, xs, _in_any_order(eqn))[0])(*parts)
        return made.reshape(shape_of(eqn.outvars[0]))

    # Products, loops, barriers, and what is computed of each row.

    def product(self, eqn: JaxprEqn, order: Order) -> None:
        left, right, sizes = eqn.invars
        groups = shape_of(sizes)[0]
        if not self.are_counts(sizes, order):
            raise MixedRowsError(order, self.no_counts(order))
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        dims = RaggedDims.of(eqn)
        (contracted, other), batch = numbers.dot_dimension_numbers
        contracted = [dim + 1 for dim in contracted]
        operands = [self.sorted(left, order)]
        if dims.sums_rows:
            if dims.right_rows != 0:
                raise MixedRowsError(order)
            contracted, other = [0, *contracted], [0, *(dim + 1 for dim in other)]
            operands.append(self.sorted(right, order))
        else:
            operands.append(self.read(right))
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
            self.rows[var] = SortedRows(made.reshape(shape_of(var)), order)

    def are_counts(self, sizes: Atom, order: Order) -> bool:
        """Whether these are the counts of the keys by which an order sorts."""
        if isinstance(sizes, Literal):
            return False
        if sizes in self.counted:
            return self.counted[sizes] is order
        counts, bounds = self.facts.counts.get(sizes), self.facts.bounds.get(order.keys)
        if counts is None or counts.keys is not order.keys or bounds is None:
            return False
        return counts.are_of(shape_of(sizes)[0], bounds)

    def no_counts(self, order: Order) -> str:
        """Why sizes of groups are not the counts of the keys."""
        if self.facts.bounds.get(order.keys) is None:
            return "nothing says that the keys are numbers of groups"
        return "the groups' sizes are not proven to be the counts of the keys"

    def sizes_of(self, order: Order, groups: int) -> Any:
        """How many rows of each group every example has, [examples, groups]."""
        key = id(order), groups
        if key not in self.sizes:
            if order not in self.orders:  # of another body, which kept no sizes
                raise MixedRowsError(order)
            keys = order.by_example.astype(jnp.int32)[:, :, None]
            is_of = keys == jnp.arange(groups, dtype=jnp.int32)
            self.sizes[key] = jnp.sum(is_of, axis=1, dtype=jnp.int32)
        return self.sizes[key]

    def sorted(self, atom: Atom, order: Order) -> Any:
        """Rows in an order, [examples, rows, ...]."""
        if isinstance(atom, Var) and atom in self.rows:
            if self.number_of(atom) is not None:
                raise MixedRowsError(order)
            array = self.rows[atom].array
        elif self.is_same_for_all(atom):
            array = jnp.broadcast_to(self.read(atom), shape_of(atom))
        else:
            raise MixedRowsError(order)
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

    def row_by_row(self, eqn: JaxprEqn, order: Order) -> None:
        """What is computed of each row alone, or a sum over all of them."""
        functions = [self.number_of(a) for a in eqn.invars if self.is_local(a)]
        if any(f is not None for f in functions):  # numbers of rows
            self.facts.learn(eqn)
            if len(eqn.outvars) != 1 or self.facts.function(eqn.outvars[0]) is None:
                raise MixedRowsError(order)
            self.rows[eqn.outvars[0]] = SortedRows(self.bound(eqn)[0], order)
            return
        if adds_rows(eqn, self.is_local, self.is_same_for_all):
            self.whole[eqn.outvars[0]] = self.bound(eqn)[0]
            return
        if not keeps_rows(eqn, self.is_local, self.is_same_for_all):
            raise MixedRowsError(order)
        for var, made in zip(eqn.outvars, self.bound(eqn), strict=True):
            self.rows[var] = SortedRows(made, order)

    def is_local(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and atom in self.rows

    def bound(self, eqn: JaxprEqn) -> list[Any]:
        operands = [
            self.rows[atom].array if self.is_local(atom) else self.read(atom) for atom in eqn.invars
        ]
        return bind_with(eqn, operands, _in_any_order(eqn))

    def barrier(self, eqn: JaxprEqn) -> None:
        """Each value passes as it is."""
        for atom, var, made in zip(eqn.invars, eqn.outvars, self.bound(eqn), strict=True):
            if self.is_local(atom):
                self.rows[var] = SortedRows(made, self.rows[atom].order)
            else:
                self.whole[var] = made
            function = self.number_of(atom)
            if function is not None:
                self.facts.functions[var] = function


def _in_any_order(eqn: JaxprEqn) -> dict[str, Any]:
    """Changes of params: indices are no longer in the order of the whole batch."""
    return {"indices_are_sorted": False} if eqn.params.get("indices_are_sorted") else {}
