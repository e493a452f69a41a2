"""What an instruction waits for, and which instructions are waited for."""

from __future__ import annotations

import math
from typing import NamedTuple

from autopar.passes.graph.primitives import PRODUCTS
from autopar.passes.sharding.spmd_program import Compute, Instruction, ShardedValue

LARGE_BYTES = 1 << 20
"""What is smaller may stay as long as it likes."""


class EarlyGather(NamedTuple):
    """What may be gathered while products run of which others come before its reader.

    Args:
      number: that of the gather.
      source: what is gathered.
      target: what is then there.
      before: the numbers of the instructions that make the source and come later in the block; they
        run before what is waited for there.
    """

    number: int
    source: ShardedValue
    target: ShardedValue
    before: tuple[int, ...]

    def since(self, time: int) -> EarlyGather:
        """The same, where what comes before `time` was run."""
        return self._replace(before=tuple(number for number in self.before if number > time))


class Tie(NamedTuple):
    """What a product or a gather reads only when other values are there.

    Args:
      operand: that it reads.
      results: the values.
      sources: what is in memory until then, because the collectives that read it may run then.
      gathers: those that begin then; what they gather is among the values.
    """

    operand: ShardedValue
    results: tuple[ShardedValue, ...]
    sources: tuple[ShardedValue, ...]
    gathers: tuple[EarlyGather, ...] = ()


def is_product(instruction: Instruction) -> bool:
    """Whether an instruction is a product of matrices, not one that XLA fuses as a multiplication.

    That is one without a sum, or of a vector: it would write what a barrier holds back for it.
    """
    if not isinstance(instruction, Compute) or instruction.eqn.primitive.name not in PRODUCTS:
        return False
    if instruction.eqn.primitive.name != "dot_general":
        return True
    (summed, batches) = instruction.eqn.params["dimension_numbers"]
    shapes = [atom.aval.shape for atom in instruction.eqn.invars]
    free = [
        math.prod(size for d, size in enumerate(shape) if d not in own and d not in batch)
        for shape, own, batch in zip(shapes, summed, batches, strict=True)
    ]
    return bool(summed[0]) and min(free) > 1
