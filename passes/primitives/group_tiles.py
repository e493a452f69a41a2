"""Grouped products in tiles of rows, where a compiler has no kernel for them.

XLA:TPU (libtpu 0.0.42) has one for rows that meet the matrices of their groups, none for the sums
over rows that are these matrices' gradients, nor for sizes of several dimensions; XLA:GPU and
XLA:CPU (jax 0.10 and 0.11) have none. (GPUs have ours, for short floats: `group_kernels.py`.)
They write the rows once for each group, with zeros where they are in another, and multiply them
all: with 8 experts 8 times the operations, and 8 copies of the activations: found by compiling for
an H100 and a v5e. Here a loop visits each group's tiles of rows, as the kernels of MegaBlocks (Gale
et al., MLSys '23) do: a tile in which groups meet is visited for each of them, and of its rows
those of the group count. Tiles have about as many rows as groups have, so at most twice the
operations are done where these are many (`tile_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from autopar.passes.graph.primitives import BLOCK_PRODUCT
from autopar.passes.primitives.group_kernels import (
    COLUMN,
    DEPTH,
    GROUP,
    Kernels,
    kernel_rows,
    suits_kernel,
)
from autopar.passes.primitives.group_tiling import LOOPS, GroupedMeans, tile_rows
from autopar.passes.primitives.ragged_products import RaggedDims
from autopar.passes.primitives.shardings import shape_of


def product_in_tiles(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    means: GroupedMeans = LOOPS,
    order: Sequence[int] = (0, 1, 2),
    tile: int | None = None,
) -> Any:
    """What an equation with a `tiling_of` its own computes of operands that may be cut.

    Args:
      eqn: a grouped product, or one in blocks.
      operands: rows, matrices (or rows), and the sizes of the groups that are here.
      means: our kernels, or none.
      order: in which one of ours reads the dimensions of matrices, or writes those of sums.
      tile: its rows; as many as suit the operands.
    """
    kernels = None
    if means.tiles is not None and suits_kernel(eqn):
        kernels = OrderedKernels(Kernels(means.tiles, means.interpret), tuple(order))
    if eqn.primitive.name != BLOCK_PRODUCT:
        return _product(eqn, shape_of(eqn.invars[2])[-1], operands, tile, kernels)
    groups = math.prod(shape_of(eqn.invars[2]))
    blocks = zip(*operands, strict=True)
    return jnp.stack([_product(eqn, groups, block, tile, kernels) for block in blocks])


def product_by_parts(eqn: JaxprEqn, operands: Sequence[Any]) -> Any:
    """A grouped product by a compiler's kernel, of rows with groups of their own.

    The rows of all parts are put in the order of groups, and back.

    Args:
      eqn: whose rows meet matrices, with sizes of several dimensions.
      operands: rows, matrices, and sizes, which may be cut.
    """
    left, right, sizes = operands
    dims = RaggedDims.of(eqn)
    own = dims.prefix
    index, place, sizes = _by_group(sizes.reshape(-1, sizes.shape[-1]), left.shape[dims.rows])
    rows = jnp.take(_folded(left, (*own, dims.rows)), index, axis=0, mode="clip")
    kept = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
    made = lax.ragged_dot_general(rows, right, sizes, dims.folded(own).numbers, **kept)
    made = jnp.take(made, place, axis=0, mode="fill", fill_value=0)
    first = (*own, dims.rows)
    shape = [left.shape[dim] for dim in first]
    return _as_kept(made.reshape(*shape, *made.shape[1:]), dims, first)


def _as_kept(made: Any, dims: RaggedDims, first: Sequence[int]) -> Any:
    """A result that has these dimensions of the left operand first, in the usual order."""
    kept = [*first, *(dim for dim in dims.left_kept if dim not in first)]
    places = [kept.index(dim) for dim in dims.left_kept]
    return jnp.transpose(made, (*places, *range(len(kept), made.ndim)))


def _product(
    eqn: JaxprEqn,
    groups: int,
    operands: Sequence[Any],
    tile: int | None,
    kernels: OrderedKernels | None,
) -> Any:
    """Of groups that may be a part of so many."""
    left, right, sizes = operands
    dims = RaggedDims(eqn.params["ragged_dot_dimension_numbers"], left.ndim, right.ndim)
    rows, parts = left.shape[dims.rows], math.prod(sizes.shape[:-1])
    if kernels is not None:
        tile = kernel_rows(parts * rows, groups, kernels.kernels.tiles)
        return _by_kernel(eqn, dims, operands, kernels, tile)
    tile = min(tile or tile_rows(parts * rows, groups, dims.sums_rows), parts * rows)
    is_part = sizes.shape[-1] < groups
    if sizes.ndim == 1:
        visits = _Visits(sizes, rows, tile, is_part)
        return (_sums if dims.sums_rows else _rows)(eqn, dims, visits, left, right)
    # Dimensions that have groups of their own become one with the rows.
    own = dims.prefix
    sizes = sizes.reshape(-1, sizes.shape[-1])
    index, _, sizes = _by_group(sizes, rows)
    visits = _Visits(sizes, parts * rows, tile, is_part, index)
    left = _folded(left, (*own, dims.rows))
    if dims.sums_rows:
        right = _folded(right, [dims.in_right(dim) for dim in (*own, dims.rows)])
        return _sums(eqn, dims.folded(own), visits, left, right)
    made = _rows(eqn, dims.folded(own), visits, left, right)
    first = (*own, dims.rows)
    shape = [operands[0].shape[dim] for dim in first]
    return _as_kept(made.reshape(*shape, *made.shape[1:]), dims, first)


class OrderedKernels(NamedTuple):
    """Our kernels, and the order of the dimensions of matrices in memory."""

    kernels: Kernels
    order: tuple[int, ...]


def _by_kernel(
    eqn: JaxprEqn, dims: RaggedDims, operands: Sequence[Any], ordered: OrderedKernels, tile: int
) -> Any:
    """The same by a kernel of ours."""
    left, right, sizes = operands
    dtype, own, index = eqn.outvars[0].aval.dtype, dims.prefix if sizes.ndim > 1 else [], None
    rows, shape = left.shape[dims.rows], [left.shape[dim] for dim in (*dims.prefix, dims.rows)]
    left = _folded(left, (*own, dims.rows))
    if dims.sums_rows:
        right = _folded(right, [dims.in_right(dim) for dim in (*own, dims.rows)])
    else:
        # What is in no group comes last.
        ends = jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32), axis=-1), rows)
        ends = jnp.concatenate([ends, jnp.full((*ends.shape[:-1], 1), rows, jnp.int32)], axis=-1)
        sizes = jnp.diff(ends, axis=-1, prepend=jnp.zeros((*ends.shape[:-1], 1), jnp.int32))
    if own:
        index, _, sizes = _by_group(sizes.reshape(-1, sizes.shape[-1]), rows)
    kernels, order = ordered
    if dims.sums_rows:
        if order.index(2) < order.index(1):  # the product of both in the other order
            left, right = right, left
        made = kernels.sums(left, right, sizes, index, dtype, group_place=order.index(0))
        return lax.transpose(made, [*map(order.index, range(3))])
    names = (GROUP, DEPTH, COLUMN) if dims.right_contracted[0] == 1 else (GROUP, COLUMN, DEPTH)
    a, b, c = order
    right = lax.transpose(right, order)
    roles = (names[a], names[b], names[c])
    made = kernels.rows(left, right, sizes, index, dtype, roles=roles, tile_rows=tile)
    if not own:
        return made
    return _as_kept(made.reshape(*shape, *made.shape[1:]), dims, (*own, dims.rows))


def _by_group(sizes: Any, rows: int) -> tuple[Any, Any, Any]:
    """The rows of all parts in the order of their groups, each one's place, and groups' sizes.

    Rows that are in no group have a place behind all, and are not among them.

    Args:
      sizes: of the groups of each part, [parts, groups].
      rows: of each part.
    """
    parts, groups = sizes.shape
    ends = jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32), axis=1), rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
    sizes = ends - starts
    before = jnp.cumsum(sizes, axis=0) - sizes
    total = jnp.sum(sizes, axis=0)
    offset = jnp.cumsum(total) - total + before - starts  # of a row's place, by part and group
    row = jnp.arange(rows, dtype=jnp.int32)
    group = jnp.sum(row[None, :, None] >= ends[:, None, :], axis=2, dtype=jnp.int32)
    place = row + jnp.take_along_axis(offset, jnp.minimum(group, groups - 1), axis=1)
    place = jnp.where(group < groups, place, parts * rows).reshape(-1)
    count = jnp.arange(parts * rows, dtype=jnp.int32)
    return jnp.zeros_like(count).at[place].set(count, mode="drop"), place, total


def _folded(value: Any, dims: Sequence[int]) -> Any:
    """With these dimensions as one, the first."""
    value = jnp.moveaxis(value, dims, range(len(dims)))
    return value.reshape(-1, *value.shape[len(dims) :])


class _Visits:
    """The tiles of each group, in order: the `number`th visit is of a group and a tile.

    Args:
      sizes: of the groups, [groups].
      rows: how many there are.
      tile: its rows.
      is_part: rows of groups that are not here are.
      index: where the rows are, in the order of their groups; None: they are in that order.
    """

    def __init__(self, sizes: Any, rows: int, tile: int, is_part: bool, index: Any = None):
        self.rows, self.tile, self.index = rows, tile, index
        (groups,) = sizes.shape
        most = -(-rows // tile) + groups - 1
        self.ends = jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32)), rows)
        self.starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), self.ends[:-1]])
        first = self.starts // tile
        tiles = jnp.where(self.ends > self.starts, (self.ends - 1) // tile - first + 1, 0)
        until = jnp.cumsum(tiles)
        number = jnp.arange(most, dtype=jnp.int32)
        after = jnp.sum(number[:, None] >= until[None, :], axis=1, dtype=jnp.int32)
        self.group = jnp.minimum(after, groups - 1)
        before = number - (until - tiles)[self.group]
        self.at = (first[self.group] + before) * tile
        self.is_first = before == 0
        # Where rows of others are here as well, they are not visited.
        self.trips = until[-1] if is_part else most

    def place(self, number: Any) -> tuple[Any, Any, Any]:
        """Group and first row of a visit, and which of the tile's rows are the group's."""
        group, at = self.group[number], self.at[number]
        start = jnp.clip(at, 0, self.rows - self.tile)  # the last tile begins earlier
        row = start + jnp.arange(self.tile, dtype=jnp.int32)
        mine = (row >= jnp.maximum(at, self.starts[group])) & (row < self.ends[group])
        return group, start, mine

    def read(self, value: Any, start: Any, dim: int) -> Any:
        """A tile of a value whose rows are along a dimension."""
        if self.index is None:
            return lax.dynamic_slice_in_dim(value, start, self.tile, dim)
        rows = lax.dynamic_slice_in_dim(self.index, start, self.tile)
        return jnp.take(value, rows, axis=dim, mode="clip")

    def write(self, value: Any, tile: Any, start: Any, mine: Any, dim: int) -> Any:
        """A value with these rows of a tile."""
        if self.index is None:
            there = lax.dynamic_slice_in_dim(value, start, self.tile, dim)
            new = jnp.where(_along(mine, dim, value.ndim), tile, there)
            return lax.dynamic_update_slice_in_dim(value, new, start, dim)
        rows = lax.dynamic_slice_in_dim(self.index, start, self.tile)
        nowhere = self.rows + jnp.arange(self.tile, dtype=rows.dtype)
        return value.at[jnp.where(mine, rows, nowhere)].set(tile, mode="drop", unique_indices=True)


def _rows(eqn: JaxprEqn, dims: RaggedDims, visits: _Visits, left: Any, right: Any) -> Any:
    """Every row with the matrix of its group."""
    groups, dtype = dims.groups, eqn.outvars[0].aval.dtype
    assert groups is not None
    place = len(dims.left_batch) + dims.left_kept.index(dims.rows)

    def in_matrix(numbers: Sequence[int]) -> list[int]:
        return [dim - (dim > groups) for dim in numbers]

    numbers = (
        (dims.left_contracted, in_matrix(dims.right_contracted)),
        (dims.left_batch, in_matrix(dims.right_batch)),
    )

    def visit(number: Any, made: Any) -> Any:
        group, start, mine = visits.place(number)
        tile = visits.read(left, start, dims.rows)
        matrix = lax.dynamic_index_in_dim(right, group, groups, keepdims=False)
        product = _multiply(eqn, tile, matrix, numbers, eqn.params["preferred_element_type"])
        return visits.write(made, product.astype(dtype), start, mine, place)

    made = _zeros(_kept_shape(dims, left, right), dtype, right)
    return lax.fori_loop(0, visits.trips, visit, made)


def _sums(eqn: JaxprEqn, dims: RaggedDims, visits: _Visits, left: Any, right: Any) -> Any:
    """Of each group the product of its rows with its rows of the other operand.

    They are added in float32 where the result has fewer bits, as one product adds them.
    """
    dtype, right_rows = eqn.outvars[0].aval.dtype, dims.right_rows
    assert right_rows is not None
    is_short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    wide = jnp.dtype(jnp.float32) if is_short else dtype
    numbers = (
        (dims.left_contracted, dims.right_contracted),
        (dims.left_batch, dims.right_batch),
    )

    def own_rows(value: Any, start: Any, mine: Any, dim: int) -> Any:
        tile = visits.read(value, start, dim)
        return jnp.where(_along(mine, dim, value.ndim), tile, jnp.zeros((), value.dtype))

    def visit(number: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        added, made = carry
        group, start, mine = visits.place(number)
        tile = own_rows(left, start, mine, dims.rows)
        other = own_rows(right, start, mine, right_rows)
        before = jnp.where(visits.is_first[number], jnp.zeros((), wide), added)
        added = before + _multiply(eqn, tile, other, numbers, wide)
        new = added.astype(dtype)[None]
        return added, lax.dynamic_update_slice_in_dim(made, new, group, 0)

    shape = _kept_shape(dims, left, right)
    groups = visits.ends.shape[0]
    start = _zeros(shape, wide, right), _zeros((groups, *shape), dtype, right)
    return lax.fori_loop(0, visits.trips, visit, start)[1]


def _zeros(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """Zeros that XLA takes for no constant.

    Those that loops begin with would be one for all loops, filled when the first needs it, and
    copied by the others: 3.5 GiB in a Mixtral 8x7B of 131,072 rows on each device (its HLO).
    """
    bits = like.dtype.itemsize * 8
    if not jnp.issubdtype(like.dtype, jnp.floating) or like.dtype.itemsize not in (2, 4, 8):
        return jnp.zeros(shape, dtype)
    first = lax.bitcast_convert_type(like[(0,) * like.ndim], jnp.dtype(f"uint{bits}"))
    return jnp.broadcast_to((first == first + 1).astype(dtype), shape)


def _multiply(eqn: JaxprEqn, left: Any, right: Any, numbers: Any, dtype: Any) -> jax.Array:
    return lax.dot_general(
        left, right, numbers, precision=eqn.params["precision"], preferred_element_type=dtype
    )


def _kept_shape(dims: RaggedDims, left: Any, right: Any) -> tuple[int, ...]:
    kept = [left.shape[dim] for dim in (*dims.left_batch, *dims.left_kept)]
    return (*kept, *(right.shape[dim] for dim in dims.right_kept))


def _along(rows: Any, dim: int, ndim: int) -> Any:
    """A vector along a dimension of so many."""
    return rows.reshape([-1 if d == dim else 1 for d in range(ndim)])
