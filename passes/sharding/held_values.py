"""Which values of a program are buffers, and of which buffers those who read the others make them.

One account for the lowered program and for the integer program's rows: both hand in their
equations. The rules are those of `compiler_rules`, for compilers that fuse at any distance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, NamedTuple

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.primitives import PRODUCTS
from autopar.passes.sharding.column_softmaxes import column_exponentials
from autopar.passes.sharding.compiler_rules import CompilerRules, is_same_buffer
from autopar.passes.sharding.epilogues import (
    InstructionValues,
    V,
    name_of,
    numbered,
    takes_part,
    without_epilogues,
)
from autopar.passes.sharding.kernel_times import cycles, kernel_seconds
from autopar.passes.sharding.product_kernels import mapped, operand_of, sums_of_convolutions
from autopar.passes.sharding.softmaxes import WIDE, Softmaxes, softmaxes_of
from autopar.passes.sharding.split_softmaxes import split_exponentials
from autopar.passes.sharding.turned_products import made_together, turned_products

SEVERAL = 2
"""Sequences, images or rows of a batch on a device, where nothing is said of it."""
SMALL_BYTES = 4096
"""What is smaller is computed again without asking."""
MADE_AGAIN = ("broadcast_in_dim", "iota")
"""Whose results are no buffers, but where one must be: who reads them makes them."""


@dataclass(frozen=True)
class HeldValues(Generic[V]):
    """What of a program is in memory.

    Values have numbers here: sets of numbers are quicker than sets of variables in layouts.

    Args:
      numbers: of the program's values.
      values: by their numbers.
      roots: of every value, the one whose buffer it is under a new name; of others, itself.
      made_of: of every buffer, itself; of every other value, the buffers it is computed from.
      epilogue_of: of every buffer that a product writes instead of its result: that result.
      together: what is written in turn with other results, so over nothing that is read.
      across: exponentials whose sums run across rows: no kernel reads rows of them twice.
      late: what the kernel of another result writes beside that, and which.
    """

    numbers: Mapping[V, int]
    values: Sequence[V]
    roots: Sequence[int]
    made_of: Mapping[int, frozenset[int]]
    epilogue_of: Mapping[int, int]
    together: Collection[V] = ()
    across: Collection[V] = ()
    late: Mapping[V, V] = field(default_factory=dict)

    def root(self, value: V) -> V:
        """The value whose buffer this one is."""
        number = self.numbers.get(value)
        return value if number is None else self.values[self.roots[number]]

    @cached_property
    def buffers(self) -> frozenset[V]:
        """The values that are buffers of their own."""
        made_of, roots = self.made_of, self.roots
        own = (n for n, found in made_of.items() if len(found) == 1 and n in found)
        return frozenset(self.values[n] for n in own if roots[n] == n)

    def is_held(self, value: V) -> bool:
        """Whether a value is a buffer of its own."""
        return value in self.buffers

    def is_made_again(self, value: V) -> bool:
        """Whether those who read a value compute it from buffers, or it is written as another."""
        number = self.numbers[value]
        return self.made_of.get(number) not in (None, {number})

    def is_renamed(self, value: V) -> bool:
        """Whether a value is another one's buffer under a new name."""
        number = self.numbers.get(value)
        return number is not None and self.roots[number] != number

    def read_by(self, operands: Iterable[V | None]) -> set[V]:
        """The buffers that an instruction reads."""
        numbers = (self.numbers.get(value) for value in operands if value is not None)
        read = self._read([n for n in numbers if n is not None])
        return set(map(self.values.__getitem__, read))

    def _read(self, numbers: Iterable[int]) -> set[int]:
        found: set[int] = set()
        for number in numbers:
            found |= self.made_of.get(self.roots[number], frozenset())
        return found

    def run_times(self, program: Sequence[InstructionValues[V]]) -> list[int]:
        """For each instruction, the number of the one after which it runs: mostly its own.

        What a product writes is made with it, as soon as everything else that this reads is there:
        the sum of a loop's gradients so far, say, which the program has at the end of a trip.
        """
        if not self.epilogue_of:
            return [*range(len(program))]
        made: dict[int, int] = {}
        times = []
        for place, own in enumerate(numbered(program, self.numbers)):
            products = {self.epilogue_of[v] for v in own.results if v in self.epilogue_of}
            read = [v for v in own.operands if v is not None]
            needed = products | self._read(read) if products else set[int]()
            times.append(max((made.get(v, -1) for v in needed), default=place))
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
    each = (v for made in program for v in (*made.operands, *made.results) if v is not None)
    values = [*dict.fromkeys(itertools.chain(inputs, outputs, waited, each))]
    numbers = {value: number for number, value in enumerate(values)}
    own_inputs, own_outputs, own_waited = (
        {numbers[v] for v in some} for some in (inputs, outputs, waited)
    )
    found = _held_numbers(
        numbered(program, numbers),
        own_inputs,
        own_outputs,
        [*map(num_bytes, values)],
        [*map(num_elements, values)],
        rules,
        own_waited,
        lambda number: first_size(values[number]),
    )
    return HeldValues(
        numbers,
        values,
        found.roots,
        found.made_of,
        found.epilogue_of,
        {values[number] for number in found.together},
        {values[number] for number in found.across},
        {values[number]: values[result] for number, result in found.late.items()},
    )


