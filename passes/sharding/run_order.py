"""What a program waits for before it goes on, where its compiler may run it in any order.

XLA's scheduler for GPUs may leave a product that nothing waits for, a weight's gradient, to the end
of the step, and then all that it reads stays until then: the activations of every layer, in spite
of `jax.checkpoint`. It also combines collectives, and a gradient stays whole until the last of
those with which its reduce-scatter was combined: ZeRO without its memory. So the next product waits
for such a result: it reads an operand after a barrier that also has the result (XLA:GPU takes
barriers away after it has scheduled). Collectives of gradients are waited for in buckets, as
PyTorch's DDP has them (Li et al., "PyTorch Distributed", VLDB 2020): small ones can still be
combined. What is gathered after a loop waits for the loop: XLA would gather it before, and hold the
output layer's weights throughout the loop over the layers. What is gathered for a convolution waits
for the product before the last one: of few images a convolution is so quick that XLA, to hide the
gathers, would begin with them many layers ahead. Measured with jax 0.10.2 for H100s, by
`benchmarks/compilers.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.passes.graph.primitives import ELEMENTWISE, REDUCTIONS
from autopar.passes.sharding.compiler_rules import SAME_BUFFER, may_be_fused, writes_buffer
from autopar.passes.sharding.gathers_in_time import gathers_in_time
from autopar.passes.sharding.leaf_by_leaf import copies_in_turn
from autopar.passes.sharding.loop_order import gathers_after_loops, is_large_gather, loops_in_turn
from autopar.passes.sharding.spmd_program import (
    Block,
    Compute,
    Instruction,
    Loop,
    Relayout,
    ShardedValue,
    is_gather,
    is_literal,
    local_bytes,
    reads,
    writes,
)
from autopar.passes.sharding.waiting import LARGE_BYTES, EarlyGather, Tie, is_product

BUCKET_BYTES = 64 << 20
"""Of gradients on a device, whose collectives are waited for together."""

PRODUCTS_AHEAD = 2
"""A product's result waits if so many further products do not read what is made of it."""


def ties(block: Block, mesh: Sequence[int], keeps_order: bool = True) -> dict[int, Tie]:
    """By the numbers of a block's instructions, what these wait for.

    Unless a compiler `keeps_order`, only copies from the hosts' memory wait.
    """
    turns = copies_in_turn(block, mesh)
    copies = {time: Tie(turn.source, turn.results, turn.stored) for time, turn in turns.items()}
    if not keeps_order:
        return copies
    products = [t for t, x in enumerate(block.instructions) if is_product(x)]
    found = _filters_on_time(block, mesh, products)
    if any(isinstance(x, Loop) for x in block.instructions):
        found |= {**gathers_after_loops(block, mesh), **loops_in_turn(block, mesh)}
    return {**found, **_products_in_order(block, mesh, products), **copies}


def after_ties(block: Block, found: Mapping[int, Tie]) -> dict[int, int]:
    """What comes after what waits for its operands, rather than before: after which.

    XLA takes out of a barrier what nobody reads after it and whose other readers it rewrites: what
    is waited for must be read as it is then, by sums of gradients and by what is fused into later
    readers. Found on a U-Net by `zero3`, the gradients of whose filters ran up to seven blocks late
    (2,046 MiB of an H100; since, 1,416).
    """
    if not found:
        return {}
    waited: dict[ShardedValue, int] = {}
    for time, tie in found.items():
        waited.update((v, max(time, waited.get(v, 0))) for v in tie.results)
    instructions = block.instructions
    moved: dict[int, int] = {}
    made_after = dict(waited)
    for time, instruction in enumerate(instructions):
        after = max((made_after.get(v, -1) for v in reads(instruction)), default=-1)
        if after > time and (is_gradient_sum(instruction) or _is_fused(instruction)):
            moved[time] = after
            for value in writes(instruction):
                made_after[value] = max(after, made_after.get(value, 0))
    end = len(instructions)
    tied: dict[ShardedValue, int] = {}
    for time, tie in found.items():
        tied.update((v, min(time, tied.get(v, end))) for v in (tie.operand, *tie.results))
    needed = dict.fromkeys((v for v in block.outputs if not is_literal(v)), end)
    early = {n: time for time, tie in found.items() for x in tie.gathers for n in x.before}
    for time in range(end - 1, -1, -1):
        if time in early:  # it runs before what is moved to the tie
            moved.pop(time, None)
        results = writes(instructions[time])
        if time in moved and not all(
            needed.get(v, end) >= moved[time] < tied.get(v, end) for v in results
        ):
            del moved[time]
        for value in reads(instructions[time]):
            at = early[time] - 1 if time in early else moved.get(time, time)
            needed[value] = min(at, needed.get(value, end))
    return moved


