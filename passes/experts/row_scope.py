"""Values of a program whose rows are sorted for each example, and the sorts themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.experts.orders import MixedRowsError, Order, SortedRows
from autopar.passes.experts.row_functions import Facts, RowFunction, RowNumbers, numbers_themselves
from autopar.passes.graph.graph import Atom
from autopar.passes.primitives.cuts import bind_with
from autopar.passes.primitives.shardings import shape_of


class RowScope:
    """What is there of the values of one program or body while it is evaluated, and its sorts.

    Args:
      jaxpr: the program.
      examples: for each of which rows are sorted.
      facts: what is known of its arguments.
      stay: sorts that stay as they are, by identity.
    """

    def __init__(self, jaxpr: Jaxpr, examples: int, facts: Facts, stay: frozenset[int]):
        self.jaxpr, self.examples, self.facts, self.stay = jaxpr, examples, facts, stay
        self.whole: dict[Var, Any] = {}
        self.rows: dict[Var, SortedRows] = {}
        self.makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.orders: list[Order] = []
        self.multiplied: set[int] = set()
        self.sizes: dict[tuple[int, int], Any] = {}
        self.counted: dict[Var, Order] = {}
        self.keys: dict[Var, RowFunction] = {}
        self.without_array: dict[Var, Order] = {}
        for eqn in jaxpr.eqns:
            if self.is_sort(eqn) and isinstance(eqn.invars[0], Var):
                self.know_keys(eqn.invars[0])

    def know_keys(self, keys: Var) -> None:
        """Rows have these keys, also before they were put into one line."""
        (rows,), var = shape_of(keys), keys
        while True:
            lead = len(shape_of(var))
            self.keys[var] = numbers_themselves(RowNumbers("keys", keys), lead, rows)
            maker = self.makers.get(var)
            if maker is None or maker.primitive.name not in ("reshape", "squeeze"):
                return
            (before,) = maker.invars
            if not isinstance(before, Var):
                return
            var = before

    def learn_keys(self, var: Var) -> None:
        if var in self.keys and var not in self.facts.functions:
            self.facts.functions[var] = self.keys[var]

    def learn_constant(self, var: Var) -> None:
        """A mask that is the same for all rows, whatever their numbers are."""
        function = self.facts.function(var)
        if function is None or function.numbers.keys is not None or var in self.facts.constants:
            return
        if var.aval.dtype == jnp.bool_ and (same := function.constant()) is not None:
            lead = (1,) * function.lead
            self.facts.constants[var] = same.reshape(*lead, *same.shape[1:])

    def read(self, atom: Atom) -> Any:
        """A value as the program has it, whole."""
        if isinstance(atom, Literal):
            return atom.val
        if atom in self.whole:
            return self.whole[atom]
        constant = self.facts.constant(atom)
        if constant is not None and constant.size == 1:
            dtype = atom.aval.dtype
            self.whole[atom] = lax.full(shape_of(atom), constant.astype(dtype).item(), dtype)
            return self.whole[atom]
        raise MixedRowsError(self.order_of(atom))

    def number_of(self, atom: Atom) -> RowFunction | None:
        """How a value follows from a number of its row; of its key, it is a row's like others."""
        function = self.facts.function(atom)
        return function if function is None or function.numbers.keys is None else None

    def order_of(self, atom: Var) -> Order:
        if atom in self.rows:
            return self.rows[atom].order
        return self.without_array[atom]

    def is_there(self, atom: Atom) -> bool:
        return isinstance(atom, Literal) or atom in self.whole

    def is_sort(self, eqn: JaxprEqn) -> bool:
        if eqn.primitive.name != "sort" or id(eqn) in self.stay or eqn.params["num_keys"] != 1:
            return False
        shape = shape_of(eqn.invars[0])
        return len(shape) == 1 and shape[0] % self.examples == 0 and len(eqn.invars) > 1

    def sort(self, eqn: JaxprEqn) -> bool:
        """Each example's rows; False: it is evaluated as it is."""
        keys, *others = eqn.invars
        (count,) = shape_of(keys)
        functions = [self.of_place(atom) for atom in others]
        if isinstance(keys, Literal) or not any(functions):
            return False
        function = self.number_of(keys)
        back = function is not None and function.numbers.kind == "order" and function.is_number
        if not back and keys in self.rows:
            return False
        if any(isinstance(x, Var) and x in self.rows for x in others):
            return False
        if back and not all(f is not None and f.is_number for f in functions):
            return False
        shape = self.examples, count // self.examples
        given = self.rows[keys] if back else None
        own = self.read(keys) if given is None else given.array
        operands = [own.reshape(shape)]
        operands += [
            self.read(atom).reshape(shape) if f is None else self.of_first(atom, f, shape)
            for atom, f in zip(others, functions, strict=True)
        ]
        made = [x.reshape(count) for x in bind_with(eqn, operands, {"dimension": 1})]
        if given is None:
            order = Order(eqn, count // self.examples, keys, operands[0])
            self.orders.append(order)
            numbers = RowNumbers("order", order)
        else:
            order, numbers = given.order, RowNumbers("rank", given.order)
        for var, array, f in zip(eqn.outvars, made, [None, *functions], strict=True):
            self.rows[var] = SortedRows(array, order)
            if f is not None:
                self.facts.functions[var] = dataclasses.replace(f, numbers=numbers)
            elif given is not None:  # the sorted order
                self.facts.functions[var] = numbers_themselves(RowNumbers("place"), 1, count)
                del self.rows[var]
                self.whole[var] = lax.iota(var.aval.dtype, count)
            elif var is eqn.outvars[0]:
                own_numbers = RowNumbers("sorted", order)
                self.facts.functions[var] = numbers_themselves(own_numbers, 1, count)
        return True

    def of_place(self, atom: Atom) -> RowFunction | None:
        """How each element follows from its own place."""
        function = self.facts.function(atom)
        is_of_place = function is not None and function.numbers.kind == "place"
        return function if is_of_place and len(shape_of(atom)) == 1 else None

    def of_first(self, atom: Atom, function: RowFunction, shape: tuple[int, int]) -> Any:
        """What follows from the places of the first example, as every one has it."""
        if function.is_number:
            return lax.broadcasted_iota(atom.aval.dtype, shape, 1)
        return jnp.broadcast_to(self.read(atom)[: shape[1]], shape)