class _HeldNumbers(NamedTuple):
    """What `HeldValues` has, by numbers."""

    roots: list[int]
    made_of: Mapping[int, frozenset[int]]
    epilogue_of: Mapping[int, int]
    together: set[int]
    across: set[int]
    late: Mapping[int, int]


def _held_numbers(
    program: Sequence[InstructionValues[int]],
    inputs: Collection[int],
    outputs: Collection[int],
    size: Sequence[int],
    elements: Sequence[int],
    rules: CompilerRules,
    waited: Collection[int],
    first_size: Callable[[int], int],
) -> _HeldNumbers:
    """The numbers of `HeldValues`, of a program whose values are numbers."""
    num_bytes, num_elements = size.__getitem__, elements.__getitem__
    roots_of = _names(program, size)
    root = roots_of.__getitem__
    fused = [made.eqn is not None and rules.may_be_fused(made.eqn) for made in program]
    operands = [[None if v is None else roots_of[v] for v in made.operands] for made in program]
    renames = [
        bool(made.results) and all(roots_of[v] != v for v in made.results) for made in program
    ]
    readers: list[list[int]] = [[] for _ in size]
    refusing = {roots_of[v] for v in outputs}
    softmaxes = Softmaxes[int](set(), set(), {})
    if rules.softmaxes_are_written:
        softmaxes = softmaxes_of(program, root, first_size)
    names = {*map(name_of, program)} if rules.product_kernels else set[str]()
    maps = mapped(program, root, num_bytes) if "dot_general" in names else {}
    for number, (made, places) in enumerate(zip(program, operands, strict=True)):
        if renames[number]:
            if made.eqn is not None and is_barrier(made.eqn):
                refusing.update(v for v in places if v is not None)
            continue
        if maps and name_of(made) == "dot_general":
            places = [None if v is None else operand_of(v, maps, refusing) for v in places]
        for value in {v: None for v in places if v is not None}:
            readers[value].append(number)
        for place, read in enumerate(places):
            if read is None or read in refusing or _takes_in(made, place, rules):
                continue
            # Products make the gradients of scores, whose dimensions they merge, themselves.
            if not (read in softmaxes.made and name_of(made) in PRODUCTS):
                refusing.add(read)

    if rules.slices_are_read:
        _read_through_parts(program, readers, roots_of)
    turned: dict[int, int] = {}
    across = set[int]()
    if names >= {"dot_general", "transpose"}:
        turned = turned_products(program, readers, root)
        refusing.update(turned)
        across = column_exponentials(program, root)
        refusing |= across
    sums: dict[int, tuple[int, int]] = {}
    if "conv_general_dilated" in names:
        sums = sums_of_convolutions(program, root, num_elements)
    sums = {
        v: summed
        for v, summed in sums.items()
        if v not in refusing and v not in waited and len(readers[v]) == 1
    }
    refusing.update(v for summed in sums.values() for v in summed)
    refusing |= softmaxes.written
    if rules.split_rows:
        refusing |= split_exponentials(program, root, num_elements, rules.split_rows)
    nothing = frozenset[int]()
    made_of: dict[int, frozenset[int]] = {v: frozenset((v,)) for v in inputs}
    ends = dict(made_of)  # `made_of`, as if everything that can be fused were
    chains: dict[int, frozenset[int]] = {}  # what is computed to compute a value
    work: dict[int, int] = {}  # cycles of its last operation, for all elements

    joined = _kernels_reading(program, readers, refusing, roots_of, fused)
    own_cycles = [0 if made.eqn is None else cycles(made.eqn) for made in program]

    def is_quicker_again(value: int, sources: frozenset[int], chain: frozenset[int]) -> bool:
        spent = sum(map(work.__getitem__, chain))
        kept = kernel_seconds(spent, sum(map(num_bytes, sources)) + size[value])
        again = 0.0
        for reader, read in joined(value):
            beside = nothing.union(*(ends[v] for v in read if v in ends and v != value))
            results = program[reader].results
            own = own_cycles[reader] * max(elements[value], *map(num_elements, results), 0)
            moved = sum(map(num_bytes, beside)) + sum(map(num_bytes, results))
            kept += kernel_seconds(own, moved + size[value])
            left = sum(map(num_bytes, sources - beside))
            again += kernel_seconds(own + spent, moved + left)
        return again <= kept

    def moves_less(value: int, sources: frozenset[int]) -> bool:
        often, moved = len(readers[value]), 0
        for reader in readers[value]:
            others = (v for v in operands[reader] if v is not None and v != value)
            beside = nothing.union(*(ends.get(v, nothing) for v in others))
            moved += sum(map(num_bytes, sources - beside))
        return moved < sum(map(num_bytes, sources)) + (1 + often) * size[value]

    for number, made in enumerate(program):
        if renames[number]:
            continue
        own = [v for v in operands[number] if v is not None]
        sources = nothing.union(*(made_of.get(v, nothing) for v in own))
        if softmaxes.beside:
            sources = sources.union(*(softmaxes.beside.get(v, ()) for v in made.results))
        is_part = rules.slices_are_read and takes_part(made)
        if is_part and not refusing.isdisjoint(made.results):
            refusing.update(made.results)  # one kernel writes all parts
        for value in made.results:
            made_of[value] = ends[value] = sources if value in sums else frozenset((value,))
            if value in refusing or not (is_part or fused[number]):
                continue
            ends[value] = nothing.union(*(ends.get(v, nothing) for v in own))
            work[value] = elements[value] * own_cycles[number]
            chain = frozenset((value,)).union(*(chains.get(v, nothing) for v in own))
            is_again = size[value] <= SMALL_BYTES or is_part or name_of(made) in MADE_AGAIN
            if not is_again and rules.counts_operations:
                is_again = is_quicker_again(value, sources, chain)
            elif not is_again:
                is_again = moves_less(value, sources)
            if is_again:
                made_of[value], chains[value] = sources, chain
    together, late = set[int](), dict[int, int]()
    if turned:
        for result, value, beside in list(made_together(program, made_of, turned, readers, root)):
            made_of[value] |= beside
            if size[result] < WIDE * elements[result]:
                together.add(result)
            else:  # it lies where the copy does
                late.update(dict.fromkeys(beside, result))
    epilogue_of: dict[int, int] = {}
    if rules.products_write_epilogues:
        made_of, epilogue_of = without_epilogues(
            program, made_of, root, num_elements, rules, softmaxes.written, outputs
        )
    return _HeldNumbers(roots_of, made_of, epilogue_of, together, across, late)


