"""What a kernel needs beside its operands and results, by `compiler_rules`."""

from __future__ import annotations

import math

from autopar.passes.primitives.group_tiling import GROUPED, has_parts, tiling_of
from autopar.passes.sharding.buffer_sizes import BufferSizes
from autopar.passes.sharding.compiler_rules import CompilerRules, is_filter_gradient
from autopar.passes.sharding.spmd_program import Compute

INDEX_BYTES = 4  # of where a maximum was found, along each dimension


def workspace(instruction: Compute, size: BufferSizes, rules: CompilerRules) -> tuple[int, str]:
    """Bytes that an equation's kernel works with, and for what; 0: none."""
    eqn = instruction.eqn
    if is_filter_gradient(eqn):
        found = sum(map(size, instruction.results))
        return found, "the gradient of a filter in cuDNN's order"
    if eqn.primitive.name == "select_and_scatter_add" and rules.expands_windows:
        source = size.shape(instruction.operands[0])
        return math.prod(source) * len(source) * INDEX_BYTES, "places of a pooling's maxima"
    if eqn.primitive.name in GROUPED:
        values = *instruction.operands[:2], *instruction.results
        tiling = tiling_of(eqn, rules.grouped, [*map(size.shape, values)])
        if tiling is None and rules.grouped.has_kernel and has_parts(eqn):
            rows = (instruction.operands[0], *instruction.results)
            return sum(map(size, rows)), "rows in the order of their groups"
        return tiling.held_bytes if tiling else 0, "a tile of a grouped product"
    return 0, ""
