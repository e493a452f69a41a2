"""Which sums over devices XLA:TPU makes of padded parts, and which of these run at once.

A reduce-scatter across the last dimension runs in pieces of whole rows of tiles, as few as there
can be of at most `PIECE_TILES`. Where these would not be of one size, XLA makes an all-reduce of
parts that are padded until they are (`reduce-scatter-decomposer`), and permutes then move what lies
in another device's part. Read from the reduce-scatters of Transformers compiled for eight chips of
a v5e, some forty sizes of parts (libtpu 0.0.42): it says which stay and how large padded ones are.
Not so of sums over four of the eight, which may be of other pieces.

The scheduler goes backwards, and puts off the beginning of a permute before which nothing is
gathered, unless another one is waiting: `TOGETHER` are on their way. So the first such sums run
right after their products, not at the end (`late_sums.py`); those of the largest arrays, which are
updated last, only where there are no others. Found in the schedules of GPTs of 350M to 2.6B by
`zero2`, planned 14 to 48% too large: the logits of a GPT-350M do not stay for the gradient of the
table, those of GPTs of 125M and 760M do, whose reduce-scatter has pieces of one size.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.passes.sharding.compiler_rules import VECTOR_LANES
from autopar.passes.sharding.layout import local_shape, num_parts
from autopar.passes.sharding.run_order import is_gradient_sum
from autopar.passes.sharding.scopes import aval_shape
from autopar.passes.sharding.spmd_program import Block, Relayout, local_bytes
from autopar.passes.sharding.tiles import VECTOR_ROWS, lies_across
from autopar.passes.sharding.turned_sums import turned_sums

PIECE_TILES = 307
"""Of the largest piece: 1.2 MiB in float32. From 304 to 307 say the same of all that was read."""

TOGETHER = 2
"""Permutes that are on their way at a time."""


def has_uneven_pieces(shape: Sequence[int], dim: int, parts: int) -> bool:
    """Whether a reduce-scatter of an array along a dimension becomes an all-reduce.

    >>> [has_uneven_pieces((51200, width), 0, 8) for width in (768, 1024, 1536, 2048)]
    [False, True, False, True]
    >>> has_uneven_pieces((1024, 4096), 1, 8), has_uneven_pieces((1280, 5120), 1, 8)
    (False, True)
    """
    if len(shape) != 2 or not all(shape) or shape[dim] < parts:
        return False
    part, other = shape[dim] // parts, shape[1 - dim]
    if dim == 1 and not lies_across(part):
        return False
    rows, lanes = -(-part // VECTOR_ROWS), -(-other // VECTOR_LANES)
    pieces = -(-rows // max(PIECE_TILES // lanes, 1))
    return rows % pieces != 0


def early_sums(block: Block, mesh: Sequence[int], depths: Sequence[int]) -> set[int]:
    """The numbers of a block's sums that run as soon as they can.

    Args:
      block: the instructions.
      mesh: the logical mesh.
      depths: by instruction, for how many gathers and loops it waits.
    """
    orders = turned_sums(block)
    uneven: list[tuple[bool, int]] = []
    sums = [x for x in block.instructions if isinstance(x, Relayout) and is_gradient_sum(x)]
    largest = max((local_bytes(x.source, mesh) for x in sums), default=0)
    for number, (instruction, depth) in enumerate(zip(block.instructions, depths, strict=True)):
        if depth or not isinstance(instruction, Relayout) or not is_gradient_sum(instruction):
            continue
        source = instruction.source
        shape = local_shape(aval_shape(source.atom), source.layout, mesh)
        order = orders.get(number, tuple(range(len(shape))))
        turned = [shape[dim] for dim in order]
        if any(
            has_uneven_pieces(turned, order.index(step.dim), num_parts(step.axes, mesh))
            for step in instruction.steps
            if step.kind == "reduce-scatter"
        ):
            uneven.append((local_bytes(source, mesh) == largest, number))
    return {number for _, number in sorted(uneven)[:TOGETHER]}
