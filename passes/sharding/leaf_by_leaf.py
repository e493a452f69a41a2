"""The order in which what lies in the hosts' memory is brought to the devices and put back.

An optimizer updates all first moments, then all second ones, then all parameters, as it is written:
in that order all of them would be on the devices at once. What follows the last product or loop is
therefore run leaf by leaf: what belongs together (a parameter, its moments and its gradient are
connected by arrays; a step's count and a norm are scalars, which connect nothing) runs one after
the other, as far as it does not wait for all others.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from autopar.passes.graph.primitives import HEAVY
from autopar.passes.sharding.reshard import HOST_COPIES
from autopar.passes.sharding.scopes import aval_shape
from autopar.passes.sharding.spmd_program import (
    Block,
    Branch,
    Compute,
    Instruction,
    Loop,
    Relayout,
    ShardedValue,
    local_bytes,
    reads,
    writes,
)

AHEAD_BYTES = 64 << 20
"""Of a device that may be copied to it before what was copied earlier is put back."""

AHEAD_SHARE = 8
"""The part of all that is copied that it is at most."""

LONG_AHEAD = 2
"""Products and loops before which something is copied to the devices."""


def is_long(instruction: Instruction) -> bool:
    """Whether an instruction takes so long that what lies in the hosts' memory does not wait."""
    if isinstance(instruction, Compute):
        return instruction.eqn.primitive.name in HEAVY
    return isinstance(instruction, (Loop, Branch))


def leaf_by_leaf(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The same instructions; those after the last long one in the order of the leaves."""
    begin = max((t + 1 for t, x in enumerate(instructions) if is_long(x)), default=0)
    tail = instructions[begin:]
    makers = {v: number for number, x in enumerate(tail) for v in writes(x)}
    needs = [{makers[v] for v in reads(x) if v in makers} for x in tail]
    groups = _groups(tail, needs)
    readers: dict[int, list[int]] = defaultdict(list)
    for number, needed in enumerate(needs):
        for maker in needed:
            readers[maker].append(number)
    waiting = [len(needed) for needed in needs]
    ready: dict[int | None, list[int]] = defaultdict(list)  # by group, each a heap
    begun: list[int] = []  # a heap of groups, some of which have nothing left

    def add(number: int) -> None:
        group = groups[number]
        if group is not None and not ready[group]:
            heapq.heappush(begun, group)
        heapq.heappush(ready[group], number)

    for number, count in enumerate(waiting):
        if not count:
            add(number)
    order: list[int] = []
    group: int | None = None
    while len(order) < len(tail):
        # Scalars and what has nothing to do with the hosts first; then what has been begun.
        own = ready[None] or ready[group]
        while not own:
            group = heapq.heappop(begun)
            own = ready[group]
        order.append(heapq.heappop(own))
        for reader in readers[order[-1]]:
            waiting[reader] -= 1
            if not waiting[reader]:
                add(reader)
    return (*instructions[:begin], *(tail[number] for number in order))


def _groups(tail: Sequence[Instruction], needs: Sequence[set[int]]) -> list[int | None]:
    """For each instruction the first one that belongs to the same leaves; None: to no host's."""
    copies = {n for n, x in enumerate(tail) if copies_of_hosts(x)}
    own = set(copies)  # what reads a copy, or what is made of it
    for number, needed in enumerate(needs):
        if not own.isdisjoint(needed):
            own.add(number)
    parents = list(range(len(tail)))

    def root(number: int) -> int:
        while parents[number] != number:
            parents[number] = parents[parents[number]]
            number = parents[number]
        return number

    for number in own:
        for maker in needs[number] & own:
            if any(_is_array(v) for v in writes(tail[maker])) and any(
                _is_array(v) for v in writes(tail[number])
            ):
                first, second = sorted((root(maker), root(number)))
                parents[second] = first
    return [root(number) if number in own else None for number in range(len(tail))]


def copies_of_hosts(instruction: Instruction) -> bool:
    """Whether an instruction brings something from the hosts' memory, or puts it there."""
    return isinstance(instruction, Relayout) and any(
        step.kind in HOST_COPIES for step in instruction.steps
    )


def _is_array(value: ShardedValue) -> bool:
    return math.prod(aval_shape(value.atom)) > 1


class CopyTurn(NamedTuple):
    """What a copy to the devices waits for.

    Args:
      source: what is copied.
      results: values that are there first.
      stored: on the devices until those are in the hosts' memory.
    """

    source: ShardedValue
    results: tuple[ShardedValue, ...]
    stored: tuple[ShardedValue, ...] = ()


def copies_in_turn(block: Block, mesh: Sequence[int]) -> dict[int, CopyTurn]:
    """By the numbers of a block's instructions, what copies from the hosts' memory wait for.

    Nothing else keeps a compiler from making all of them when the step begins. After the last long
    instruction each waits for that one, and until little of what came before is not put back;
    earlier ones wait for the product before the last one.
    """
    instructions = block.instructions
    copies = [t for t, x in enumerate(instructions) if copies_of_hosts(x)]
    if not copies:
        return {}
    sizes = [local_bytes(instructions[t].target, mesh) for t in copies]  # type: ignore[union-attr]
    most = min(AHEAD_BYTES, sum(sizes) // AHEAD_SHARE)
    long = [t for t, x in enumerate(instructions) if is_long(x) and writes(x)]
    used = {v for x in instructions for v in reads(x)}
    found: dict[int, CopyTurn] = {}
    out: list[tuple[ShardedValue, ShardedValue]] = []  # what is put back, as it is here and there
    there, waited = 0, 0  # bytes that were copied and not waited for; how many of `out` were
    for time in copies:
        relayout = instructions[time]
        assert isinstance(relayout, Relayout)
        if relayout.target.layout.in_host:
            out.append((relayout.source, relayout.target))
            continue
        before = bisect_left(long, time)
        there += local_bytes(relayout.target, mesh)
        newly = waited
        while there > most and newly < len(out):
            there -= local_bytes(out[newly][0], mesh)
            newly += 1
        if newly > waited:
            here, gone = zip(*out[waited:newly], strict=True)
            found[time], waited = CopyTurn(relayout.source, gone, here), newly
        elif before == len(long) or before >= LONG_AHEAD:
            place = before - (1 if before == len(long) else LONG_AHEAD)
            results = [v for v in writes(instructions[long[place]]) if v in used] if long else []
            if results:
                least = min(results, key=lambda v: local_bytes(v, mesh))
                found[time] = CopyTurn(relayout.source, (least,))
    return found
