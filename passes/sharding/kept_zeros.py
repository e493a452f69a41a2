"""Zeros that XLA:GPU keeps from the forward pass for the gradient of a pooling.

The gradient of a maximum over windows is a scatter into zeros (`select_and_scatter_expander.cc`). A
ReLU before the pooling compares with zeros of the same shape, which are the same instruction then:
the ReLU's kernel writes them for both, and they stay until the scatter has copied them. With them
in memory it takes no less time to compute the ReLU again than to read it, so it stays too. Found on
a Wide-ResNet, whose first activations are the largest ones; compared with another number than zero,
neither stays, whether windows overlap or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.sharding.heap import HeapBuffer
from autopar.passes.sharding.held_values import HeldValues
from autopar.passes.sharding.layout import local_shape
from autopar.passes.sharding.scopes import aval_shape
from autopar.passes.sharding.spmd_program import (
    Block,
    Compute,
    ShardedValue,
    is_literal,
    local_bytes,
    writes,
)


def kept_zeros(
    block: Block, mesh: Sequence[int], held: HeldValues[ShardedValue]
) -> list[HeapBuffer]:
    """The zeros of a block's gradients of windows, if they are made for something before.

    And what the windows are of, if it were computed again without them.
    """
    first: dict[Any, int] = {}
    found: list[HeapBuffer] = []
    for time, instruction in enumerate(block.instructions):
        if not isinstance(instruction, Compute):
            continue
        name, results = instruction.eqn.primitive.name, writes(instruction)
        if name in ELEMENTWISE and any(map(_is_zero, instruction.operands)):
            for value in results:
                first.setdefault(_kind(value, mesh), time)
        elif name == "select_and_scatter_add" and _kind(results[0], mesh) in first:
            begin = first[_kind(results[0], mesh)]
            zeros = HeapBuffer(local_bytes(results[0], mesh), begin, time)
            found += [zeros] if held.is_held(instruction.operands[-1]) else [zeros, zeros]
    return found


def _is_zero(value: ShardedValue) -> bool:
    return is_literal(value) and not value.atom.val


def _kind(value: ShardedValue, mesh: Sequence[int]) -> Any:
    shape = local_shape(aval_shape(value.atom), value.layout, mesh)
    return tuple(shape), value.atom.aval.dtype
