"""What products write where they take part in fusion, as on TPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from jax.extend.core import JaxprEqn

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.primitives import PRODUCTS
from autopar.passes.sharding.compiler_rules import CompilerRules, reduces_rows

V = TypeVar("V", bound=Hashable)


class InstructionValues(NamedTuple, Generic[V]):
    """One instruction: its equation (None: it reads and writes buffers), operands and results.

    An operand that nothing makes (a literal) is None. Without an equation, `is_slice`: it takes a
    part of its operand; `is_masked`: it is zero on all devices of a group but one.
    """

    eqn: JaxprEqn | None
    operands: tuple[V | None, ...]
    results: tuple[V, ...]
    is_slice: bool = False
    is_masked: bool = False


def numbered(
    program: Sequence[InstructionValues[V]], numbers: Mapping[V, int]
) -> list[InstructionValues[int]]:
    """The same program of the numbers of its values."""
    return [
        InstructionValues(
            made.eqn,
            tuple([None if v is None else numbers[v] for v in made.operands]),
            tuple([numbers[v] for v in made.results]),
            made.is_slice,
            made.is_masked,
        )
        for made in program
    ]


def name_of(made: InstructionValues[V]) -> str:
    """The name of an instruction's primitive; "" where it has none."""
    return "" if made.eqn is None else made.eqn.primitive.name


def takes_part(made: InstructionValues[V]) -> bool:
    """Whether an instruction's readers can read its result in its operand."""
    return made.is_slice or name_of(made) in ("dynamic_slice", "slice", "split")


def without_epilogues(
    program: Sequence[InstructionValues[V]],
    made_of: Mapping[V, frozenset[V]],
    root: Callable[[V], V],
    num_elements: Callable[[V], int],
    rules: CompilerRules,
    softmaxes: Collection[V],
    outputs: Collection[V],
) -> tuple[dict[V, frozenset[V]], dict[V, V]]:
    """`made_of` where a product writes what is made of its result, if nobody reads that itself.

    And of what products write so: the product.

    Of several products in one sum the last one does; it waits for what else is in the sum. What
    needs a sum or maximum over the result's rows comes after the product; `softmaxes` do not. All
    that an optimizer makes of a gradient, `outputs`, is written at once.
    """
    products: dict[V, list[V]] = {}  # by result: its operands
    users: dict[V, set[V]] = defaultdict(set)
    read: dict[V, frozenset[V]] = {}  # by buffer: of which buffers it is made
    summed: set[V] = set()  # sums and maximums over rows
    for made in program:
        own = [root(v) for v in made.operands if v is not None]
        sources = frozenset[V]().union(*(made_of.get(v, frozenset()) for v in own))
        if name_of(made) in PRODUCTS:
            products[made.results[0]] = own
        roots = [root(v) for v in made.results]
        if made.eqn is not None and not is_barrier(made.eqn) and roots == own:
            continue  # the same buffer
        held = {v for v in roots if made_of.get(v) == frozenset((v,))}
        if made.eqn is not None and reduces_rows(made.eqn):
            held.clear()  # a sum or a maximum is made beside
            summed.update(roots)
        elif not (takes_part(made) or (made.eqn is not None and rules.may_be_fused(made.eqn))):
            held.update(own)  # what reads buffers has no epilogue
        read.update(dict.fromkeys(roots, sources))
        for source in sources:
            users[source] |= held
    results = {root(v) for v in outputs}
    last: dict[V, V] = {}  # by what is made of products that nobody else reads: the last of these
    for product in products:
        if len(users[product]) == 1 or users[product] <= results:
            last.update(dict.fromkeys(users[product], product))

    def is_after(user: V, product: V) -> bool:
        return any(v in summed and product in read[v] for v in read[user])

    gone: dict[V, frozenset[V]] = {}
    epilogue_of: dict[V, V] = {}
    for product, own in products.items():
        own_users = users[product]
        if len(own_users) == 1 or own_users <= results:
            is_fused = all(
                user != product
                and last[user] == product
                and num_elements(user) == num_elements(product)
                and (user in softmaxes or not is_after(user, product))
                for user in own_users
            )
            if is_fused and own_users:
                gone[product] = frozenset[V]().union(*(made_of.get(v, frozenset()) for v in own))
                if len(own_users) == 1:
                    epilogue_of.update(dict.fromkeys(own_users, product))

    def buffers(value: V) -> frozenset[V]:
        return frozenset[V]().union(*(gone.get(v, frozenset((v,))) for v in made_of[value]))

    return {value: buffers(value) for value in made_of}, epilogue_of
