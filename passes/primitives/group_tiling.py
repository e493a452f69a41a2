"""How a device computes a grouped product, and what it takes beside the operations.

By a kernel of the compiler, by one of ours (`group_kernels.py`), or by a loop (`group_tiles.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from autopar.passes.graph.primitives import BLOCK_PRODUCT
from autopar.passes.primitives.group_kernels import KernelTiles, kernel_rows, suits_kernel
from autopar.passes.primitives.ragged_products import RaggedDims
from autopar.passes.primitives.shardings import shape_of

GROUPED = frozenset({"ragged_dot_general", BLOCK_PRODUCT})

ROWS_BESIDE = 512
"""Rows of a tile that take as long as copying the group's matrix: three passes over 2 bytes an
element, 2 operations an element and row, on a GPU with 200 to 300 operations a byte (V100 to H200).
"""
ROWS_BESIDE_SUMS = 2048
"""The same for adding to such a matrix in float32."""
FEWEST_ROWS = 128
"""Of a tile: what keeps a GPU's tensor cores busy with weights of usual sizes."""
KERNELS_OF_VISIT = 5
"""A tile is cut out, and its matrix; they are multiplied; rows are written; the loop counts."""
KERNELS_OF_SUM = 7
"""Which rows are a group's; both tiles; they are multiplied, added to the others, written; the loop
counts. Both as XLA:GPU has them."""
MOST_ROWS = 4096
"""Of a tile: more make a product no quicker, and are more that groups share."""

KERNELS_BESIDE = 4
"""Of ours: the product itself; the groups' ends, and the tiles' groups and rows, in three."""
KERNELS_OF_PARTS = 4
"""For rows with groups of their own: their places, in the order of the groups."""
INDEX_BYTES = 4
"""Of a row's number."""


class GroupedMeans(NamedTuple):
    """What there is for grouped products: else a loop.

    Args:
      has_kernel: the compiler has one for rows that meet matrices.
      tiles: those of our kernels; None: they do not run there.
      interpret: our kernels run as programs for CPUs, to try them.
    """

    has_kernel: bool = False
    tiles: KernelTiles | None = None
    interpret: bool = False


LOOPS = GroupedMeans()


class Tiling(NamedTuple):
    """How a device computes a grouped product.

    Args:
      rows: those of a tile.
      kernels: for its tiles, at most, if as many rows are here as in the other groups' places.
      repeats: how many times the operations are done of which the product consists.
      held_bytes: beside operands and result.
      moved_bytes: read and written in memory beside them.
    """

    rows: int
    kernels: int
    repeats: float
    held_bytes: int
    moved_bytes: int


def tiling_of(
    eqn: JaxprEqn,
    means: GroupedMeans,
    shapes: Sequence[Sequence[int]] | None = None,
    parts: int = 1,
) -> Tiling | None:
    """Of a grouped product, or one in blocks; None: that is not how it is computed.

    Args:
      eqn: any equation.
      means: what there is for it.
      shapes: of a device's parts of both operands and of the result; whole ones.
      parts: in which rows are cut beside that, or blocks, or what has groups of its own.
    """
    if eqn.primitive.name not in GROUPED or eqn.params.get("group_offset") is not None:
        return None
    *whole, sizes = (shape_of(atom) for atom in eqn.invars)
    left, right, result = shapes or (*whole, shape_of(eqn.outvars[0]))
    groups = sizes[-1]
    if eqn.primitive.name == BLOCK_PRODUCT:
        left, right, result = left[1:], right[1:], result[1:]
        groups, sizes, parts = math.prod(sizes), sizes[1:], 1
    dims = RaggedDims(eqn.params["ragged_dot_dimension_numbers"], len(left), len(right))
    own = dims.prefix if len(sizes) > 1 else []
    if dims.rows in dims.left_batch or 0 in (groups, *left, *right):
        return None
    if (means.has_kernel and not dims.sums_rows) or {*own} & {*dims.left_batch}:
        return None
    all_rows = math.prod(left[dim] for dim in (*own, dims.rows))
    rows = max(all_rows // parts, 1)
    here = result[0] if dims.groups is None else right[dims.groups]
    if means.tiles is not None and suits_kernel(eqn):
        return _kernel_tiling(means.tiles, dims.sums_rows, rows, groups, here, bool(own))
    tile = tile_rows(rows, groups, dims.sums_rows)
    expected = max(rows * here // groups, 1)
    visits = -(-expected // tile) + here - 1
    numbers = [atom.aval.dtype.itemsize for atom in (*eqn.invars[:2], *eqn.outvars)]
    one, other, made = (
        math.prod(shape) * size for shape, size in zip((left, right, result), numbers, strict=True)
    )
    one = one // all_rows * tile
    if dims.sums_rows:
        other, matrix = other // all_rows * tile, made // here
        wide = matrix * max(4 // numbers[2], 1)
        held, moved = one + other + 2 * wide, 3 * (one + other) + 4 * wide + matrix
    else:
        matrix, made = other // here, made // all_rows * tile
        held, moved = one + matrix + made, 3 * (one + matrix) + 4 * made
    kernels = visits * (KERNELS_OF_SUM if dims.sums_rows else KERNELS_OF_VISIT)
    return Tiling(tile, kernels, visits * tile / expected, held, visits * moved)


def _kernel_tiling(
    tiles: KernelTiles, sums_rows: bool, rows: int, groups: int, here: int, has_parts: bool
) -> Tiling:
    """That of a kernel of ours; only the last tile of a group has rows that are none."""
    expected = max(rows * here // groups, 1)
    tile = tiles.depth if sums_rows else kernel_rows(rows, groups, tiles)
    visits = expected / tile + here / 2
    kernels = KERNELS_BESIDE + (KERNELS_OF_PARTS if has_parts else 0)
    held = INDEX_BYTES * (3 * (rows // tile + here) + (2 * rows if has_parts else 0))
    return Tiling(tile, kernels, max(visits * tile / expected, 1) / tiles.rate, held, 0)


def row_dims(eqn: JaxprEqn) -> tuple[int, ...]:
    """The dimensions of a grouped product's left operand in which its rows are."""
    left, right, sizes = (len(shape_of(atom)) for atom in eqn.invars[:3])
    blocks = eqn.primitive.name == BLOCK_PRODUCT
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    dims = RaggedDims(numbers, left - blocks, right - blocks)
    own = dims.prefix if sizes - blocks > 1 else []
    return tuple(dim + blocks for dim in (*own, dims.rows))


def tile_rows(rows: int, groups: int, sums_rows: bool) -> int:
    """The rows of a tile: a power of two near those with which a product takes least.

    With tiles of t rows, so many visits take rows / t + groups of them, each for t rows and for
    what it moves beside them.

    >>> tile_rows(16384, 8, False), tile_rows(65536, 8, False), tile_rows(49152, 64, False)
    (1024, 2048, 512)
    """
    beside = ROWS_BESIDE_SUMS if sums_rows else ROWS_BESIDE
    best = round(math.log2(rows * beside / groups) / 2)
    return min(max(2**best, FEWEST_ROWS), MOST_ROWS, rows)


def has_parts(eqn: JaxprEqn) -> bool:
    """Whether rows of a grouped product that meet matrices have parts with groups of their own."""
    if eqn.primitive.name != "ragged_dot_general" or len(shape_of(eqn.invars[2])) == 1:
        return False
    dims = RaggedDims.of(eqn)
    return dims.rows in dims.left_kept and not dims.left_batch
