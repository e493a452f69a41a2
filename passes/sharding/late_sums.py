"""What XLA:TPU leaves to the end of a program: sums of gradients over devices, and some products.

Its scheduler (`latency_hiding_scheduler.cc`) begins with the end of the program and goes backwards.
There it takes the updates of the weights and the reduce-scatters before them, one after the other:
gradients are added over devices when the backward pass is over, and stay whole until then. Of what
it may take next it prefers what lets most others follow (`kCreatesMoreReadyNodes`): kernels whose
operands nobody else is waiting to read. So some that nothing in the backward pass waits for run at
the end as well, and what they read stays: the gradient of a weight, to be scattered, in whose
kernel nothing else is computed (it reads both operands under names of its own, with the dimensions
that it sums over as one) or that reads what was gathered; and the picking of a loss from logits
that it sees in another shape. A gradient whose kernel computes an operand (a norm, an activation)
reads what the backward pass reads too, and runs beside it; so do those that all devices add, in one
collective. What waits for fewer gathers comes first (`kAsyncDepth`), so the end is that of a layer
where the next one's weights are gathered again (`jax.checkpoint`), or the beginning of a loop.

Products that are left beside the gathers of new state (`products_left`) run there too: their
results are not there before. What was gathered is added to the parameters when all is gathered but
the largest array, for which nothing is left to run beside; until then all of it is there. Found on
GPTs of 760M and 2.6B and a Llama, by `zero2`. Some sums run at once (`uneven_sums.py`).

Where the scheduler has only gradients of weights to take, because the backward pass must wait for
them, it takes with them one that reads what they read: that of the last weight of a gated network,
whose kernel computes its operand from both others' results as theirs do. So that one runs after the
product that its gradient is read by beside it, and what that makes is there (a Llama was planned 8%
too small).

The order with which it begins, and to which it keeps where it does not care, is one of three: that
which needs least memory with sums over devices where they are made (`hlo_memory_scheduler.cc`). A
list scheduler's is that of the plan. Depth first or result by result, all gradients of weights come
last, and what they read stays, the logits of tied tables among it. With the sums after them, GPTs
by `zero3` for which XLA chose that took 6 and 8% more than in the list's order. So programs are
compiled with the list's (`ordered_options`), but not those with loops: LSTMs took 8 and 9% more.

Found by reading the schedules of a mixture of experts, a Llama, a BERT and GPTs (libtpu 0.0.42).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence

from jax.extend.core import JaxprEqn

from autopar.passes.graph.primitives import PRODUCTS
from autopar.passes.sharding.held_values import HeldValues
from autopar.passes.sharding.leaf_by_leaf import copies_of_hosts
from autopar.passes.sharding.run_order import is_gradient_sum, weight_products
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
from autopar.passes.sharding.uneven_sums import early_sums


def late_times(
    block: Block,
    held: HeldValues[ShardedValue],
    times: Sequence[int],
    mesh: Sequence[int],
    left: Collection[Instruction] = (),
) -> list[tuple[float, bool]]:
    """When a block's instructions run, where some are left to the end.

    Args:
      block: the instructions.
      held: which values are buffers.
      times: when each would run otherwise.
      mesh: the logical mesh.
      left: the products that are left to the end whatever they read (`products_left`).

    Returns: for each, what it is sorted by.
    """
    late, depths = are_late(block, held, mesh, left), _depths(block)
    end = max(times, default=0) + 1
    deeper: dict[int, list[int]] = {}
    found: list[tuple[float, bool]] = []
    beside = _beside_others(block, held)
    _, summed = _at_once(block, held, mesh)
    last = _after_gathers(block, mesh) if left else {}
    for number, (time, depth, is_late) in enumerate(zip(times, depths, late, strict=True)):
        if number in last:
            found.append((end + last[number], True))
            continue
        if not is_late:
            is_first = not summed.isdisjoint(map(held.root, writes(block.instructions[number])))
            after = None if is_first else beside.get(number)
            found.append((time, False) if after is None else (max(time, times[after]), True))
            continue
        if depth not in deeper:
            others = zip(times, depths, late, strict=True)
            deeper[depth] = sorted(t for t, other, is_one in others if other > depth and not is_one)
        place = bisect_right(deeper[depth], time)
        following = deeper[depth][place] if place < len(deeper[depth]) else end
        found.append((following - 0.5, True))
    made: dict[ShardedValue, tuple[float, bool]] = {}
    for number, instruction in enumerate(block.instructions):  # after all that it reads
        read = (made[v] for v in reads(instruction) if v in made)
        found[number] = max([found[number], *read])
        made.update(dict.fromkeys(writes(instruction), found[number]))
    return found


def _after_gathers(block: Block, mesh: Sequence[int]) -> dict[int, int]:
    """By numbers: what comes after the other gathers of new state (0), with the largest one (1).

    Not where copies to and from the hosts are waited for in turn.
    """
    if any(map(copies_of_hosts, block.instructions)):
        return {}
    computed_from = _read_by_products(block)
    gathers = {
        number: local_bytes(x.target, mesh)
        for number, x in enumerate(block.instructions)
        if is_gather(x) and x.purpose == "state"
        if x.target not in computed_from
    }
    largest = max(gathers, key=gathers.__getitem__, default=None)
    found: dict[int, int] = {}
    waiting: dict[ShardedValue, int] = {}
    for number, instruction in enumerate(block.instructions):
        places = [waiting[v] for v in reads(instruction) if v in waiting]
        if number in gathers:
            places.append(int(number == largest))
        if places:
            waiting.update(dict.fromkeys(writes(instruction), max(places)))
            if number not in gathers or number == largest:
                found[number] = max(places)
    return found


def _read_by_products(block: Block) -> set[ShardedValue]:
    """What a product, or a loop, is computed from: no new state is."""
    found: set[ShardedValue] = set()
    for x in reversed(block.instructions):
        is_one = isinstance(x, Loop)
        is_one |= isinstance(x, Compute) and x.eqn.primitive.name in PRODUCTS
        if is_one or not found.isdisjoint(writes(x)):
            found.update(reads(x))
    return found


def _beside_others(block: Block, held: HeldValues[ShardedValue]) -> dict[int, int]:
    """By numbers of weights' gradients: which product of the same gradient comes before them."""
    weights = {id(x) for x in weight_products(block)[0]}
    later: dict[ShardedValue, list[set[ShardedValue]]] = defaultdict(list)  # what readers read
    products: dict[ShardedValue, tuple[int, set[ShardedValue]]] = {}
    found: dict[int, int] = {}
    for number in range(len(block.instructions) - 1, -1, -1):
        instruction = block.instructions[number]
        if not isinstance(instruction, Compute) or instruction.eqn.primitive.name not in PRODUCTS:
            continue
        values = [held.root(v) for v in instruction.operands if not is_literal(v)]
        if id(instruction) not in weights:
            results = set(filter(held.is_held, writes(instruction)))
            products.update(dict.fromkeys(values, (number, results)))
            continue
        own = held.read_by(reads(instruction))
        twins = [products[v] for v in values if v in products]
        for twin, results in twins:
            if any(own & other for v in results for other in later[v]):
                found[number] = min(twin, found.get(number, twin))
        for value in own:
            later[value].append(own)
    return found


