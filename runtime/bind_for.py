"""How an equation is bound on a device's slices: as it is, or as its compiler does best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.passes.graph.primitives import MATRIX_FUNCTIONS
from autopar.passes.primitives.cuts import bind_with
from autopar.passes.primitives.group_tiles import product_by_parts, product_in_tiles
from autopar.passes.primitives.group_tiling import GROUPED, has_parts, tiling_of
from autopar.passes.sharding.compiler_rules import CPU, CompilerRules
from autopar.runtime.host_callbacks import CALLBACKS, HostCallbacks
from autopar.runtime.matrices import one_by_one
from autopar.runtime.slice_starts import within_bounds


def bind_for(
    rules: CompilerRules,
    callbacks: HostCallbacks,
    eqn: Any,
    operands: Sequence[Any],
    changes: Mapping[str, Any],
    order: tuple[int, ...] = (0, 1, 2),
) -> list[Any]:
    """Results of an equation on what a device has of its operands.

    Args:
      rules: those of the compiler.
      callbacks: call the host.
      eqn: the equation.
      operands: what it is given here.
      changes: params that are others here.
      order: that of the matrices which a kernel of ours reads or writes, as they lie in memory.
    """
    if eqn.primitive.name in GROUPED and not changes:
        if tiling_of(eqn, rules.grouped) is not None:
            return [product_in_tiles(eqn, operands, rules.grouped, order)]
        if rules.grouped.has_kernel and has_parts(eqn):
            return [product_by_parts(eqn, operands)]
    if eqn.primitive.name in CALLBACKS:
        return callbacks.called(eqn, operands)
    if rules.backend == CPU and eqn.primitive.name in MATRIX_FUNCTIONS:
        return one_by_one(eqn, operands, changes)
    return bind_with(eqn, within_bounds(eqn, operands, changes), changes)
