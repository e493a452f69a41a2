"""Zeros that XLA:GPU keeps from the forward pass for the gradient of a pooling.

The gradient of a maximum over windows is a scatter into zeros (`select_and_scatter_expander.cc`). A
ReLU before the pooling compares with zeros of the same shape, which are the same instruction then:
its kernel writes them for both, and they stay until the scatter has copied them. With them in
memory it takes no less time to compute what is pooled again than to read it, so it stays too. Found
on a Wide-ResNet, whose first activations are the largest ones, and with single layers: so it is for
`max(x, 0)`, `where(x > 0, x, 0)` and a leaky ReLU, whether windows overlap or not. Nothing stays
where the other number is not zero, or where other windows read the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from autopar.passes.graph.primitives import WINDOWS
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

COMPARES = frozenset(("ge", "gt", "le", "lt", "max", "min"))
"""What a ReLU is made of."""


def kept_zeros(
    block: Block, mesh: Sequence[int], held: HeldValues[ShardedValue]
) -> list[HeapBuffer]:
    """The zeros of a block's gradients of windows, if something before compares with them.

    And what the windows are of, if it were computed again without them.
    """
    compared: dict[Any, int] = {}  # since when there are zeros of a kind
    made: dict[ShardedValue, int] = {}
    pooled: Counter[ShardedValue] = Counter()
    kept: dict[Any, HeapBuffer] = {}
    for time, instruction in enumerate(block.instructions):
        made.update(dict.fromkeys(writes(instruction), time))
        if not isinstance(instruction, Compute):
            continue
        name, operands = instruction.eqn.primitive.name, instruction.operands
        if name == "select_and_scatter_add":
            windowed = operands[-1]
            kind = _kind(windowed, mesh)
            if kind not in compared or pooled[windowed] > 1:
                continue
            size = local_bytes(windowed, mesh)
            kept[kind] = HeapBuffer(size, compared[kind], time)
            if not held.is_held(windowed) and windowed in made:
                kept[windowed] = HeapBuffer(size, made[windowed], time)
        elif name in WINDOWS:
            pooled.update(v for v in operands if not is_literal(v))
        elif name in COMPARES and any(map(_is_zero, operands)):
            for value in operands:
                if not is_literal(value):
                    compared.setdefault(_kind(value, mesh), time)
    return [*kept.values()]


def _is_zero(value: ShardedValue) -> bool:
    return is_literal(value) and not value.atom.val


def _kind(value: ShardedValue, mesh: Sequence[int]) -> Any:
    shape = local_shape(aval_shape(value.atom), value.layout, mesh)
    return tuple(shape), value.atom.aval.dtype
