"""Which sums over devices are of what is transposed afterwards.

JAX makes the gradient of a weight as a product whose result it transposes. XLA:TPU lays elementwise
operations as it finds their operands: with the sum over devices between the product and the
transposition, which it cannot fold then, the optimizer's update runs in the transposed order, and
the weight and its moments, as they are given and as they are returned, are copied into it and out
of it. So the devices add what is transposed already. Found on a GPT (libtpu 0.0.42): six copies in
float32 of every weight, three of them there from the beginning of the step. What is transposed
twice lies as it was, and is added so: the gradient of tied embeddings.

XLA:GPU does the same to the stacked weights of experts where a barrier holds the product
(`run_order.py`); with the transposition right after it, the product is made in that order.
"""

from __future__ import annotations

from autopar.passes.graph.primitives import PRODUCTS
from autopar.passes.sharding.scopes import aval_shape
from autopar.passes.sharding.spmd_program import (
    Block,
    Compute,
    Instruction,
    Relayout,
    ShardedValue,
    readers_of,
    writes,
)


def turned_sums(block: Block, scatters: bool = True) -> dict[int, tuple[int, ...]]:
    """By the numbers of a block's instructions, the order of dimensions in which devices add.

    Without `scatters`, only of sums that every device has as a whole.
    """
    maker: dict[ShardedValue, Instruction] = {}
    for instruction in block.instructions:
        maker.update(dict.fromkeys(writes(instruction), instruction))
    readers = readers_of(block)
    found: dict[int, tuple[int, ...]] = {}
    for number, instruction in enumerate(block.instructions):
        if not isinstance(instruction, Relayout) or instruction.purpose != "gradient":
            continue
        if not scatters and any(step.kind == "reduce-scatter" for step in instruction.steps):
            continue
        after = readers[instruction.target]
        made = maker.get(instruction.source)
        if len(after) != 1 or len(readers[instruction.source]) != 1:
            continue
        if not isinstance(made, Compute) or made.eqn.primitive.name not in PRODUCTS:
            continue
        own = order = tuple(range(len(aval_shape(instruction.target.atom))))
        while len(after) == 1 and after[0] and (permutation := _transposition(after[0])):
            order = tuple(order[dim] for dim in permutation)
            (result,) = writes(after[0])
            after = readers[result]
        if order != own:
            found[number] = order
    return found


def _transposition(instruction: Instruction) -> tuple[int, ...]:
    """The order that an instruction gives its operand's dimensions; () if it does anything else."""
    if not isinstance(instruction, Compute) or instruction.eqn.primitive.name != "transpose":
        return ()
    return tuple(instruction.eqn.params["permutation"])
