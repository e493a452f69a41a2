"""In which orders our kernels for grouped products find matrices, and write their gradients.

What is gathered or scattered along another dimension than the first has that one outermost in
memory (`turned_gathers.py`). Products of XLA's read and write any order; a kernel of ours has fixed
ones, and XLA copies what does not lie so: the experts' weights of all layers, before the loop over
them (found by compiling a Qwen3 for eight H100s). So these kernels are told how their matrices lie.
"""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.primitives.group_kernels import suits_kernel
from autopar.passes.primitives.group_tiling import GroupedMeans
from autopar.passes.primitives.ragged_products import RaggedDims
from autopar.passes.sharding.spmd_program import (
    Block,
    Compute,
    Relayout,
    ShardedValue,
    is_literal,
    readers_of,
)
from autopar.passes.sharding.turned_gathers import may_be_turned


def is_kernel(eqn: JaxprEqn, means: GroupedMeans) -> bool:
    """Whether a kernel of ours computes an equation, for which orders are known."""
    is_grouped = eqn.primitive.name == "ragged_dot_general" and means.tiles is not None
    return is_grouped and suits_kernel(eqn)


def read_by_kernels(block: Block, means: GroupedMeans) -> frozenset[ShardedValue]:
    """The matrices that kernels of ours read in a block, some as they passed barriers."""
    found: set[ShardedValue] = set()
    if means.tiles is None:
        return frozenset()
    for instruction in reversed(block.instructions):
        if not isinstance(instruction, Compute):
            continue
        if is_barrier(instruction.eqn):
            pairs = zip(instruction.operands, instruction.results, strict=True)
            found.update(x for x, made in pairs if made in found and not is_literal(x))
        elif is_kernel(instruction.eqn, means) and not RaggedDims.of(instruction.eqn).sums_rows:
            matrices = instruction.operands[1]
            found.update(() if is_literal(matrices) else (matrices,))
    return frozenset(found)


def gathered_for_kernels(block: Block, means: GroupedMeans) -> frozenset[ShardedValue]:
    """The matrices that are gathered in a block for kernels there, and may lie as parts came."""
    read = read_by_kernels(block, means)
    return read & may_be_turned(block) if read else read


def orders_of_sums(block: Block, means: GroupedMeans) -> dict[int, tuple[int, ...]]:
    """By the numbers of a block's instructions that scatter kernels' sums, the order of these."""
    found: dict[int, tuple[int, ...]] = {}
    if means.tiles is None:
        return found
    made: dict[ShardedValue, JaxprEqn] = {}
    for instruction in block.instructions:
        if isinstance(instruction, Compute) and is_kernel(instruction.eqn, means):
            made[instruction.results[0]] = instruction.eqn
    readers = readers_of(block)
    for number, instruction in enumerate(block.instructions):
        if not isinstance(instruction, Relayout) or instruction.source not in made:
            continue
        step = instruction.steps[0]
        sums_rows = RaggedDims.of(made[instruction.source]).sums_rows
        is_across = step.kind == "reduce-scatter" and bool(step.dim)
        if sums_rows and is_across and len(readers[instruction.source]) == 1:
            found[number] = (step.dim, *(dim for dim in range(3) if dim != step.dim))
    return found
