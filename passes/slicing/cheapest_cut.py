"""What is kept of a forward pass for a backward pass, and what runs again: a minimum cut.

Between what a forward pass computes and what a backward pass reads, every value may be kept, at a
price, and every operation may run again, at another (He and Yu, "Min-cut optimal(*)
recomputation", 2022). The cheapest choice is a minimum cut; of equal ones it is the one next to
where the forward pass begins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from autopar.passes.graph.primitives import CHEAP, ROOTS, TRANSCENDENTAL
from autopar.passes.slicing.mincut import source_side

Value = TypeVar("Value", bound=Hashable)

# Prices are for one element, in eighths of a byte that is moved; they are estimates. Moving a byte
# takes some ten vector operations. What is kept is moved twice.
KEPT = 2 * 8


def _prices(transcendental_bytes: int) -> dict[str, int]:
    groups = (CHEAP, 1), (ROOTS, 2 * 8), (TRANSCENDENTAL, transcendental_bytes * 8)
    return {name: price for names, price in groups for name in names}


# By the name of the primitive. On a CPU core a tanh takes longer than keeping it. An H100 computes
# 16 exponentials in each of its 132 SMs in a clock of 1.7 GHz ("CUDA C++ Programming Guide",
# arithmetic instructions) and moves 3.35 TB/s: one in the time of a byte. A function is one or two;
# TPUs have units for them as well.
PRICES = _prices(10)
ACCELERATOR_PRICES = _prices(2)


def prices_on(backend: str) -> Mapping[str, int]:
    """What computing an element again costs on a backend, by the name of the primitive."""
    return PRICES if backend == "cpu" else ACCELERATOR_PRICES


_LARGEST = 2**60
LARGEST_PRICE = _LARGEST >> 12
_SOURCE, _SINK = 0, 1


def cheapest_cut(
    wanted: Iterable[Value],
    maker: Callable[[Value], int | None],
    operands: Callable[[int], Sequence[Value]],
    keeping: Callable[[Value], int],
    again: Callable[[int], int | None],
) -> tuple[set[int], set[Value]]:
    """The operations that run again, and the values that are kept.

    Args:
      wanted: what is read, and is not there anyway.
      maker: the operation that makes a value; None: no operation does.
      operands: what an operation reads, and is not there anyway.
      keeping: the price of keeping a value.
      again: the price of running an operation again; None: it may not.
    """
    nodes: dict[object, int] = {}
    arcs: list[tuple[int, int, int | None]] = []  # without a capacity, it cannot be cut

    def node(what: object) -> int:
        return nodes.setdefault(what, len(nodes) + 2)

    stack = list(wanted)
    arcs += [(node(("kept", value)), _SINK, None) for value in stack]
    seen, priced = set[Value](), set[int]()
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        made, number = node(("made", value)), maker(value)
        arcs.append((made, node(("kept", value)), min(keeping(value), LARGEST_PRICE)))
        price = None if number is None else again(number)
        if number is None or price is None:
            arcs.append((_SOURCE, made, None))
            continue
        arcs.append((node(number), made, None))
        if number not in priced:
            priced.add(number)
            arcs.append((_SOURCE, node(number), min(price, LARGEST_PRICE)))
            read = operands(number)
            arcs += [(node(("kept", other)), node(number), None) for other in read]
            stack += read
    if not priced:
        return set(), seen
    infinite = min(1 + sum(capacity or 0 for *_, capacity in arcs), _LARGEST)
    bounded = [(tail, head, infinite if cap is None else cap) for tail, head, cap in arcs]
    before = set(source_side(bounded, _SOURCE, _SINK).tolist())
    numbers = {number for number in priced if node(number) not in before}
    made_before = {value for value in seen if node(("made", value)) in before}
    return numbers, {value for value in made_before if node(("kept", value)) not in before}
