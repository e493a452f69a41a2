"""Which values of a program are buffers, and of which buffers those who read the others make them.

One account for the lowered program and for the integer program's rows: both hand in their
equations. The rules are those of `compiler_rules`, for compilers that fuse at any distance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.primitives import PRODUCTS
from autopar.passes.sharding.compiler_rules import CompilerRules, is_same_buffer
from autopar.passes.sharding.epilogues import (
    InstructionValues,
    V,
    name_of,
    takes_part,
    without_epilogues,
)
from autopar.passes.sharding.kernel_times import cycles, kernel_seconds
from autopar.passes.sharding.product_kernels import mapped, operand_of, sums_of_convolutions
from autopar.passes.sharding.softmaxes import Softmaxes, softmaxes_of
from autopar.passes.sharding.split_softmaxes import split_exponentials
from autopar.passes.sharding.turned_products import made_together, turned_products

SEVERAL = 2
"""Sequences, images or rows of a batch on a device, where nothing is said of it."""
SMALL_BYTES = 4096
"""What is smaller is computed again without asking."""


@dataclass(frozen=True)
class HeldValues(Generic[V]):
    """What of a program is in memory.

    Args:
      buffer_of: a value that is another one's buffer under a new name, and that one.
      made_of: of every buffer, itself; of every other value, the buffers it is computed from.
      epilogue_of: of every buffer that a product writes instead of its result: that result.
      together: what is written in turn with other results, so over nothing that is read.
    """

    buffer_of: Mapping[V, V]
    made_of: Mapping[V, frozenset[V]]
    epilogue_of: Mapping[V, V]
    together: Collection[V] = ()

    def root(self, value: V) -> V:
        """The value whose buffer this one is."""
        return self.buffer_of.get(value, value)

    def is_held(self, value: V) -> bool:
        """Whether a value is a buffer of its own."""
        return value not in self.buffer_of and self.made_of.get(value) == frozenset((value,))

    def read_by(self, operands: Sequence[V | None]) -> set[V]:
        """The buffers that an instruction reads."""
        found: set[V] = set()
        for value in operands:
            if value is not None:
                found |= self.made_of.get(self.root(value), frozenset())
        return found

    def run_times(self, program: Sequence[InstructionValues[V]]) -> list[int]:
        """For each instruction, the number of the one after which it runs: mostly its own.

        What a product writes is made with it, as soon as everything else that this reads is there:
        the sum of a loop's gradients so far, say, which the program has at the end of a trip.
        """
        made: dict[V, int] = {}
        times = []
        for number, own in enumerate(program):
            products = {self.epilogue_of[v] for v in own.results if v in self.epilogue_of}
            needed = products | self.read_by(own.operands) if products else set[V]()
            times.append(max((made.get(v, -1) for v in needed), default=number))
            made.update(dict.fromkeys(own.results, times[-1]))
        return times


def held_values(
    program: Sequence[InstructionValues[V]],
    inputs: Collection[V],
    outputs: Collection[V],
    num_bytes: Callable[[V], int],
    num_elements: Callable[[V], int],
    rules: CompilerRules,
    waited: Collection[V] = (),
    first_size: Callable[[V], int] = lambda _: SEVERAL,
) -> HeldValues[V]:
    """What of a program is in memory.

    Args:
      program: its instructions in order.
      inputs: buffers from the beginning.
      outputs: what must be a buffer at the end.
      num_bytes: of a value.
      num_elements: of a value.
      rules: of the compiler.
      first_size: of a device's part of a value, along its first dimension.
      waited: what passes a barrier that the program does not have (`run_order.ties`).
    """
    buffer_of = _names(program, num_bytes)

    def root(value: V) -> V:
        return buffer_of.get(value, value)

    readers: dict[V, list[InstructionValues[V]]] = defaultdict(list)
    refusing: set[V] = {root(value) for value in outputs}
    softmaxes = Softmaxes[V](set(), set(), {})
    if rules.softmaxes_are_written:
        softmaxes = softmaxes_of(program, root, first_size)
    maps = mapped(program, root, num_bytes) if rules.product_kernels else {}
    for made in program:
        places = [None if v is None else root(v) for v in made.operands]
        if made.results and all(v in buffer_of for v in made.results):
            if made.eqn is not None and is_barrier(made.eqn):
                refusing.update(v for v in places if v is not None)
            continue
        if rules.product_kernels and name_of(made) == "dot_general":
            places = [None if v is None else operand_of(v, maps, refusing) for v in places]
        for value in dict.fromkeys(v for v in places if v is not None):
            readers[value].append(made)
        for place, read in enumerate(places):
            if read is None or _takes_in(made, place, rules):
                continue
            # Products make the gradients of scores, whose dimensions they merge, themselves.
            if not (read in softmaxes.made and name_of(made) in PRODUCTS):
                refusing.add(read)

    if rules.slices_are_read:
        _read_through_parts(program, readers, root)
    turned: dict[V, V] = {}
    if rules.product_kernels:
        turned = turned_products(program, readers, root)
        refusing.update(turned)
    sums = sums_of_convolutions(program, root, num_elements) if rules.product_kernels else {}
    sums = {
        v: summed
        for v, summed in sums.items()
        if v not in refusing and v not in waited and len(readers[v]) == 1
    }
    refusing.update(v for summed in sums.values() for v in summed)
    refusing |= softmaxes.written
    if rules.split_rows:
        refusing |= split_exponentials(program, root, num_elements, rules.split_rows)
    made_of: dict[V, frozenset[V]] = {v: frozenset((v,)) for v in inputs}
    roots = dict(made_of)  # as if everything that can be fused were
    chains: dict[V, frozenset[V]] = defaultdict(frozenset)  # what is computed to compute a value
    work: dict[V, int] = {}  # cycles of its last operation, for all elements

    joined = _kernels_reading(program, readers, refusing, root, rules)

    def is_quicker_again(value: V, sources: frozenset[V], chain: frozenset[V]) -> bool:
        size, spent = num_bytes(value), sum(map(work.__getitem__, chain))
        kept = kernel_seconds(spent, sum(map(num_bytes, sources)) + size)
        again = 0.0
        for reader, operands in joined(value):
            beside: set[V] = set()
            for other in operands:
                if other != value:
                    beside |= roots.get(other, frozenset())
            own = 0 if reader.eqn is None else cycles(reader.eqn)
            own *= max((num_elements(v) for v in (value, *reader.results)), default=0)
            moved = sum(map(num_bytes, beside)) + sum(map(num_bytes, reader.results))
            kept += kernel_seconds(own, moved + size)
            again += kernel_seconds(own + spent, moved + sum(map(num_bytes, sources - beside)))
        return again <= kept

    def moves_less(value: V, sources: frozenset[V]) -> bool:
        size, often, moved = num_bytes(value), len(readers[value]), 0
        for reader in readers[value]:
            beside: set[V] = set()
            for other in reader.operands:
                if other is not None and root(other) != value:
                    beside |= roots.get(root(other), frozenset())
            moved += sum(map(num_bytes, sources - beside))
        return moved < sum(map(num_bytes, sources)) + (1 + often) * size

    for made in program:
        if made.results and all(v in buffer_of for v in made.results):
            continue
        own = [root(v) for v in made.operands if v is not None]
        sources = frozenset[V]().union(*(made_of.get(v, frozenset()) for v in own))
        sources |= frozenset[V]().union(*(softmaxes.beside.get(v, ()) for v in made.results))
        is_part = rules.slices_are_read and takes_part(made)
        if is_part and not refusing.isdisjoint(made.results):
            refusing.update(made.results)  # one kernel writes all parts
        for value in made.results:
            made_of[value] = roots[value] = sources if value in sums else frozenset((value,))
            if value in refusing or not (is_part or (made.eqn and rules.may_be_fused(made.eqn))):
                continue
            roots[value] = frozenset[V]().union(*(roots.get(v, frozenset()) for v in own))
            work[value] = 0 if made.eqn is None else num_elements(value) * cycles(made.eqn)
            chain = frozenset((value,)).union(*(chains[v] for v in own))
            small = num_bytes(value) <= SMALL_BYTES or is_part or name_of(made) in _ALWAYS
            is_again = small
            if not small and rules.counts_operations:
                is_again = is_quicker_again(value, sources, chain)
            elif not small:
                is_again = moves_less(value, sources)
            if is_again:
                made_of[value], chains[value] = sources, chain
    together: set[V] = set()
    if turned:
        for result, value, beside in list(made_together(program, made_of, turned, readers, root)):
            made_of[value] |= beside
            together.add(result)
    epilogue_of: dict[V, V] = {}
    if rules.products_write_epilogues:
        made_of, epilogue_of = without_epilogues(
            program, made_of, root, num_elements, rules, softmaxes.written, outputs
        )
    return HeldValues(buffer_of, made_of, epilogue_of, together)


def _read_through_parts(
    program: Sequence[InstructionValues[V]],
    readers: dict[V, list[InstructionValues[V]]],
    root: Callable[[V], V],
) -> None:
    """Let those who read parts of a value be its readers: they read them in the value."""
    for made in reversed(program):
        if takes_part(made):
            through = [reader for v in made.results for reader in readers[root(v)]]
            for value in {root(v) for v in made.operands if v is not None}:
                readers[value] = [x for x in readers[value] if x is not made] + through


def _kernels_reading(
    program: Sequence[InstructionValues[V]],
    readers: Mapping[V, list[InstructionValues[V]]],
    refusing: Collection[V],
    root: Callable[[V], V],
    rules: CompilerRules,
) -> Callable[[V], list[tuple[InstructionValues[V], set[V]]]]:
    """The kernels that read a value, each with all that it reads.

    What one instruction alone reads is computed in that one's kernel.
    """
    kernel: dict[int, InstructionValues[V]] = {}
    reads: dict[int, set[V]] = {}
    for made in reversed(program):
        last = made
        if len(made.results) == 1 and made.eqn is not None and rules.may_be_fused(made.eqn):
            value = root(made.results[0])
            own = {id(kernel[id(x)]): kernel[id(x)] for x in readers[value] if id(x) in kernel}
            if len(own) == 1 and value not in refusing:
                (last,) = own.values()
        kernel[id(made)] = last
        reads.setdefault(id(last), set()).update(root(v) for v in made.operands if v is not None)

    def found(value: V) -> list[tuple[InstructionValues[V], set[V]]]:
        kernels = {id(kernel[id(x)]): kernel[id(x)] for x in readers[value]}
        return [(last, reads[id(last)]) for last in kernels.values()]

    return found


def _takes_in(made: InstructionValues[V], place: int, rules: CompilerRules) -> bool:
    if made.eqn is None:
        return made.is_masked or (made.is_slice and rules.slices_are_read)
    return rules.takes_in(made.eqn, place)


_ALWAYS = ("broadcast_in_dim", "iota")


def _names(program: Sequence[InstructionValues[V]], num_bytes: Callable[[V], int]) -> dict[V, V]:
    """The values that are others' buffers."""
    found: dict[V, V] = {}
    for made in program:
        if made.eqn is None:
            continue
        if is_barrier(made.eqn):
            pairs = list(zip(made.results, made.operands, strict=True))
        elif len(made.results) == 1 and len(made.operands) == 1:
            pairs = [(made.results[0], made.operands[0])]
            operand = made.operands[0]
            if operand is None:
                continue
            if not is_same_buffer(made.eqn, num_bytes(operand), num_bytes(made.results[0])):
                continue
        else:
            continue
        found.update((new, found.get(old, old)) for new, old in pairs if old is not None)
    return found