def _is_fused(instruction: Instruction) -> bool:
    if not isinstance(instruction, Compute) or instruction.once:
        return False
    return may_be_fused(instruction.eqn) or instruction.eqn.primitive.name in SAME_BUFFER


def _filters_on_time(block: Block, mesh: Sequence[int], products: Sequence[int]) -> dict[int, Tie]:
    """What is gathered for a convolution, and waits for an earlier product."""
    instructions = block.instructions
    convolved: dict[ShardedValue, int] = {}  # what a convolution reads, and which product it is
    for place, time in enumerate(products):
        eqn = instructions[time].eqn  # type: ignore[union-attr]
        if eqn.primitive.name == "conv_general_dilated":
            for value in reads(instructions[time]):
                convolved.setdefault(value, place)
    found: dict[int, Tie] = {}
    if not convolved:
        return found
    for time, instruction in enumerate(instructions):
        if not is_large_gather(instruction, mesh):
            continue
        place = convolved.get(instruction.target, 0) - PRODUCTS_AHEAD
        if place >= 0 and products[place] < time:
            found[time] = Tie(instruction.source, writes(instructions[products[place]]), ())
    return found


def _products_in_order(
    block: Block, mesh: Sequence[int], products: Sequence[int]
) -> dict[int, Tie]:
    """Products that read an operand when what nothing else waits for is there."""
    instructions = block.instructions
    at_products = frozenset(products)
    if len(products) <= PRODUCTS_AHEAD:
        return {}
    readers: dict[ShardedValue, list[int]] = defaultdict(list)
    for time, instruction in enumerate(instructions):
        for value in reads(instruction):
            readers[value].append(time)
    ranks: dict[ShardedValue, int] = {}  # of what may be held back without a copy: least is best
    found: dict[int, Tie] = {}
    gathers = gathers_in_time(block, mesh, products)
    gathered = {x.target for x in instructions if is_gather(x) and x.purpose == "parameter"}
    due: list[EarlyGather] = []
    results: list[ShardedValue] = []
    sources: list[ShardedValue] = []
    bucket: list[Relayout] = []
    added = _added_to_inputs(block, readers)
    outputs = {v for v in block.outputs if not is_literal(v)}
    sums: dict[int, ShardedValue] = {}  # what products are added to or turned into, by when
    for time, instruction in enumerate(instructions):
        if time in sums:
            results.append(sums[time])
        rank = _rank(instruction, ranks)
        if rank is not None:
            ranks.update(dict.fromkeys(writes(instruction), rank))
        if isinstance(instruction, Relayout) and is_gradient_sum(instruction):
            bucket.append(instruction)
            if sum(local_bytes(x.source, mesh) for x in bucket) >= BUCKET_BYTES:
                results += [x.target for x in bucket]
                sources += [x.source for x in bucket]
                bucket = []
        if _is_large_sum(instruction, mesh):
            ahead = products[bisect_right(products, time) :][:PRODUCTS_AHEAD]
            results += [
                result
                for result in writes(instruction)
                if ahead and not _is_read(result, ahead[-1], instructions, readers)
            ]
        if time not in at_products:
            continue
        buffers = [v for v in reads(instruction) if v in ranks and v not in results]
        computed = [v for v in buffers if v not in gathered]
        due = [gather for gather in (*due, *gathers.get(time, ())) if gather.number > time]
        begun = tuple(gather.since(time) for gather in due) if computed else ()
        due = [] if begun else due
        if (results or begun) and buffers:
            best = min(computed if begun else buffers, key=ranks.__getitem__)
            values = (*results, *(gather.source for gather in begun))
            found[time] = Tie(best, values, tuple(sources), begun)
            results, sources = [], []
        (result,) = writes(instruction) or (None,)
        ahead = products[bisect_right(products, time) :][:PRODUCTS_AHEAD]
        if result is not None and ahead and not _is_read(result, ahead[-1], instructions, readers):
            later = added.get(result)
            if later is None and result not in outputs:
                later = _turned(result, ahead[0], instructions, readers)
            if later is not None:
                sums.update((later,))
            else:
                results.append(result)
    return found


