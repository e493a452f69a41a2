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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.experts.blocks import traced
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
from autopar.passes.graph.primitives import ELEMENTWISE, MONOID_REDUCTIONS, REDUCTIONS, SCATTERS
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
    jaxpr = _rewritten(graph.jaxpr, examples, Facts) if examples > 1 else None
    return graph if jaxpr is None else dataclasses.replace(graph, jaxpr=jaxpr)


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

    def sizes(self, groups: int) -> Any:
        """How many rows of each group every example has, [examples, groups]."""
        is_of = self.by_example[:, :, None] == jnp.arange(groups, dtype=self.by_example.dtype)
        return jnp.sum(is_of, axis=1, dtype=jnp.int32)


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


def _rewritten(jaxpr: Jaxpr, examples: int, known: Callable[[], Facts]) -> Jaxpr | None:
    """A program or a body; None: nothing changes."""
    stay: frozenset[int] = frozenset()
    while True:
        scope = _Scope(jaxpr, examples, known(), stay)
        try:
            closed = traced(scope.run, jaxpr.invars)
        except _MixedError as mixed:
            stay |= {id(mixed.order.eqn)}
            continue
        useless = {id(order.eqn) for order in scope.orders} - scope.multiplied
        if useless:
            stay |= useless
            continue
        if not scope.multiplied and not scope.has_new_bodies:
            return None
        return eliminate_dead_code(merge_equal_equations(flatten(closed).jaxpr))


