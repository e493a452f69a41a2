"""Copies of images in another order, of which XLA:GPU makes the filters' gradients of examples.

Such gradients (`jax.vmap` of `jax.grad`) are a forward convolution in groups for cuDNN, with
filters as large as an image. What they are made of is copied for it, with the channels outermost.
An elementwise kernel writes both orders at once (`multi_output_fusion.cc`), an activation's in the
forward pass. Of a value that nobody reads later, the copy takes the place: a ReLU is not read when
its gradient is computed, a tanh is. Compiled for an H100 (jax 0.10.2), six layers of either need
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.sharding.compiler_rules import is_filter_gradient
from autopar.passes.sharding.heap import HeapBuffer
from autopar.passes.sharding.held_values import HeldValues
from autopar.passes.sharding.spmd_program import Block, Compute, ShardedValue, reads, writes


def turned_images(
    block: Block,
    held: HeldValues[ShardedValue],
    last: Mapping[ShardedValue, int],
    size: Callable[[ShardedValue], int],
) -> list[HeapBuffer]:
    """The copies that are there beside what they are of.

    Args:
      block: the program of a device.
      held: its values that are buffers.
      last: when each buffer is read for the last time, by numbers of instructions.
      size: the bytes of a buffer.
    """
    copied: dict[ShardedValue, HeapBuffer] = {}
    made: dict[ShardedValue, int] = {}
    for time, instruction in enumerate(block.instructions):
        if not isinstance(instruction, Compute):
            continue
        if instruction.eqn.primitive.name in ELEMENTWISE:
            made.update(dict.fromkeys(map(held.root, writes(instruction)), time))
        if not _of_groups(instruction):
            continue
        for value in map(held.root, reads(instruction)):
            if last.get(value, 0) > time:
                copied[value] = HeapBuffer(size(value), made.get(value, time), time)
    return [*copied.values()]


def _of_groups(instruction: Compute) -> bool:
    """Whether a convolution makes the filters' gradients of many, as under `jax.vmap`."""
    eqn = instruction.eqn
    return is_filter_gradient(eqn) and eqn.params["feature_group_count"] > 1