def are_late(
    block: Block,
    held: HeldValues[ShardedValue],
    mesh: Sequence[int],
    left: Collection[Instruction] = (),
) -> list[bool]:
    """By instruction: whether it is left to the end, or reads what is."""
    early, summed = _at_once(block, held, mesh)
    others = set(map(id, left))
    products, awaited = weight_products(block)
    made = {held.root(v) for x in products for v in writes(x)}
    scattered = (made & _scattered(block, held)) - summed
    gathered = {v for x in block.instructions if is_gather(x) for v in writes(x)}
    late: set[ShardedValue] = set()
    found = []
    for number, instruction in enumerate(block.instructions):
        results = writes(instruction)
        is_late = not late.isdisjoint(reads(instruction))
        is_late |= id(instruction) in others and summed.isdisjoint(map(held.root, results))
        if isinstance(instruction, Compute) and not scattered.isdisjoint(results):
            is_late |= _is_plain(instruction, held)
            is_late |= any(held.root(v) in gathered for v in reads(instruction))
        elif awaited.isdisjoint(results):
            is_late |= is_gradient_sum(instruction) and number not in early
            is_late |= _picks_reshaped(instruction, held)
        if is_late or number in early:
            late.update(results)  # what is moved at once is there at the end
        found.append(is_late)
    return found


def _at_once(
    block: Block, held: HeldValues[ShardedValue], mesh: Sequence[int]
) -> tuple[set[int], set[ShardedValue]]:
    """The numbers of sums that run as soon as they can, and what they sum."""
    early = early_sums(block, mesh, _depths(block))
    return early, {held.root(v) for number in early for v in reads(block.instructions[number])}


def _scattered(block: Block, held: HeldValues[ShardedValue]) -> set[ShardedValue]:
    """The gradients of whose sum over devices each keeps a part."""
    sums = (x for x in block.instructions if isinstance(x, Relayout) and is_gradient_sum(x))
    return {held.root(x.source) for x in sums if any(s.kind == "reduce-scatter" for s in x.steps)}


def _depths(block: Block) -> list[int]:
    """By instruction: for how many gathers and loops it waits, one after the other."""
    deep: dict[ShardedValue, int] = {}
    found = []
    for instruction in block.instructions:
        depth = max((deep.get(v, 0) for v in reads(instruction)), default=0)
        depth += isinstance(instruction, Loop)
        deep.update(dict.fromkeys(writes(instruction), depth + is_gather(instruction)))
        found.append(depth)
    return found


def _picks_reshaped(instruction: Instruction, held: HeldValues[ShardedValue]) -> bool:
    if not isinstance(instruction, Compute) or instruction.eqn.primitive.name != "gather":
        return False
    value = instruction.operands[0]
    return not is_literal(value) and held.root(value) != value


def _is_plain(product: Compute, held: HeldValues[ShardedValue]) -> bool:
    """Whether a kernel is a product alone, over several dimensions that it reads as one."""
    buffers = [held.root(v) for v in product.operands if not is_literal(v)]
    is_alone = all(map(held.is_held, buffers)) and all(map(held.is_held, product.results))
    return is_alone and _sums_over_several(product.eqn)


def _sums_over_several(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "dot_general":
        return False
    (summed, _), _ = eqn.params["dimension_numbers"]
    return len(summed) > 1
