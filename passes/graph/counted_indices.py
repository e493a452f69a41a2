"""Indices that only count, `q[jnp.arange(B), actions]`: the dimension that they name is a batch.

A gather or scatter whose index, in one of its coordinates, is the index's own place along some
dimension takes from each row of the operand what the row's own index names. Written so, as JAX
writes a vmapped one, every pass sees that rows do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.passes.graph import source_infos
from autopar.passes.graph.graph import (
    Graph,
    eliminate_dead_code,
    map_inner_jaxprs,
    with_jaxpr,
)
from autopar.passes.graph.primitives import CONTROL_FLOW, SCATTERS
from autopar.passes.graph.scans import ScanParts, bodies_with_constants

Columns = tuple[int | None, ...]
"""For each coordinate of indices, the dimension that it counts; None: it is something else."""


def with_batches(graph: Graph) -> Graph:
    """The same program, where what is taken along the index's own place has a batch."""
    known = _Counted()
    first = len(graph.inputs) - len(graph.constants)
    for var, value in zip(graph.jaxpr.invars[first:], graph.constants, strict=True):
        known.constant(var, value)
    return with_jaxpr(graph, _rewritten(graph.jaxpr, known))


def _rewritten(jaxpr: Jaxpr, known: _Counted) -> Jaxpr:
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "gather" or name in SCATTERS:
            eqns += _batched(eqn, known.columns.get(_key(eqn.invars[1]), ()))
        elif name in CONTROL_FLOW:
            new = _rewritten_bodies(eqn, known)
            params = map_inner_jaxprs(eqn.params, lambda body, new=new: new[id(body)])  # type: ignore[misc]
            eqns.append(eqn.replace(params=params))
        else:
            known.visit(eqn)
            eqns.append(eqn)
    return eliminate_dead_code(jaxpr.replace(eqns=eqns))


def _rewritten_bodies(eqn: JaxprEqn, known: _Counted) -> dict[int, Jaxpr]:
    """The new bodies of control flow, by the old ones' identities."""
    scan = ScanParts.of(eqn) if eqn.primitive.name == "scan" else None
    new = {}
    for body, given in bodies_with_constants(eqn):
        inner = _Counted()
        for var, atom in given:
            inner.learn(var, known, atom)
        if scan is not None:
            slices = (scan.operands(values)[2] for values in (body.invars, eqn.invars))
            for var, atom in zip(*slices, strict=True):
                inner.learn(var, known, atom, shift=-1)
        new[id(body)] = _rewritten(body, inner)
        if scan is not None:
            stacks = (scan.results(values)[1] for values in (eqn.outvars, body.outvars))
            for var, atom in zip(*stacks, strict=True):
                known.learn(var, inner, atom, shift=1)
    return new


def _key(atom: Any) -> Var | None:
    return None if isinstance(atom, jex_core.Literal) else atom


