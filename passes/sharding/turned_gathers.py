"""Which gathered values lie in the order in which devices' parts come.

XLA:GPU gathers along the outermost dimension in memory. What is gathered along another one lies so
that this is the outermost, and products take it so. Loops do not: XLA lays what they read in the
usual order, and transposes the stacked weights of a scan whole. Where its pipeliner peels the
backward loop's first trip (`collective_pipeliner.cc`), that trip reads the other order, so that
both are there from the first loop to the last: of a Llama by `zero3`, all layers' weights once more
(found at sizes of Llama 3, 8 of 32 layers, with JAX 0.10.2: 24.4 GiB for 21.1 planned). So
such values keep the order in which they came, with the gathered dimension first
(`runtime/turned_arrays.py`), and a scan takes its slices along the dimension of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.arrays.typed_keys import is_key
from autopar.passes.graph.scans import ScanParts
from autopar.passes.sharding.spmd_program import (
    Block,
    Loop,
    Relayout,
    ShardedValue,
    is_literal,
    reads,
)


def turned_gathers(block: Block) -> frozenset[ShardedValue]:
    """What was gathered along another dimension than the first, and scans read slice by slice.

    Nothing else reads it, nor a loop's constant that it is.
    """
    found = may_be_turned(block)
    return frozenset(_only_sliced(block, found) if found else ())


def may_be_turned(block: Block) -> set[ShardedValue]:
    """What gathers alone make, along another dimension than the first."""
    return {
        instruction.target
        for instruction in _gathers_across(block)
        if not instruction.sum_dtype
        and all(step.kind == "all-gather" for step in instruction.steps)
        and not is_key(instruction.target.atom.aval.dtype)
    }


def copied_for_loops(block: Block) -> frozenset[ShardedValue]:
    """What was gathered so and is not `turned_gathers`: loops that read it have a copy."""
    return frozenset(x.target for x in _gathers_across(block)) - turned_gathers(block)


def _gathers_across(block: Block) -> Iterator[Relayout]:
    """What gathers along another dimension than the first."""
    for instruction in block.instructions:
        if isinstance(instruction, Relayout) and any(
            step.kind == "all-gather" and step.dim for step in instruction.steps
        ):
            yield instruction


def _only_sliced(block: Block, values: set[ShardedValue]) -> set[ShardedValue]:
    """Those of a block's values that only scans read, slice by slice."""
    left = values.difference(v for v in block.outputs if not is_literal(v))
    for instruction in block.instructions:
        if not isinstance(instruction, Loop):
            left.difference_update(reads(instruction))
            continue
        scan = ScanParts.of(instruction.eqn)
        consts, carried, _ = scan.operands(instruction.operands)
        left.difference_update(v for v in carried if not is_literal(v))
        inside = dict(zip(instruction.body.inputs, consts, strict=False))
        of_these = {name for name, v in inside.items() if not is_literal(v) and v in left}
        sliced = _only_sliced(instruction.body, of_these) if of_these else set()
        left.difference_update(inside[name] for name in of_these - sliced)
    return left
