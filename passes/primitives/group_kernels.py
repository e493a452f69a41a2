"""Grouped products as kernels of ours on NVIDIA's GPUs, whose compiler has none (`group_tiles.py`).

Two kernels in Pallas' language for Triton, as a GPU's thread blocks compute tiles of a product:
rows that meet the matrices of their groups, and the sums over rows that are these matrices'
gradients. A tile has rows of one group, so those of its last tile alone are computed for nothing.
Rows of several parts with groups of their own (`rows by example`) are read from where they are,
and written there. Sums are added in float32, and rows of no group are zero, as `ragged_dot` has it.

(Gale et al., "MegaBlocks", MLSys 2023; Tillet et al., "Triton", MAPL 2019.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from autopar.passes.graph.primitives import BLOCK_PRODUCT
from autopar.passes.primitives.ragged_products import RaggedDims
from autopar.passes.primitives.shardings import shape_of

SHORT = (jnp.bfloat16, jnp.float16)
"""What tensor cores multiply as it is; float32 would be rounded."""

FEWEST = 16
"""The fewest rows, columns or summed elements of a tile: what tensor cores multiply at once."""


class KernelTiles(NamedTuple):
    """How large the tiles of a kernel are at most, and how it runs on a GPU.

    Args:
      rows: of the result's tile.
      columns: of the result's tile.
      depth: how many summed elements are in memory at once.
      warps: of 32 threads each.
      stages: how many tiles of the operands are in memory or on their way there.
      band: how many tiles below each other are computed side by side, and so read the same columns
        from the cache (Tillet et al., section "L2 cache optimizations" of Triton's tutorial).
      rate: of a product of the same size by cuBLAS.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    band: int
    rate: float


KERNEL_TILES = {
    8: KernelTiles(128, 128, 32, 4, 4, 8, 0.9),
    9: KernelTiles(128, 256, 64, 8, 3, 8, 0.75),
}
"""By the major compute capability; of shared memory they take 64 and 144 KiB, where blocks have 99
at least (those of an A10 or L4) and 227. Those for 9 are among the quickest of thirteen that were
tried on one H100: with bands of 8 they multiply at 0.74 to 0.84 of the rate of cuBLAS, with bands
of 1 at 0.63 to 0.78. Those for 8 are assumed, and their rate: tiles that Triton's tutorial of
matrix products tries, which are about as quick as cuBLAS on an A100. `benchmarks/gpu.py --rows
"grouped products"` measures them.
"""


def suits_kernel(eqn: JaxprEqn) -> bool:
    """Whether the kernels compute a grouped product: of short floats, in the usual orders."""
    left, right = (atom.aval.dtype for atom in eqn.invars[:2])
    made = eqn.outvars[0].aval.dtype
    if left != right or left not in SHORT or made not in (*SHORT, jnp.float32):
        return False
    blocks = eqn.primitive.name == BLOCK_PRODUCT
    ranks = [len(shape_of(atom)) - blocks for atom in eqn.invars[:3]]
    dims = RaggedDims(eqn.params["ragged_dot_dimension_numbers"], *ranks[:2])
    if dims.left_batch or eqn.params.get("group_offset") is not None:
        return False
    if ranks[2] > 1:
        dims = dims.folded(dims.prefix)
    if dims.rows != 0 or dims.left_rank != 2:
        return False
    if dims.sums_rows:
        return dims.right_rank == 2 and dims.right_rows == 0
    return dims.right_rank == 3 and dims.groups == 0 and dims.left_contracted == (1,)


def kernel_rows(rows: int, groups: int, tiles: KernelTiles) -> int:
    """The rows of a tile, where so many are in groups."""
    return _fitting(max(rows // groups, 1), tiles.rows)


GROUP, DEPTH, COLUMN = "group", "depth", "column"
Roles = tuple[str, str, str]
"""What each dimension of matrices is, as they lie in memory: their group, what is summed over, or
the columns of the result."""


class _Grid(NamedTuple):
    """How a result is cut into tiles: their sizes, how many there are, and in what order."""

    rows: int
    columns: int
    depth: int
    down: int
    across: int
    band: int

    def place(self, number: Any) -> tuple[Any, Any]:
        """The row and column of a tile: bands of tiles, each column after column."""
        whole = jnp.int32(self.band * self.across)
        first = number // whole * self.band
        high = jnp.minimum(self.down - first, self.band)
        within = number % whole
        return first + within % high, within // high


@dataclass(frozen=True)
class Kernels:
    """Both kernels with tiles of these sizes; `interpret` runs them as programs for CPUs."""

    tiles: KernelTiles
    interpret: bool = False

    def rows(
        self,
        left: Any,
        right: Any,
        sizes: Any,
        index: Any,
        dtype: Any,
        *,
        roles: Roles,
        tile_rows: int,
    ) -> Any:
        """Every row with the matrix of its group: [rows, m], [groups, m, n] -> [rows, n].

        Args:
          left: the rows.
          right: the matrices.
          sizes: of the groups, and last of the rows that are in none, whose results are zero.
          index: where the rows are, in the order of their groups; None: they are in that order.
          dtype: of the result.
          roles: what the dimensions of the matrices are.
          tile_rows: of a tile.
        """
        rows, depth = left.shape
        groups, columns = (right.shape[roles.index(role)] for role in (GROUP, COLUMN))
        group, first, end = _visits(sizes, tile_rows, rows)
        grid = self._grid((tile_rows, group.shape[0]), columns, _fitting(depth, self.tiles.depth))
        has_index = index is not None
        kernel = functools.partial(
            _rows_kernel, grid=grid, groups=groups, roles=roles, has_index=has_index
        )
        operands = (group, first, end, *([index] if has_index else []), left, right)
        result = jax.ShapeDtypeStruct((rows, columns), dtype)
        return self._call(kernel, operands, result, grid.down * grid.across)

    def sums(
        self, left: Any, right: Any, sizes: Any, index: Any, dtype: Any, *, group_place: int = 0
    ) -> Any:
        """Of each group the product of its rows: [rows, m], [rows, n] -> [groups, m, n].

        Args: as those of `rows`, with sizes of the groups alone.
          group_place: which dimension of the result has the groups.
        """
        rows, height = left.shape
        columns = right.shape[1]
        lines = _fitting(height, self.tiles.rows)
        grid = self._grid((lines, -(-height // lines)), columns, self.tiles.depth)
        ends = jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32)), rows)
        starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
        has_index = index is not None
        kernel = functools.partial(
            _sums_kernel, grid=grid, group_place=group_place, has_index=has_index
        )
        operands = (starts, ends, *([index] if has_index else []), left, right)
        shape = [height, columns]
        shape.insert(group_place, sizes.shape[0])
        result = jax.ShapeDtypeStruct(tuple(shape), dtype)
        return self._call(kernel, operands, result, sizes.shape[0] * grid.down * grid.across)

    def _grid(self, rows: tuple[int, int], columns: int, depth: int) -> _Grid:
        """Tiles of so many rows, and so many below each other."""
        width = _fitting(columns, self.tiles.columns)
        return _Grid(rows[0], width, depth, rows[1], -(-columns // width), self.tiles.band)

    def _call(
        self, kernel: Any, operands: Sequence[Any], result: jax.ShapeDtypeStruct, blocks: int
    ) -> Any:
        from jax.experimental import pallas
        from jax.experimental.pallas import triton

        how = triton.CompilerParams(num_warps=self.tiles.warps, num_stages=self.tiles.stages)
        return pallas.pallas_call(
            kernel,
            out_shape=result,
            grid=(blocks,),
            compiler_params=how,
            interpret=self.interpret,
            name="grouped_product",
        )(*operands)


def _fitting(size: int, most: int) -> int:
    """The least power of two that a dimension fits into, at most so many."""
    return max(FEWEST, min(most, 1 << max(size - 1, 0).bit_length()))


def _visits(sizes: Any, tile: int, rows: int) -> tuple[Any, Any, Any]:
    """Of each tile of rows its group, its first row, and the end of the group's rows.

    There are as many as there can be; the others have no row.
    """
    most = rows // tile + sizes.shape[0]
    ends = jnp.cumsum(sizes.astype(jnp.int32))
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    until = jnp.cumsum((sizes.astype(jnp.int32) + tile - 1) // tile)
    number = jnp.arange(most, dtype=jnp.int32)
    group = jnp.sum(number[:, None] >= until[None, :], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, sizes.shape[0] - 1)
    before = jnp.concatenate([jnp.zeros((1,), jnp.int32), until[:-1]])
    return group, starts[group] + (number - before[group]) * tile, ends[group]


def _load(ref: Any, places: tuple[Any, ...], masks: Sequence[Any]) -> Any:
    """Elements of an array; zero where a mask says that there is none."""
    from jax.experimental.pallas import triton

    shape = jnp.broadcast_shapes(*(place.shape for place in places))
    mask = functools.reduce(jnp.logical_and, masks) if masks else None
    if mask is None:
        return triton.load(ref.at[places])
    return triton.load(ref.at[places], mask=jnp.broadcast_to(mask, shape), other=0)


def _down(places: Any) -> Any:
    return places[:, None]


def _inside(places: Any, size: int, tile: int) -> list[Any]:
    """The mask of those that there are, where tiles do not divide a dimension."""
    return [places < size] if size % tile else []


def _rows_kernel(
    group_ref: Any,
    first_ref: Any,
    end_ref: Any,
    *refs: Any,
    grid: _Grid,
    groups: int,
    roles: Roles,
    has_index: bool,
) -> None:
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    *index_ref, left, right, made = refs
    # What is next to each other in memory is read together.
    is_turned = roles.index(COLUMN) < roles.index(DEPTH)
    visit, across = grid.place(pallas.program_id(0))
    group, first, end = group_ref[visit], first_ref[visit], end_ref[visit]
    depth, columns = left.shape[1], made.shape[1]
    row = first + jnp.arange(grid.rows, dtype=jnp.int32)
    is_row = row < end
    if has_index:
        # What is masked has a place of its own, beyond all: it is not written.
        row = jnp.where(is_row, _load(index_ref[0], (row,), [is_row]), made.shape[0] + row)
    column = across * grid.columns + jnp.arange(grid.columns, dtype=jnp.int32)
    known = _inside(column, columns, grid.columns)

    def add(step: Any, total: Any) -> Any:
        place = step * grid.depth + jnp.arange(grid.depth, dtype=jnp.int32)
        inside = _inside(place, depth, grid.depth)
        tile = _load(
            left, (row[:, None], place[None]), [is_row[:, None], *(x[None] for x in inside)]
        )
        if is_turned:
            at = {GROUP: group, COLUMN: _down(column), DEPTH: place[None]}
            masks = [*map(_down, known), *(x[None] for x in inside)]
        else:
            at = {GROUP: group, DEPTH: _down(place), COLUMN: column[None]}
            masks = [*map(_down, inside), *(x[None] for x in known)]
        matrix = _load(right, tuple(at[role] for role in roles), masks)
        return total + triton.dot(tile, matrix, trans_b=is_turned)

    # Rows of no group are after those of the last one.
    is_visited = jnp.logical_and(group < groups, first < end)
    steps = jnp.where(is_visited, jnp.int32(-(-depth // grid.depth)), jnp.int32(0))
    total = lax.fori_loop(0, steps, add, jnp.zeros((grid.rows, grid.columns), jnp.float32))
    mask = functools.reduce(jnp.logical_and, (x[None] for x in known), is_row[:, None])
    triton.store(
        made.at[row[:, None], column[None]],
        total.astype(made.dtype),
        mask=jnp.broadcast_to(mask, total.shape),
    )


def _sums_kernel(
    start_ref: Any,
    end_ref: Any,
    *refs: Any,
    grid: _Grid,
    group_place: int,
    has_index: bool,
) -> None:
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    *index_ref, left, right, made = refs
    number = pallas.program_id(0)
    tiles = jnp.int32(grid.down * grid.across)
    group, (down, across) = number // tiles, grid.place(number % tiles)
    start, end = start_ref[group], end_ref[group]
    line = down * grid.rows + jnp.arange(grid.rows, dtype=jnp.int32)
    column = across * grid.columns + jnp.arange(grid.columns, dtype=jnp.int32)
    lines = _inside(line, left.shape[1], grid.rows)
    columns = _inside(column, right.shape[1], grid.columns)

    def add(step: Any, total: Any) -> Any:
        row = start + step * grid.depth + jnp.arange(grid.depth, dtype=jnp.int32)
        is_row = row < end
        if has_index:
            row = _load(index_ref[0], (row,), [is_row])
        row, mine = row[:, None], is_row[:, None]
        one = _load(left, (row, line[None]), [mine, *(x[None] for x in lines)])
        other = _load(right, (row, column[None]), [mine, *(x[None] for x in columns)])
        return total + triton.dot(one, other, trans_a=True)

    steps = (end - start + (grid.depth - 1)) // grid.depth
    total = lax.fori_loop(0, steps, add, jnp.zeros((grid.rows, grid.columns), jnp.float32))
    masks = [*(x[:, None] for x in lines), *(x[None] for x in columns)]
    at = [line[:, None], column[None]]
    at.insert(group_place, group)
    place = made.at[tuple(at)]
    value = total.astype(made.dtype)
    if masks:
        mask = functools.reduce(jnp.logical_and, masks)
        triton.store(place, value, mask=jnp.broadcast_to(mask, total.shape))
    else:
        triton.store(place, value)