class _Counted:
    """What is known of integers: `counts[x] == d`: every element is its place along dimension d.

    `columns` say the same of each coordinate of indices, along their last dimension; `never` are
    arrays that are false everywhere.
    """

    def __init__(self) -> None:
        self.counts: dict[Var | None, int] = {}
        self.columns: dict[Var | None, Columns] = {}
        self.never: set[Var | None] = set()

    def constant(self, var: Var, value: Any) -> None:
        """Learn what a closed-over array is."""
        dtype = var.aval.dtype
        if len(var.aval.shape) != 1 or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            return
        numbers = np.asarray(value)
        if dtype == np.bool_ and not np.any(numbers):
            self.never.add(var)
        is_integer = np.issubdtype(dtype, np.integer)
        if is_integer and np.array_equal(numbers, np.arange(len(numbers))):
            self.counts[var] = 0

    def learn(self, var: Var, other: _Counted, atom: Any, shift: int = 0) -> None:
        """Learn what is known elsewhere of a value with as many more leading dimensions."""
        key = _key(atom)
        if key in other.never:
            self.never.add(var)
        dim = other.counts.get(key)
        if dim is not None and dim + shift >= 0:
            self.counts[var] = dim + shift
        if key in other.columns:
            shifted = [None if d is None else d + shift for d in other.columns[key]]
            self.columns[var] = tuple(None if d == -1 else d for d in shifted)

    def visit(self, eqn: JaxprEqn) -> None:
        """Learn what an equation's result is."""
        rule = _RULES.get(eqn.primitive.name)
        if rule is not None:
            rule(self, eqn, eqn.outvars[0], *map(_key, eqn.invars))

    # One function per primitive: the result, then the operands, of which literals are None.

    def iota(self, eqn: JaxprEqn, result: Var) -> None:
        if _fits(eqn.params["shape"][eqn.params["dimension"]], eqn.params["dtype"]):
            self.counts[result] = eqn.params["dimension"]

    def broadcast(self, eqn: JaxprEqn, result: Var, operand: Var | None, *_: Any) -> None:
        self._moved(operand, result, eqn.params["broadcast_dimensions"])

    def transpose(self, eqn: JaxprEqn, result: Var, operand: Var | None) -> None:
        permutation = eqn.params["permutation"]
        self._moved(operand, result, [permutation.index(d) for d in range(len(permutation))])

    def reshape(self, eqn: JaxprEqn, result: Var, operand: Var | None, *_: Any) -> None:
        """Dimensions of size 1 come and go; the others stay in order."""
        old, new = (
            [d for d, size in enumerate(v.aval.shape) if size != 1] for v in (eqn.invars[0], result)
        )
        sizes = [[v.aval.shape[d] for d in ds] for v, ds in ((eqn.invars[0], old), (result, new))]
        if sizes[0] == sizes[1]:
            self._moved(operand, result, dict(zip(old, new, strict=True)))

    def _moved(
        self, operand: Var | None, result: Var, to: Mapping[int, int] | Sequence[int]
    ) -> None:
        if operand in self.never:
            self.never.add(result)
        dim = self.counts.get(operand)
        if dim is None or (not isinstance(to, Sequence) and dim not in to):
            return
        assert operand is not None
        if operand.aval.shape[dim] == result.aval.shape[to[dim]]:
            self.counts[result] = to[dim]

    def convert(self, eqn: JaxprEqn, result: Var, operand: Var | None) -> None:
        dim, dtype = self.counts.get(operand), eqn.params["new_dtype"]
        if dim is not None and _fits(result.aval.shape[dim], dtype):
            self.counts[result] = dim

    def copy(self, eqn: JaxprEqn, result: Var, operand: Var | None) -> None:
        """One is the other."""
        if operand in self.counts:
            self.counts[result] = self.counts[operand]
        if operand in self.columns:
            self.columns[result] = self.columns[operand]

    def less(self, eqn: JaxprEqn, result: Var, operand: Var | None, other: Var | None) -> None:
        if operand in self.counts and _literal(eqn.invars[1], lambda value: value <= 0):
            self.never.add(result)

    def select(self, eqn: JaxprEqn, result: Var, which: Var | None, *cases: Var | None) -> None:
        if which in self.never:
            self.copy(eqn, result, cases[0])

    def clamp(self, eqn: JaxprEqn, result: Var, low: Any, operand: Var | None, high: Any) -> None:
        dim = self.counts.get(operand)
        if dim is None:
            return
        last = result.aval.shape[dim] - 1
        if _literal(eqn.invars[0], lambda value: value <= 0) and _literal(
            eqn.invars[2], lambda value: value >= last
        ):
            self.copy(eqn, result, operand)

    def concatenate(self, eqn: JaxprEqn, result: Var, *operands: Var | None) -> None:
        last = len(result.aval.shape) - 1
        if eqn.params["dimension"] != last:
            return
        columns: list[int | None] = []
        for operand, atom in zip(operands, eqn.invars, strict=True):
            size = atom.aval.shape[last]
            dim = self.counts.get(operand)
            if dim is not None and (size != 1 or dim == last):
                dim = None
            columns += self.columns.get(operand, (dim,) if size == 1 else (None,) * size)
        if any(dim is not None for dim in columns):
            self.columns[result] = tuple(columns)

    def stack(self, eqn: JaxprEqn, result: Var, *operands: Var | None) -> None:
        if eqn.params["axis"] == len(result.aval.shape) - 1:
            columns = tuple(map(self.counts.get, operands))
            if any(dim is not None for dim in columns):
                self.columns[result] = columns


