"""The worst moment of a program whose compiler fuses at any distance, by `compiler_rules`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autopar.passes.sharding.boundary_copies import boundary_copies
from autopar.passes.sharding.compiler_rules import CompilerRules
from autopar.passes.sharding.heap import (
    SIZE,
    TIME,
    beside_results,
    in_order,
    live_bytes,
    lost_bytes,
)
from autopar.passes.sharding.instruction_values import Mesh
from autopar.passes.sharding.moments import Alive, Moments
from autopar.passes.sharding.spmd_program import Block, Loop, ShardedValue

SPARE_BYTES = 5 << 29
"""If fewer would be left of a device's memory, XLA:TPU saves (`compiler_rules`)."""


def fused_peak(
    block: Block,
    mesh: Mesh,
    rules: CompilerRules,
    kept: Collection[ShardedValue],
    memory: int | None = None,
    apart: Collection[ShardedValue] = (),
    results: Collection[ShardedValue] = (),
) -> tuple[int, Alive]:
    """Bytes of a device at the worst moment of a program's block, and what is there.

    Args:
      block: what runs.
      mesh: the logical mesh.
      rules: of the compiler.
      kept: inputs that somebody else reads afterwards.
      memory: bytes of a device, of which the compiler takes less if few would be left; None: many.
      apart: values in memory of their own, which is not counted.
      results: of these, what others may lie in before it is made.
    """
    asked = kept, apart, results
    found = _peak(block, mesh, rules, *asked)
    if memory is None or TIME not in rules.heap_orders:
        return found
    if found[0] + SPARE_BYTES > memory:
        rules = replace(rules, heap_orders=(SIZE,))
        found = min(found, _peak(block, mesh, rules, *asked), key=lambda x: x[0])
    if found[0] > memory:
        saving = [replace(rules, sums_last=False, leaves_products=False)]
        if any(isinstance(x, Loop) for x in block.instructions):
            saving.append(replace(saving[0], loops_compute_again=True))
        for rules in saving:
            at_once, there = _peak(block, mesh, rules, *asked)
            if at_once + found[0] <= 2 * memory:
                return memory, {**there, "left to the end": memory - at_once}
    return found


def _peak(
    block: Block,
    mesh: Mesh,
    rules: CompilerRules,
    kept: Collection[ShardedValue],
    apart: Collection[ShardedValue],
    results: Collection[ShardedValue],
) -> tuple[int, Alive]:
    moments = Moments(block, mesh, rules, kept, apart=apart)
    more = moments.for_gradients()
    if rules.copies_in:
        more["copies in another order"] = boundary_copies(moments.block, mesh, moments.held)
    size, there = moments.worst(more)
    if results:
        left = beside_results(moments.buffers, moments.later(results))
        size, moments.buffers = live_bytes(in_order(left)), left
    if rules.heap_orders:
        lost = lost_bytes(in_order(moments.buffers), rules.heap_orders)
        if lost > 0:
            return size + lost, {**there, "between buffers": lost}
    return size, there