def _read_through_parts(
    program: Sequence[InstructionValues[int]], readers: list[list[int]], roots: Sequence[int]
) -> None:
    """Let those who read parts of a value be its readers: they read them in the value."""
    for number in range(len(program) - 1, -1, -1):
        made = program[number]
        if takes_part(made):
            through = [reader for v in made.results for reader in readers[roots[v]]]
            for value in {roots[v] for v in made.operands if v is not None}:
                readers[value] = [x for x in readers[value] if x != number] + through


def _kernels_reading(
    program: Sequence[InstructionValues[int]],
    readers: Sequence[Sequence[int]],
    refusing: Collection[int],
    roots: Sequence[int],
    fused: Sequence[bool],
) -> Callable[[int], list[tuple[int, set[int]]]]:
    """The kernels that read a value, by their last instructions, each with all that it reads.

    What one instruction alone reads is computed in that one's kernel.
    """
    kernel: dict[int, int] = {}
    reads: dict[int, set[int]] = {}
    for number in range(len(program) - 1, -1, -1):
        made, last = program[number], number
        if fused[number] and len(made.results) == 1:
            value = roots[made.results[0]]
            if value not in refusing:
                own = {kernel[x] for x in readers[value] if x in kernel}
                last = own.pop() if len(own) == 1 else last
        kernel[number] = last
        reads.setdefault(last, set()).update([roots[v] for v in made.operands if v is not None])

    def kernels(value: int) -> list[tuple[int, set[int]]]:
        return [(last, reads[last]) for last in {kernel[x]: None for x in readers[value]}]

    return kernels


def _takes_in(made: InstructionValues[int], place: int, rules: CompilerRules) -> bool:
    if made.eqn is None:
        return made.is_masked or (made.is_slice and rules.slices_are_read)
    return rules.takes_in(made.eqn, place)


def _names(program: Sequence[InstructionValues[int]], size: Sequence[int]) -> list[int]:
    """Of every value, the one whose buffer it is: mostly itself."""
    roots = [*range(len(size))]
    for made in program:
        if made.eqn is None:
            continue
        if is_barrier(made.eqn):
            pairs = [*zip(made.results, made.operands, strict=True)]
        elif len(made.results) == 1 and len(made.operands) == 1:
            pairs = [(made.results[0], made.operands[0])]
            operand = made.operands[0]
            if operand is None:
                continue
            if not is_same_buffer(made.eqn, size[operand], size[made.results[0]]):
                continue
        else:
            continue
        for new, old in pairs:
            if old is not None:
                roots[new] = roots[old]
    return roots