_RULES: dict[str, Callable[..., None]] = {
    "iota": _Counted.iota,
    "broadcast_in_dim": _Counted.broadcast,
    "transpose": _Counted.transpose,
    "reshape": _Counted.reshape,
    "squeeze": _Counted.reshape,
    "convert_element_type": _Counted.convert,
    "copy": _Counted.copy,
    "stop_gradient": _Counted.copy,
    "lt": _Counted.less,
    "select_n": _Counted.select,
    "clamp": _Counted.clamp,
    "concatenate": _Counted.concatenate,
    "stack": _Counted.stack,
}


def _literal(atom: Any, holds: Callable[[Any], Any]) -> bool:
    return isinstance(atom, jex_core.Literal) and bool(np.all(holds(np.asarray(atom.val))))


def _fits(size: int, dtype: Any) -> bool:
    """Whether an integer type can count to a size."""
    return bool(np.issubdtype(dtype, np.integer)) and size - 1 <= np.iinfo(dtype).max


_NAMES = {  # of a gather's dimension numbers, and of a scatter's
    True: ("collapsed_slice_dims", "start_index_map", "start_indices_batching_dims"),
    False: (
        "inserted_window_dims",
        "scatter_dims_to_operand_dims",
        "scatter_indices_batching_dims",
    ),
}


def _batched(eqn: JaxprEqn, columns: Columns) -> list[JaxprEqn]:
    """A gather or scatter with what its indices count as batch dimensions, if there is any."""
    numbers = eqn.params["dimension_numbers"]
    collapsed, index_map, batching = _NAMES[eqn.primitive.name == "gather"]
    dropped: tuple[int, ...] = getattr(numbers, collapsed)
    named: tuple[int, ...] = getattr(numbers, index_map)
    batches = dict(
        zip(numbers.operand_batching_dims, getattr(numbers, batching), strict=True)
    )  # dimension of the operand -> dimension of the indices
    operand, indices = eqn.invars[:2]
    counted = set[int]()
    for column, dim in enumerate(columns):
        target = named[column]
        if dim is None or dim in batches.values() or target not in dropped:
            continue
        if operand.aval.shape[target] == indices.aval.shape[dim] and len(counted) + 1 < len(named):
            batches[target] = dim
            counted.add(column)
    if not counted:
        return [eqn]
    kept = [column for column in range(len(named)) if column not in counted]
    picked, made = _picked(indices, kept, eqn)
    batches = dict(sorted(batches.items()))
    changes = {
        collapsed: tuple(dim for dim in dropped if dim not in batches),
        index_map: tuple(named[column] for column in kept),
        "operand_batching_dims": tuple(batches),
        batching: tuple(batches.values()),
    }
    numbers = numbers._replace(**changes)
    params = {**eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False}
    invars = [operand, picked, *eqn.invars[2:]]
    return [*made, eqn.replace(invars=invars, params=params)]


def _picked(indices: Var, kept: Sequence[int], eqn: JaxprEqn) -> tuple[Var, list[JaxprEqn]]:
    """Some coordinates of indices, and the equations that take them."""
    runs = [[kept[0]]]
    for column in kept[1:]:
        if column == runs[-1][-1] + 1:
            runs[-1].append(column)
        else:
            runs.append([column])
    last = len(indices.aval.shape) - 1

    def take(indices: Any) -> Any:
        parts = [lax.slice_in_dim(indices, run[0], run[-1] + 1, axis=last) for run in runs]
        return parts[0] if len(parts) == 1 else lax.concatenate(parts, last)

    struct = jax.ShapeDtypeStruct(indices.aval.shape, indices.aval.dtype)
    with source_infos.source_context(eqn):
        traced: Jaxpr = jax.make_jaxpr(take)(struct).jaxpr
    (result,) = traced.outvars
    named = {traced.invars[0]: indices}
    return result, [
        e.replace(invars=[named.get(atom, atom) for atom in e.invars]) for e in traced.eqns
    ]
