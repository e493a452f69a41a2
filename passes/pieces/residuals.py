"""What a backward pass computes again because that costs less than keeping it: a minimum cut.

`jax.vjp` lets a forward pass leave every value that a derivative reads, although many of them are
a few additions away from one another. A value that is kept is written by F, held until B has run,
and read by B; one that B computes again by elementwise operations is fused into its readers. What
is kept is the cheapest cut between what F computes in earnest and what B reads, as in PyTorch's
AOTAutograd (Horace He and Shangdi Yu, "Min-cut optimal(*) recomputation", 2022); unlike there,
operations have a price too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from autopar.passes.graph.jumps import is_jump
from autopar.passes.graph.primitives import CHEAP, ROOTS, TRANSCENDENTAL
from autopar.passes.pieces.wiring import has_effect
from autopar.passes.sharding.scopes import itemsize
from autopar.passes.sharding.spmd_program import Compute, Instruction, ShardedValue, reads, writes
from autopar.passes.slicing.mincut import source_side

# Prices are for one element, in eighths of a byte that is moved; they are estimates. Moving a byte
# takes some ten vector operations. What is kept is moved twice.
_KEPT = 2 * 8
# On a CPU core a tanh takes longer than keeping it; a GPU would gain by computing it again.
_GROUPS = ((CHEAP, 1), (ROOTS, 2 * 8), (TRANSCENDENTAL, 10 * 8))
_PRICES = {name: price for names, price in _GROUPS for name in names}
_SOURCE, _SINK = 0, 1


def computed_again(
    forward: Sequence[Instruction],
    wanted: Collection[ShardedValue],
    size: Callable[[ShardedValue], int],
    held: Collection[ShardedValue],
    changing: Collection[ShardedValue],
) -> list[Instruction]:
    """What a later task should compute again, of what is `wanted`; the rest it takes from F.

    Args:
      forward: the instructions of F, in order; some of them are returned, in that order.
      wanted: what the later task reads.
      size: bytes of a version on one device.
      held: versions that are there anyway when the task runs.
      changing: versions that are no longer what they were when F ran.
    """
    maker = {v: number for number, x in enumerate(forward) for v in writes(x)}
    nodes: dict[object, int] = {}
    arcs: list[tuple[int, int, int | None]] = []  # without a capacity, it cannot be cut

    def node(what: object) -> int:
        return nodes.setdefault(what, len(nodes) + 2)

    def price_of(x: Instruction) -> int | None:
        """What running an instruction again costs; None, if it must not or should not be."""
        if not isinstance(x, Compute) or x.once or has_effect(x) or is_jump(x.eqn):
            return None
        price = _PRICES.get(x.eqn.primitive.name)
        if price is None or any(v in changing for v in reads(x)):
            return None
        return price * sum(size(v) // itemsize(v.atom.aval) for v in writes(x))

    stack = [v for v in maker if v in wanted and v not in held]
    arcs += [(node(("kept", v)), _SINK, None) for v in stack]
    seen, priced = set[ShardedValue](), set[int]()
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        made, number = node(("made", v)), maker.get(v)
        arcs.append((made, node(("kept", v)), _KEPT * size(v)))
        price = None if number is None else price_of(forward[number])
        if number is None or price is None:
            arcs.append((_SOURCE, made, _KEPT * size(v) + 1))  # it is never cheaper to cut here
            continue
        arcs.append((node(number), made, None))
        if number not in priced:
            priced.add(number)
            arcs.append((_SOURCE, node(number), price))
            operands = [v for v in reads(forward[number]) if v not in held]
            arcs += [(node(("kept", v)), node(number), None) for v in operands]
            stack += operands
    if not priced:
        return []
    infinite = 1 + sum(capacity or 0 for _, _, capacity in arcs)
    bounded = [(tail, head, infinite if cap is None else cap) for tail, head, cap in arcs]
    kept = set(source_side(bounded, _SOURCE, _SINK).tolist())
    return [forward[number] for number in sorted(priced) if node(number) not in kept]


def before_readers(again: Sequence[Instruction], task: Sequence[Instruction]) -> list[Instruction]:
    """A task's instructions with others, each just before the first that reads of it."""
    maker = {v: x for x in again for v in writes(x)}
    placed, result = set[int](), list[Instruction]()
    for instruction in task:
        stack = [(instruction, False)]
        while stack:
            x, ready = stack.pop()
            if ready:
                result.append(x)
            elif id(x) not in placed:
                placed.add(id(x))
                stack.append((x, True))
                stack += [(maker[v], False) for v in reversed(reads(x)) if v in maker]
    return result