def _added_to_inputs(
    block: Block, readers: Mapping[ShardedValue, Sequence[int]]
) -> dict[ShardedValue, tuple[int, ShardedValue]]:
    """The values that are added to an input, the sum so far, and nothing else: when, and the sum.

    Waited for, the sum lets the value go. Of pieces of pipelines on H100s, the products of all
    weights' gradients stayed to the end while only the products were waited for.
    """
    inputs, outputs = {*block.inputs}, {v for v in block.outputs if not is_literal(v)}
    found: dict[ShardedValue, tuple[int, ShardedValue]] = {}
    for time in range(len(block.instructions) - 1, -1, -1):
        x = block.instructions[time]
        if not isinstance(x, Compute) or not _is_fused(x) or len(x.results) != 1:
            continue
        (made,) = x.results
        if x.eqn.primitive.name in ("add", "add_any") and made in outputs:
            own = [v for v in reads(x) if v not in inputs]
            is_sum = len(own) == 1 and len(reads(x)) == 2
            end = (time, made) if is_sum and not readers[made] else None
        else:
            own, end = [*reads(x)], found.get(made)
        alone = (v for v in own if len(readers[v]) == 1 and v not in inputs and v not in outputs)
        if end is not None:
            found.update(dict.fromkeys(alone, end))
    return found


def _turned(
    result: ShardedValue,
    before: int,
    instructions: Sequence[Instruction],
    readers: Mapping[ShardedValue, Sequence[int]],
) -> tuple[int, ShardedValue] | None:
    """When a product's result is transposed, and what it is then; None if it is used otherwise.

    XLA multiplies in the other order instead, but not across a barrier: of weights that are stacked
    (those of experts) it then transposed the state of the optimizer, there and back. What is
    transposed after the next product is not waited for instead.
    """
    if len(readers[result]) != 1 or readers[result][0] > before:
        return None
    (time,) = readers[result]
    x = instructions[time]
    if not isinstance(x, Compute) or x.eqn.primitive.name != "transpose" or x.once:
        return None
    return time, x.results[0]


def _rank(instruction: Instruction, ranks: Mapping[ShardedValue, int]) -> int | None:
    """How well what an instruction makes can be an operand after a barrier.

    What is a buffer anyway; what a product makes one; the same under another shape. Of what is cut
    out of a larger buffer, a barrier would make a copy in that order of dimensions.
    """
    if not isinstance(instruction, Compute) or writes_buffer(instruction.eqn):
        return 0
    if instruction.eqn.primitive.name in ELEMENTWISE:
        return 1
    if instruction.eqn.primitive.name in ("reshape", "squeeze"):
        return 2 if all(v in ranks for v in reads(instruction)) else None
    return None


def _is_large_sum(instruction: Instruction, mesh: Sequence[int]) -> bool:
    """Whether an instruction reduces something large, as the gradients of biases do."""
    if not isinstance(instruction, Compute) or instruction.eqn.primitive.name not in REDUCTIONS:
        return False
    return any(local_bytes(v, mesh) >= LARGE_BYTES for v in instruction.operands)


def is_gradient_sum(instruction: Instruction) -> bool:
    """Whether an instruction adds a gradient over devices."""
    if not isinstance(instruction, Relayout) or instruction.purpose != "gradient":
        return False
    kinds = {step.kind for step in instruction.steps}
    return bool(kinds & {"reduce-scatter", "all-reduce"}) and not is_literal(instruction.source)


def _is_read(
    result: ShardedValue,
    horizon: int,
    instructions: Sequence[Instruction],
    readers: dict[ShardedValue, list[int]],
) -> bool:
    """Whether a product up to the horizon reads a result, or what is made of it."""
    waiting, seen = [result], set[int]()
    while waiting:
        for time in readers[waiting.pop()]:
            if time > horizon or time in seen:
                continue
            if is_product(instructions[time]):
                return True
            seen.add(time)
            waiting += writes(instructions[time])
    return False


def products_left(block: Block, mesh: Sequence[int]) -> list[Instruction]:
    """The products that are left to the end, to run beside the gathers of new state there.

    Of which no other product reads anything: those of weights' gradients. None if less than half
    as much is gathered after all products as these make.
    """
    found, _ = weight_products(block)
    gathered = 0
    for instruction in reversed(block.instructions):
        if found and instruction is found[0]:
            break
        if is_gather(instruction) and instruction.purpose == "state":
            gathered += local_bytes(instruction.target, mesh)
    made = sum(local_bytes(v, mesh) for x in found for v in writes(x))
    return found if 2 * gathered >= made else []


def weight_products(block: Block) -> tuple[list[Instruction], set[ShardedValue]]:
    """The products of which no other product reads anything, last first.

    And what products and loops read, or what is made of it.
    """
    reaching: set[ShardedValue] = set()
    found: list[Instruction] = []
    for instruction in reversed(block.instructions):
        is_read = any(value in reaching for value in writes(instruction))
        if is_product(instruction):
            reaching.update(reads(instruction))
            if not is_read:
                found.append(instruction)
        elif is_read or not isinstance(instruction, (Compute, Relayout)):
            reaching.update(reads(instruction))
    return found, reaching