class _Scope:
    """Evaluates the equations of one program or body, while JAX traces that."""

    def __init__(self, jaxpr: Jaxpr, examples: int, facts: Facts, stay: frozenset[int]):
        self.jaxpr, self.examples, self.facts, self.stay = jaxpr, examples, facts, stay
        self.whole: dict[Var, Any] = {}
        self.rows: dict[Var, _Rows] = {}
        self.makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.orders: list[_Order] = []
        self.multiplied: set[int] = set()
        self.has_new_bodies = False
        self.sizes: dict[tuple[int, int], Any] = {}
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
        self.whole.update(zip(self.jaxpr.invars, arrays, strict=True))
        for var in self.jaxpr.invars:
            self.learn_keys(var)
        for eqn in self.jaxpr.eqns:
            with jax_compat.source_context(eqn):
                self.evaluate(eqn)
            self.facts.learn(eqn)
            for var in eqn.outvars:
                self.learn_keys(var)
                self.learn_constant(var)
        return [
            jax_compat.with_type_of(jnp.asarray(x), atom.aval) if not _is_key(atom) else x
            for x, atom in ((self.read(atom, None), atom) for atom in self.jaxpr.outvars)
        ]

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
        elif all(atom in self.whole for atom in eqn.invars if isinstance(atom, Var)):
            operands = [self.read(atom, eqn) for atom in eqn.invars]
            self.whole.update(zip(eqn.outvars, bind_with(eqn, operands, {}), strict=True))
        else:
            self.of_functions(eqn)

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
        if not _takes_rows(eqn) or isinstance(operand, Literal):
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
        if not _puts_rows(eqn):
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
        counts = self.facts.counts.get(sizes) if isinstance(sizes, Var) else None
        bounds = self.facts.bounds.get(order.keys)
        is_proven = counts is not None and counts.keys is order.keys and bounds is not None
        if not is_proven or not counts.are_of(groups, bounds):  # type: ignore[union-attr,arg-type]
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
        key = id(order), groups
        if key not in self.sizes:
            self.sizes[key] = order.sizes(groups)
        parts = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=((contracted, other), batch),
            lhs_ragged_dimensions=[1],
            rhs_group_dimensions=numbers.rhs_group_dimensions,
        )
        made = bind_with(
            eqn, [*operands, self.sizes[key]], {"ragged_dot_dimension_numbers": parts}
        )[0]
        self.multiplied.add(id(order.eqn))
        (var,) = eqn.outvars
        if dims.sums_rows:
            self.whole[var] = made
        else:
            self.rows[var] = _Rows(made.reshape(shape_of(var)), order)

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
        if self.adds_rows(eqn):
            self.whole[eqn.outvars[0]] = self.bound(eqn)[0]
            return
        if not self.keeps_rows(eqn):
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

    def adds_rows(self, eqn: JaxprEqn) -> bool:
        """Whether rows are summed, or combined by another monoid."""
        name = eqn.primitive.name
        if name in MONOID_REDUCTIONS and "axes" in eqn.params:
            return 0 in eqn.params["axes"]
        if name == "dot_general":
            (left, right), _ = eqn.params["dimension_numbers"]
            return (0, 0) in zip(left, right, strict=True) and all(map(self.is_local, eqn.invars))
        if name == "scatter-add":  # rows to what they name themselves
            base, indices, updates = eqn.invars
            numbers = eqn.params["dimension_numbers"]
            is_plain = 0 not in numbers.update_window_dims and not numbers.operand_batching_dims
            return (
                is_plain
                and not self.is_local(base)
                and self.is_local(indices)
                and (self.is_local(updates) or self.is_same_for_all(updates))
            )
        return False

    def keeps_rows(self, eqn: JaxprEqn) -> bool:
        """Whether each row of the results is made of the same rows of operands."""
        name, params = eqn.primitive.name, eqn.params
        rows = {shape_of(atom)[0] for atom in eqn.invars if self.is_local(atom)}
        if any(shape_of(var)[:1] != tuple(rows) for var in eqn.outvars):
            return False
        others = [atom for atom in eqn.invars if not self.is_local(atom)]
        if name == "gather":  # from what rows name themselves
            operand, indices = eqn.invars
            numbers = params["dimension_numbers"]
            is_plain = 0 not in numbers.offset_dims and not numbers.operand_batching_dims
            return is_plain and not self.is_local(operand) and self.is_local(indices)
        if name == "dot_general":
            (contracted, _), (batch, _) = params["dimension_numbers"]
            first, second = eqn.invars
            is_left = self.is_local(first) and not self.is_local(second)
            return is_left and 0 not in contracted and not batch
        if not all(map(self.is_same_for_all, others)):
            return False
        if name in ELEMENTWISE or name in ("reshape", "squeeze"):
            return True
        if name == "broadcast_in_dim":
            return tuple(params["broadcast_dimensions"])[:1] == (0,)
        if name in REDUCTIONS:
            return 0 not in params.get("axes", (0,))
        if name == "concatenate":
            return bool(params["dimension"] != 0)
        if name == "split":
            return bool(params["axis"] != 0)
        if name == "slice":
            return params["start_indices"][0] == 0 and (params["strides"] or (1,))[0] == 1
        if name == "pad":
            return tuple(params["padding_config"][0]) == (0, 0, 0)
        return name == "transpose" and params["permutation"][0] == 0

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
        operands = [self.read(atom, eqn) for atom in eqn.invars]
        scan = ScanParts.of(eqn)
        body = None
        if any(map(_is_grouped, walk(scan.body))):
            consts = slice(scan.num_consts)
            pairs = [*zip(eqn.invars[consts], scan.body.invars[consts], strict=True)]
            body = _rewritten(scan.body, self.examples, lambda: self.facts.passed(pairs))
        if body is None:
            results = bind_with(eqn, operands, {})
        else:
            self.has_new_bodies = True
            closed = ClosedJaxpr(body, [])
            params = jax_compat.scan_params(eqn.params, closed, scan.num_consts, scan.num_carry)
            typed = [
                jax_compat.with_type_of(x, var.aval) if isinstance(x, jax.Array) else x
                for x, var in zip(operands, scan.body.invars, strict=True)
            ]
            results = list(eqn.primitive.bind(*typed, **params))
        self.whole.update(zip(eqn.outvars, results, strict=True))


def _takes_rows(eqn: JaxprEqn) -> bool:
    """Whether `x[indices]` takes whole rows of x, one for each index."""
    numbers, shape = eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
    return bool(
        numbers.collapsed_slice_dims == (0,)
        and numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.offset_dims) == tuple(range(1, len(shape)))
        and tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])
        and len(shape_of(eqn.invars[1])) == 2
    )


def _puts_rows(eqn: JaxprEqn) -> bool:
    """Whether whole rows are put to, or combined with, what is there, one for each index."""
    numbers = eqn.params["dimension_numbers"]
    shape, indices, rows = map(shape_of, eqn.invars)
    return bool(
        numbers.inserted_window_dims == (0,)
        and numbers.scatter_dims_to_operand_dims == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.update_window_dims) == tuple(range(1, len(shape)))
        and rows[1:] == shape[1:]
        and len(indices) == 2
    )


def _is_key(atom: Atom) -> bool:
    return jax.dtypes.issubdtype(atom.aval.dtype, jax.dtypes.extended)
