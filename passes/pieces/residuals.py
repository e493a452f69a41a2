"""What a backward pass computes again because that costs less than keeping it: a minimum cut.

`jax.vjp` lets a forward pass leave every value that a derivative reads, although many of them are
a few additions away from one another. A value that is kept is written by F, held until B has run,
and read by B; one that B computes again by elementwise operations is fused into its readers. What
is kept is the cheapest cut between what F computes in earnest and what B reads, as in PyTorch's
AOTAutograd (Horace He and Shangdi Yu, "Min-cut optimal(*) recomputation", 2022); unlike there,
operations have a price too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from autopar.passes.graph.jumps import is_jump
from autopar.passes.pieces.wiring import has_effect
from autopar.passes.sharding.scopes import itemsize
from autopar.passes.sharding.spmd_program import Compute, Instruction, ShardedValue, reads, writes
from autopar.passes.slicing.cheapest_cut import KEPT, PRICES, cheapest_cut


def computed_again(
    forward: Sequence[Instruction],
    wanted: Collection[ShardedValue],
    size: Callable[[ShardedValue], int],
    held: Collection[ShardedValue],
    changing: Collection[ShardedValue],
    prices: Mapping[str, int] = PRICES,
) -> list[Instruction]:
    """What a later task should compute again, of what is `wanted`; the rest it takes from F.

    Args:
      forward: the instructions of F, in order; some of them are returned, in that order.
      wanted: what the later task reads.
      size: bytes of a version on one device.
      held: versions that are there anyway when the task runs.
      changing: versions that are no longer what they were when F ran.
      prices: of an element that a primitive computes again.
    """
    maker = {v: number for number, x in enumerate(forward) for v in writes(x)}

    def price_of(number: int) -> int | None:
        """What running an instruction again costs; None, if it must not or should not be."""
        x = forward[number]
        if not isinstance(x, Compute) or x.once or has_effect(x) or is_jump(x.eqn):
            return None
        price = prices.get(x.eqn.primitive.name)
        if price is None or any(v in changing for v in reads(x)):
            return None
        return price * sum(size(v) // itemsize(v.atom.aval) for v in writes(x))

    again, _ = cheapest_cut(
        [v for v in maker if v in wanted and v not in held],
        maker.get,
        lambda number: [v for v in reads(forward[number]) if v not in held],
        lambda v: KEPT * size(v),
        price_of,
    )
    return [forward[number] for number in sorted(again)]


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
