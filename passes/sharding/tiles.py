"""How many elements a TPU's memory has room for where an array lies: tiles of (8, 128) are whole.

The last of an array's dimensions in memory lies along the lanes of vectors and is filled up to a
multiple of 128, the one before it across them, to 8. Which two dimensions these are is XLA's
choice, and it takes those that leave least empty; what convolutions read and write has its batch
and its features there, whatever that costs; parts of vectors that are put side by side stay along
the lanes. Found by comparing all values of compiled programs with their shapes (libtpu 0.0.42):
arguments take this to 0.1%, most temporaries too, where those of a U-Net of 192 features take a
third more, and images of three colours 21 times as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations

from autopar.passes.sharding.compiler_rules import VECTOR_LANES, is_filter_gradient
from autopar.passes.sharding.layout import local_shape
from autopar.passes.sharding.scopes import aval_shape
from autopar.passes.sharding.spmd_program import (
    Compute,
    Instruction,
    ShardedValue,
    is_literal,
)

VECTOR_ROWS = 8
"""Of a TPU's vectors, across the lanes; of fewer rows, vectors hold the next power of two."""


def lies_across(part: int) -> bool:
    """Whether devices add and gather parts of a matrix's last dimension across TPUs' vectors.

    They do where these are no whole pairs of vectors: XLA orders the dimensions so. Of 16-bit
    numbers some are made to (`CompilerRules.is_scattered_across`).
    """
    return part % (2 * VECTOR_LANES) != 0


def tiled_elements(
    shape: Sequence[int], innermost: Sequence[int] | None = None, keeps_lanes: bool = False
) -> int:
    """The elements of an array's tiles.

    Args:
      shape: of the array.
      innermost: the two dimensions that lie in vectors; None: the compiler chooses.
      keeps_lanes: the last dimension lies along the lanes, where the compiler would choose.

    >>> tiled_elements((32, 64, 64, 192)) == 32 * 64 * 64 * 256
    True
    >>> tiled_elements((8, 224, 224, 3), (0, 3)) == 128 * 224 * 224 * 4
    True
    >>> tiled_elements((768, 8, 96))
    589824
    >>> tiled_elements((8, 2048, 4, 64), keeps_lanes=True) == 8 * 2048 * 4 * 128
    True
    """
    total = math.prod(shape)
    if len(shape) < 2 or not total:
        return total
    places = range(len(shape)) if innermost is None else innermost
    pairs = [
        (lanes, rows)
        for lanes, rows in permutations(places, 2)
        if lanes == len(shape) - 1 or innermost is not None or not keeps_lanes
    ]
    sizes = ((shape[lanes], shape[rows]) for lanes, rows in pairs)
    return min(total // (x * y) * _filled(x, VECTOR_LANES) * _rows(y) for x, y in sizes)


def _filled(size: int, parts: int) -> int:
    return -(-size // parts) * parts


def _rows(size: int) -> int:
    return 1 << (size - 1).bit_length() if size < VECTOR_ROWS else _filled(size, VECTOR_ROWS)


def convolved_shapes(
    instructions: Iterable[Instruction], mesh: Sequence[int]
) -> Mapping[tuple[int, ...], tuple[int, int]]:
    """Of the shapes of what convolutions read and write: the dimensions of batch and features."""
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    for instruction in instructions:
        if not isinstance(instruction, Compute):
            continue
        eqn = instruction.eqn
        if eqn.primitive.name != "conv_general_dilated" or eqn.params["batch_group_count"] > 1:
            continue
        if is_filter_gradient(eqn):
            continue
        order = eqn.params["dimension_numbers"]
        operand, result = instruction.operands[0], instruction.results[0]
        for value, (batch, features, *_) in ((operand, order.lhs_spec), (result, order.out_spec)):
            shape = local_shape(aval_shape(value.atom), value.layout, mesh)
            found[shape] = (batch, features)
    return found


def parts_of_vectors(instructions: Iterable[Instruction]) -> Iterator[ShardedValue]:
    """What is put side by side along the lanes and fills them in part."""
    for instruction in instructions:
        if not isinstance(instruction, Compute) or instruction.eqn.primitive.name != "concatenate":
            continue
        eqn = instruction.eqn
        is_last = eqn.params["dimension"] == eqn.outvars[0].aval.ndim - 1
        if is_last and any(v.aval.shape[-1] % VECTOR_LANES for v in eqn.invars):
            yield from (v for v in instruction.operands if not is_literal(v))
