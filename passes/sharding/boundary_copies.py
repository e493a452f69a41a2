"""What a TPU's program copies where it begins and ends: what it holds in another order inside.

Arguments and results lie in the usual order of dimensions, the last one innermost. XLA:TPU holds a
value with the two last ones exchanged if its rows of batched products are summed (a softmax's
exponentials: the sums then run across vectors, not within them), or if the last one would fill
parts of vectors only, and the one before it whole ones (a vocabulary of 30,522). Found in the
pieces of pipelines: a backward pass that reads exponentials of the forward pass copies them before,
and a forward pass copies them out.

What was summed and is gathered across vectors, not along them (`lies_across`), is added to the
parameter in that order, of which there is a copy then. Found on a Llama by `zero2`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from jax.extend.core import JaxprEqn

from autopar.passes.graph.primitives import PRODUCTS
from autopar.passes.sharding.compiler_rules import VECTOR_LANES, reduces_rows
from autopar.passes.sharding.heap import HeapBuffer
from autopar.passes.sharding.held_values import HeldValues
from autopar.passes.sharding.layout import local_shape
from autopar.passes.sharding.scopes import aval_shape
from autopar.passes.sharding.spmd_program import (
    Block,
    Compute,
    Relayout,
    ShardedValue,
    is_literal,
    local_bytes,
    reads,
    writes,
)
from autopar.passes.sharding.tiles import lies_across

LARGE_BYTES = 1 << 20
"""What is smaller is copied beside everything else."""


def boundary_copies(
    block: Block, mesh: Sequence[int], held: HeldValues[ShardedValue]
) -> list[HeapBuffer]:
    """The second buffers of what enters or leaves a block, as long as both are there."""
    inputs = {v for v in block.inputs if _is_large(v, mesh)}
    outputs = {held.root(v) for v in block.outputs if not is_literal(v) and _is_large(v, mesh)}
    filling = {v for v in inputs | outputs if _fills_vectors_turned(v, mesh)}
    turned = filling & outputs
    times: dict[ShardedValue, list[int]] = defaultdict(list)
    whole: set[ShardedValue] = set()  # what loops and collectives take as it is
    batched: set[ShardedValue] = set()  # results of batched products, and exponentials
    for time, instruction in enumerate(block.instructions):
        found = held.read_by(reads(instruction))
        made = [v for v in writes(instruction) if held.is_held(v)]
        for value in found if made else ():
            times[value].append(time)
        for value in made:
            times[value].append(time)
        if not isinstance(instruction, Compute):
            whole.update(found)
            continue
        if instruction.eqn.primitive.name in PRODUCTS:
            turned.update(filling.intersection(map(held.root, reads(instruction))))
        if _is_batched(instruction.eqn) or instruction.eqn.primitive.name == "exp":
            batched.update(made)
        elif reduces_rows(instruction.eqn) and batched & found:
            turned.update(found & (inputs | outputs))
    copied = [v for v in (*block.inputs, *outputs) if v in turned - whole and times[v]]
    return [
        *(
            HeapBuffer(local_bytes(v, mesh), min(times[v]), max(times[v]))
            for v in dict.fromkeys(copied)
        ),
        *_copied_for_gathers(block, mesh),
    ]


def _copied_for_gathers(block: Block, mesh: Sequence[int]) -> Iterator[HeapBuffer]:
    """Of arguments to which is added what was gathered in the other order of dimensions."""
    gathered: dict[ShardedValue, int] = {}
    entering = set(block.inputs)
    for time, instruction in enumerate(block.instructions):
        if isinstance(instruction, Relayout) and instruction.purpose == "state":
            source = instruction.source
            shape = local_shape(aval_shape(source.atom), source.layout, mesh)
            steps = [step for step in instruction.steps if step.kind == "all-gather"]
            is_last = len(shape) == 2 and any(step.dim == 1 for step in steps)
            if is_last and lies_across(shape[1]):
                gathered[instruction.target] = time
        elif first := [gathered[v] for v in reads(instruction) if v in gathered]:
            for value in dict.fromkeys(reads(instruction)):
                if value in entering:
                    yield HeapBuffer(local_bytes(value, mesh), min(first), time)


def _is_large(value: ShardedValue, mesh: Sequence[int]) -> bool:
    return len(aval_shape(value.atom)) > 2 and local_bytes(value, mesh) >= LARGE_BYTES


def _fills_vectors_turned(value: ShardedValue, mesh: Sequence[int]) -> bool:
    *_, across, along = local_shape(aval_shape(value.atom), value.layout, mesh)
    return along % VECTOR_LANES != 0 and across % VECTOR_LANES == 0


def _is_batched(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "dot_general":
        return False
    _, batches = eqn.params["dimension_numbers"]
    return bool(batches[0])
