"""Grouped matrix products (`ragged_dot_general`): their rule, and a product on slices.

The rows of one operand lie in groups, one after another, and each group is multiplied with a matrix
of its own. Rows, columns and what is contracted are loops like those of any product. A slice of the
rows has group sizes of its own, and a slice of the groups has its rows somewhere in the middle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from autopar.passes.graph.primitives import FactorKind
from autopar.passes.primitives.cuts import DimCut, LocalCall, positions, take
from autopar.passes.primitives.factor_rule import DimFactors, FactorRule
from autopar.passes.primitives.own_rules import Loops
from autopar.passes.primitives.shardings import shape_of


class RaggedDims:
    """Where the loops of a grouped product are in its operands, of these ranks."""

    def __init__(self, numbers: lax.RaggedDotDimensionNumbers, left_rank: int, right_rank: int):
        self.numbers, self.left_rank, self.right_rank = numbers, left_rank, right_rank
        contracted, batch = numbers.dot_dimension_numbers
        (self.left_contracted, self.right_contracted), (self.left_batch, self.right_batch) = (
            contracted,
            batch,
        )
        (self.rows,) = numbers.lhs_ragged_dimensions
        self.groups: int | None = next(iter(numbers.rhs_group_dimensions), None)
        self.sums_rows = self.rows in self.left_contracted
        self.right_rows = self.in_right(self.rows) if self.sums_rows else None
        gone = (*self.left_contracted, *self.left_batch)
        self.left_kept = [dim for dim in range(left_rank) if dim not in gone]
        groups = () if self.groups is None else (self.groups,)
        gone = (*self.right_contracted, *self.right_batch, *groups)
        self.right_kept = [dim for dim in range(right_rank) if dim not in gone]
        among = next(
            x for x in (self.left_contracted, self.left_kept, self.left_batch) if self.rows in x
        )
        outer = () if among is self.left_batch else self.left_batch
        # Of the rows, what has groups of its own, if their sizes have several dimensions.
        self.prefix = [*outer, *among[: among.index(self.rows)]]

    def in_right(self, dim: int) -> int:
        """The dimension of the right operand with which one of the left is contracted."""
        return self.right_contracted[self.left_contracted.index(dim)]

    def folded(self, own: Sequence[int]) -> RaggedDims:
        """Once these dimensions and the rows are one, the first; in the right operand as well."""
        if self.rows in self.left_batch or {*own} & {*self.left_batch}:
            raise ValueError("what is a batch has matrices of its own")
        gone = (*own, self.rows)

        def after(dim: int, first: Sequence[int]) -> int:
            return dim + 1 - sum(x < dim for x in first)

        right_gone = [self.in_right(dim) for dim in gone] if self.sums_rows else []
        contracted = [d for d in self.left_contracted if d not in gone]
        left = [after(d, gone) for d in contracted]
        right = [self.in_right(d) for d in contracted]
        if self.sums_rows:
            left, right = [0, *left], [0, *(after(d, right_gone) for d in right)]
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=((left, right), ((), ())),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[] if self.groups is None else [self.groups],
        )
        less = len(own) if self.sums_rows else 0
        return RaggedDims(numbers, self.left_rank - len(own), self.right_rank - less)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> RaggedDims:
        """Of a `ragged_dot_general`."""
        left, right, _ = map(shape_of, eqn.invars)
        return cls(eqn.params["ragged_dot_dimension_numbers"], len(left), len(right))


def ragged_rule(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule | None:
    """The rule of a grouped product; None where its rows are a batch, or groups are shared out."""
    left, right, sizes = map(shape_of, eqn.invars)
    dims = RaggedDims.of(eqn)
    if dims.rows in dims.left_batch or eqn.params["group_offset"] is not None:
        return None
    return ragged_rule_of(dims, left, right, sizes)


def ragged_rule_of(
    dims: RaggedDims, left: Sequence[int], right: Sequence[int], sizes: Sequence[int]
) -> FactorRule:
    """The rule of a grouped product of operands of these shapes.

    Rows that have groups of their own, and such groups, stay whole; what they are of is a loop.
    """
    loops = Loops()
    # Where rows are summed every group has a result; else every row has one, from its group alone.
    own = dims.prefix if len(sizes) > 1 else []
    of_groups: FactorKind = "pass" if dims.sums_rows else "sum"
    groups = loops.new(sizes[-1], "replicated" if own else of_groups)
    left_dims: list[DimFactors] = [()] * len(left)
    right_dims: list[DimFactors] = [()] * len(right)
    kinds: list[tuple[FactorKind, Any, Any]] = [
        ("sum", dims.left_contracted, dims.right_contracted),
        ("pass", dims.left_batch, dims.right_batch),
    ]
    for kind, ours, theirs in kinds:
        for i, j in zip(ours, theirs, strict=True):
            is_whole = own and i == dims.rows
            left_dims[i] = right_dims[j] = loops.new(left[i], "replicated" if is_whole else kind)
    for i in dims.left_kept:
        left_dims[i] = loops.new(left[i], "replicated" if own and i == dims.rows else "pass")
    for j in dims.right_kept:
        right_dims[j] = loops.new(right[j])
    if dims.groups is not None:
        right_dims[dims.groups] = groups
    result = [
        *([groups] if dims.sums_rows else []),
        *(left_dims[i] for i in (*dims.left_batch, *dims.left_kept)),
        *(right_dims[j] for j in dims.right_kept),
    ]
    sizes_dims = [*(left_dims[i] for i in own), loops.new(sizes[-1], "replicated")]
    return loops.rule([left_dims, right_dims, sizes_dims], [result])


def ragged_on_slices(call: LocalCall) -> list[Any]:
    """A grouped product on slices: of its rows, its groups, or what `dot_general` has as well."""
    if len(shape_of(call.eqn.invars[2])) > 1:
        return call.bind()  # slices of what has groups of its own
    dims = RaggedDims.of(call.eqn)
    left, right, sizes = call.operands
    left_cuts, right_cuts, _ = call.operand_cuts
    (result_cuts,) = call.result_cuts
    count = shape_of(call.eqn.invars[2])[0]
    sizes = _sizes_in(sizes, shape_of(call.eqn.invars[0])[dims.rows], left_cuts[dims.rows])
    groups = result_cuts[0] if dims.groups is None else right_cuts[dims.groups]
    if groups is None:
        return _bind(call, left, right, sizes)
    if groups.major != 1:  # runs of groups that do not lie together
        if dims.groups is not None:
            return _bind(call, left, _spread(right, dims.groups, groups, count), sizes)
        (result,) = _bind(call, left, right, sizes)
        return [take(result, (groups, *(None,) * (result.ndim - 1)))]
    # The rows of the groups that are here come first, then those of others, which count as none.
    # Sizes may ask for more rows than there are, which are none either.
    ends = jnp.minimum(jnp.cumsum(sizes), left.shape[dims.rows]).astype(sizes.dtype)
    sizes = _from_ends(ends)
    rest = groups.rest(count)
    first = groups.index * rest
    before = jnp.sum(jnp.where(jnp.arange(count) < first, sizes, 0))
    here = lax.dynamic_slice_in_dim(sizes, first, rest)
    left = jnp.roll(left, -before, dims.rows)
    if dims.right_rows is not None:
        return _bind(call, left, jnp.roll(right, -before, dims.right_rows), here)
    (result,) = _bind(call, left, right, here)
    place = len(dims.left_batch) + dims.left_kept.index(dims.rows)
    return [jnp.roll(result, before, place)]


def _bind(call: LocalCall, *operands: Any) -> list[Any]:
    return dataclasses.replace(call, operands=operands).bind()


def _spread(value: Any, dim: int, cut: DimCut, size: int) -> Any:
    """A slice among zeros."""
    shape, rest = value.shape, cut.rest(size)
    parts = value.reshape(*shape[:dim], cut.major, 1, rest, *shape[dim + 1 :])
    whole = jnp.zeros((*shape[:dim], cut.major, cut.parts, rest, *shape[dim + 1 :]), value.dtype)
    whole = lax.dynamic_update_slice_in_dim(whole, parts, cut.index, dim + 1)
    return whole.reshape(*shape[:dim], size, *shape[dim + 1 :])


def _sizes_in(sizes: Any, num_rows: int, cut: DimCut | None) -> Any:
    """How many rows of every group are in a slice of the rows."""
    if cut is None:
        return sizes
    ends = jnp.cumsum(sizes.astype(jnp.int32))
    here = positions(num_rows, cut, ends.dtype)  # ascending
    until = jnp.searchsorted(here, ends).astype(sizes.dtype)
    return _from_ends(until)


def _from_ends(ends: Any) -> Any:
    """The sizes of groups that end at some rows."""
    return jnp.diff(ends, prepend=jnp.zeros((1,), ends.dtype))
