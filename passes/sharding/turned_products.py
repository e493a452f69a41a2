"""What XLA:GPU writes because two products have their results in different orders.

Attention with several query heads for a key head multiplies queries and keys into scores whose last
dimension is the group (`btkge,bske->bkstg`), and transposes them; the gradient of the
probabilities has keys last. Elementwise, both meet. XLA's layout assignment computes all that is
elementwise in the order of the one, and copies the other: found by compiling such layers for an
H100, where the copy is written in float32, with the cast of its only reader, if several kernels
read it. The softmax is not over rows then, and what is made of both is written by one kernel with
what is made of the first alone: the gradient of the scores with the probabilities. That is so too
where rows are only swapped for columns, as without groups, and nothing is copied then. Not so
where the one that would be copied is in float32, nor where both products are transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.sharding.epilogues import InstructionValues, V, name_of

FEWEST_DIMS = 4
"""Of what is batched and has rows and columns and groups of them."""

Order = tuple[int, ...]


class Ordered(NamedTuple):
    """A value's dimensions from the outermost to the innermost, as a product wrote them."""

    product: int  # the number of the instruction
    dims: Order


def orders_of(program: Sequence[InstructionValues[V]]) -> dict[V, Ordered]:
    """In which order a program's values have their dimensions that are made of products' results.

    Transposed, and element by element; where several products meet, in the order of the first.
    """
    orders: dict[V, Ordered] = {}
    for number, made in enumerate(program):
        if made.eqn is None or len(made.results) != 1:
            continue
        name, (result,), shape = name_of(made), made.results, made.eqn.outvars[0].aval.shape
        if name == "dot_general" and len(shape) >= FEWEST_DIMS:
            orders[result] = Ordered(number, tuple(range(len(shape))))
        elif name == "transpose" and (operand := made.operands[0]) in orders:
            known, places = orders[operand], tuple(made.eqn.params["permutation"])
            orders[result] = Ordered(known.product, tuple(map(places.index, known.dims)))
        elif name in ELEMENTWISE:
            met = [orders[v] for v in made.operands if v in orders]
            orders.update({result: min(met)} if met else {})
    return orders


def turned_products(
    program: Sequence[InstructionValues[int]],
    readers: Sequence[Sequence[int]],
    root: Callable[[int], int],
) -> dict[int, int]:
    """Values that are written in another order than a product has them in, and the first product's.

    Args:
      program: in order.
      readers: of each buffer, the numbers of the instructions that read it.
      root: the value whose buffer one is.
    """
    orders = orders_of(program)
    turned: dict[int, set[int]] = {}  # products that meet others, and the instructions where
    firsts: dict[int, int] = {}
    swapped: set[int] = set()  # rows for columns: kernels read what they need in tiles
    for number, made in enumerate(program):
        if name_of(made) not in ELEMENTWISE or not made.results or made.results[0] not in orders:
            continue
        assert made.eqn is not None
        first, shape = orders[made.results[0]], made.eqn.outvars[0].aval.shape
        for other in (orders[v] for v in made.operands if v in orders):
            is_plain = other.dims == tuple(sorted(other.dims))
            if not is_plain or not is_short(program[other.product]):
                continue
            own, wanted = (_places(x.dims, shape) for x in (other, first))
            if own[-1:] != wanted[-1:]:
                turned.setdefault(other.product, set()).add(number)
                firsts.setdefault(other.product, first.product)
                if own == (*wanted[:-2], *wanted[:-3:-1]):
                    swapped.add(other.product)
    written: dict[int, int] = {}
    for number, meetings in turned.items():
        value = root(program[number].results[0])
        while len(readers[value]) == 1 and number not in swapped:
            (reader,) = readers[value]
            if reader in meetings or name_of(program[reader]) not in ELEMENTWISE:
                break
            value = root(program[reader].results[0])
        if len(readers[value]) > 1 or number in swapped:
            written[value] = root(program[firsts[number]].results[0])
    return written


def made_together(
    program: Sequence[InstructionValues[int]],
    made_of: Mapping[int, frozenset[int]],
    turned: Mapping[int, int],
    readers: Sequence[Sequence[int]],
    root: Callable[[int], int],
) -> Iterable[tuple[int, int, frozenset[int]]]:
    """Of kernels that write more than one result: the last, an operand, and the other results.

    Args:
      program: in order.
      made_of: the buffers that values are computed from.
      turned: as `turned_products` has them.
      readers: of each buffer, the numbers of the instructions that read it.
      root: the value whose buffer one is.
    """
    first_of: dict[int, int] = {first: first for first in turned.values()}
    before: dict[int, set[int]] = {first: set() for first in first_of}  # what products read of it
    for made in program:
        if name_of(made) not in ELEMENTWISE:
            continue
        result, own = root(made.results[0]), [root(v) for v in made.operands if v is not None]
        sources = frozenset[int]().union(*(made_of.get(v, frozenset()) for v in own))
        if made_of.get(result) != frozenset((result,)) or result in turned:
            continue
        met = sources.intersection(turned)
        if not met:
            for first in {first_of[v] for v in sources if v in first_of}:
                first_of[result] = first
                if any(name_of(program[reader]) == "dot_general" for reader in readers[result]):
                    before[first].add(result)
        elif beside := set[int]().union(*(before[turned[v]] for v in met)):
            yield result, next(v for v in own if met & made_of[v]), frozenset(beside)


def is_short(made: InstructionValues[int]) -> bool:
    """Whether a product has few bits, which are widened for what comes after it."""
    return made.eqn is not None and made.eqn.outvars[0].aval.dtype.itemsize < 4


def _places(dims: Order, shape: Sequence[int]) -> Order:
    return tuple(d for d in dims if shape[d] > 1)
