"""A block's buffers in time, where its compiler fuses at any distance, by `compiler_rules`."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.sharding.buffer_sizes import BufferSizes
from autopar.passes.sharding.compiler_rules import IN_PLACE, CompilerRules, reads_buffer
from autopar.passes.sharding.early_updates import early_times
from autopar.passes.sharding.filling_numbers import beginnings, filling_numbers
from autopar.passes.sharding.fills_in_turn import fills_in_turn
from autopar.passes.sharding.heap import HeapBuffer
from autopar.passes.sharding.held_values import HeldValues, held_values
from autopar.passes.sharding.instruction_values import Mesh, loop_counts, made_by, sum_bytes
from autopar.passes.sharding.kept_zeros import kept_zeros
from autopar.passes.sharding.late_sums import late_times
from autopar.passes.sharding.row_kernels import RowKernels
from autopar.passes.sharding.run_order import after_ties, products_left, ties
from autopar.passes.sharding.scopes import aval_shape
from autopar.passes.sharding.spmd_program import (
    Block,
    Branch,
    Compute,
    Instruction,
    Loop,
    Relayout,
    ShardedValue,
    is_literal,
    reads,
    writes,
)
from autopar.passes.sharding.turned_gathers import copied_for_loops
from autopar.passes.sharding.turned_images import turned_images
from autopar.passes.sharding.workspaces import workspace

DURING = 0.999
"""Until when after its beginning a loop or a branch runs."""

Alive = dict[str | ShardedValue, int]
_Inside = tuple[int, Alive, list[HeapBuffer]]


class Moments:
    """One block's buffers in time."""

    def __init__(
        self,
        block: Block,
        mesh: Mesh,
        rules: CompilerRules,
        kept: Collection[ShardedValue],
        slices: Collection[ShardedValue] = (),
        apart: Collection[ShardedValue] = (),
        in_body: bool = False,
    ) -> None:
        self.mesh, self.rules, self.slices, self.in_body = mesh, rules, slices, in_body
        self.size = size = BufferSizes(block, mesh, rules)
        self.entering = set(block.inputs)
        self.constants = filling_numbers(block.instructions, rules)
        self.buffers: list[HeapBuffer] = []  # once the worst moment was found
        self.since: dict[str | ShardedValue, int] = {}  # the same
        self.filling: set[ShardedValue] = set()  # constants that are buffers under other names
        outputs = [v for v in (*block.outputs, *kept) if not is_literal(v)]
        program = [made_by(x) for x in block.instructions]
        waiting = ties(block, mesh, rules.keeps_order)
        self.held: HeldValues[ShardedValue] = held_values(
            program,
            block.inputs,
            outputs,
            size.plain,
            size.elements,
            rules,
            {v for tie in waiting.values() for v in tie.results},
            size.first_size,
        )
        size.rename(self.held.root)
        size.leave_out([*map(self.held.root, apart)])
        times = self.held.run_times(program)
        left = products_left(block, mesh) if rules.leaves_products else []
        moments: Sequence[Any] = early_times(block, times) if rules.keeps_order else times
        if rules.sums_last:
            moments = late_times(block, self.held, times, mesh, left)
        order = sorted(range(len(program)), key=moments.__getitem__)
        instructions = tuple(block.instructions[number] for number in order)
        if instructions != block.instructions:
            waiting = ties(replace(block, instructions=instructions), mesh, rules.keeps_order)
        self.block = block = replace(block, instructions=instructions)
        self.last: dict[ShardedValue, int] = {}
        end = len(block.instructions)
        for time, instruction in enumerate(block.instructions):
            if self.runs(instruction):
                self.last.update(dict.fromkeys(self.read(instruction), time))
        self.rows = RowKernels.of(self.block.instructions, self.held)
        self.turned = copied_for_loops(block) if rules.turns_gathers else frozenset()
        self.early: dict[int, list[ShardedValue]] = defaultdict(list)  # by when they may be there
        made = {v: t for t, x in enumerate(block.instructions) for v in writes(x)}
        for value, result in self.held.late.items():
            self.early[made[result]].append(value)
            self.last[value] = max(self.last.get(value, 0), made[result])
        for time, after in after_ties(block, waiting).items():
            instruction = block.instructions[time]
            for value in self.held.read_by(reads(instruction)) if self.runs(instruction) else ():
                self.last[value] = max(self.last.get(value, 0), after)
        for time, tie in waiting.items():
            for value in self.held.read_by(tie.sources):
                self.last[value] = max(self.last.get(value, 0), time)
            self.early[time] += [gather.target for gather in tie.gathers]
            instruction = block.instructions[time]
            if isinstance(instruction, Relayout):
                after = max(made.get(v, -1) for v in tie.results)
                self.early[after + 1].append(instruction.target)
        for instruction in () if rules.sums_last else left:  # `late_times` has those of TPUs
            self.last.update(dict.fromkeys(self.read(instruction), end))
        self.last.update(dict.fromkeys(self.held.read_by(outputs), end))
        # In the order of the program, not of a set: of the buffers that die, the first is reused.
        place = {v: n for n, v in enumerate((*block.inputs, *made))}
        self.last = dict(sorted(self.last.items(), key=lambda item: place[item[0]]))

    def read(self, instruction: Instruction) -> set[ShardedValue]:
        """The buffers that an instruction reads, but for constants that a loop makes itself."""
        found = self.held.read_by(reads(instruction))
        return found.difference(self.constants) if isinstance(instruction, Loop) else found

    def runs(self, instruction: Instruction) -> bool:
        """Whether an instruction is a kernel's last: it writes a buffer."""
        return not writes(instruction) or any(map(self.held.is_held, writes(instruction)))

    def worst(
        self, more: Mapping[str, Sequence[HeapBuffer]] = MappingProxyType({})
    ) -> tuple[int, Alive]:
        """Bytes at the worst moment and what is there, with `more` buffers than those of values."""
        freed: dict[int, list[ShardedValue]] = defaultdict(list)
        for value, time in self.last.items():
            freed[time].append(value)
        alive: Alive = {v: self.size(v) for v in self.block.inputs if v not in self.slices}
        since: dict[str | ShardedValue, int] = dict.fromkeys(alive, -1)
        alive.update((v, self.size(v)) for v in self._copied_slices())
        filled, copied = self._filled_early()
        more = {**more, "a constant that is copied": copied} if copied else more
        total = sum(alive.values())
        best, there = total, dict(alive)
        buffers = self.buffers = [*itertools.chain(*more.values())]
        self.since = since
        for time, instruction in enumerate(self.block.instructions):
            dying = [v for v in freed[time] if v in alive]
            for value in (*filled[time], *self.early[time]):
                if self._is_new(value, alive):
                    alive[value], since[value] = self.size(value), time
                    total += alive[value]
            own = (v for v in writes(instruction) if v not in self.held.late)
            results = [v for v in own if self._is_new(v, alive)]
            here = {
                what: sum(x.bytes for x in found if x.first <= time <= x.last)
                for what, found in more.items()
            }
            made_inside = list[ShardedValue]()
            for value in results:
                taken = self._taken_over(instruction, value, dying)
                if taken is None and isinstance(instruction, Branch):
                    made_inside.append(value)
                    continue
                if taken is not None:
                    dying.remove(taken)
                    total -= alive.pop(taken)
                alive[value] = self.size(value)
                since[value] = time if taken is None else since.get(taken, 0)
                total += alive[value]
            if isinstance(instruction, Branch):
                inside, beside, held_inside = self._branches(instruction, made_inside)
            else:
                inside, beside, held_inside = self._inside(instruction)
            buffers += (x.between(time, time + 1) for x in held_inside)
            if isinstance(instruction, Loop):
                read = {v for v in self.read(instruction) if self.last[v] > time} & self.turned
                again = sum(map(self.size, read))
                inside += again
                buffers.append(HeapBuffer(again, time, time))
            needed = total + inside + sum(here.values())
            if needed > best:
                best, there = needed, {**alive, **beside}
                there.update({what: size for what, size in here.items() if size})
            for value in made_inside:
                alive[value], since[value] = self.size(value), time
                total += alive[value]
            done = time + DURING if isinstance(instruction, (Loop, Branch)) else time
            for value in freed[time]:
                if value in alive and since.get(value, 0) >= 0:
                    buffers.append(HeapBuffer(alive[value], since.get(value, 0), done))
                total -= alive.pop(value, 0)
        end = len(self.block.instructions)
        left = ((since.get(v, 0), size) for v, size in alive.items())
        buffers += [HeapBuffer(size, first, end) for first, size in left if first >= 0]
        return best, there

    def for_gradients(self) -> dict[str, list[HeapBuffer]]:
        """What the compiler keeps for those of poolings and filters beside values."""
        found: dict[str, list[HeapBuffer]] = {}
        if self.rules.expands_windows:
            zeros = kept_zeros(self.block, self.mesh, self.held)
            found["for the gradient of a pooling"] = zeros
        if self.rules.turns_images:
            images = turned_images(self.block, self.held, self.last, self.size)
            found["for the gradients of filters"] = images
        return found

    def later(self, results: Iterable[ShardedValue]) -> list[HeapBuffer]:
        """What these take, from when they are made; once the worst moment was found."""
        end = len(self.block.instructions)
        made = dict.fromkeys(map(self.held.root, results))
        return [HeapBuffer(self.size.laid(v), self.since[v], end) for v in made if v in self.since]

    def _is_new(self, value: ShardedValue, alive: Alive) -> bool:
        is_filled = value in alive or value in self.filling
        return value in self.last and not is_filled and self.held.is_held(value)

    def _copied_slices(self) -> list[ShardedValue]:
        """The slices that somebody reads as buffers: all are copied when a trip begins."""
        needed: dict[ShardedValue, None] = {}
        for instruction in self.block.instructions if self.slices else ():
            made = made_by(instruction)
            passed = made.eqn is not None and is_barrier(made.eqn)
            if not passed and made.results and all(map(self.held.is_renamed, made.results)):
                continue
            for place, value in enumerate(made.operands):
                buffer = None if value is None else self.held.root(value)
                if buffer in self.slices and (made.eqn is None or reads_buffer(made.eqn, place)):
                    assert buffer is not None
                    needed[buffer] = None
        return [v for v in needed if v in self.last]

    def _filled_early(self) -> tuple[dict[int, list[ShardedValue]], list[HeapBuffer]]:
        """By when they are filled, the buffers that begin as a constant, if that is early.

        One kernel fills all that are alike: stacks of loops, sums that begin as zeros. Or what
        loops carry is filled when the program begins. Inside of a loop one buffer is filled, which
        the others have copies of when they begin, and the last one is: these are told beside.
        """
        found: dict[int, list[ShardedValue]] = defaultdict(list)
        first: dict[Hashable, int] = {}
        copied: dict[Hashable, HeapBuffer] = {}
        in_turn = fills_in_turn(self.block, self.mesh, self.rules, self.constants)
        for time, instruction in enumerate(self.block.instructions):
            for value, constant in beginnings(instruction, self.constants):
                self.filling.update(() if constant is None else (constant,))
                like = value.atom.aval.dtype, aval_shape(value.atom), self.size(value)
                if value not in self.last:
                    continue
                if not self.rules.fills_together:
                    is_carried = isinstance(instruction, Loop) and constant is not None
                    found[0] += [value] if is_carried else []
                elif time in in_turn and constant == in_turn[time].constant:
                    first.setdefault(like, time)
                elif first.setdefault(like, time) < time:
                    if not self.in_body:
                        found[first[like]].append(value)
                        continue
                    copied[like] = HeapBuffer(self.size(value), first[like], time - 1)
        return found, [*copied.values()]

    def _taken_over(
        self, instruction: Instruction, result: ShardedValue, dying: Iterable[ShardedValue]
    ) -> ShardedValue | None:
        """The buffer into which a result is written, of those that are read for the last time."""
        size = self.size(result)
        if isinstance(instruction, Loop):
            consts, carry = loop_counts(instruction)
            place = consts + instruction.results.index(result)
            written = instruction.operands[place : consts + carry][:1]
        elif isinstance(instruction, Branch):
            dying, written = [v for v in dying if v in self.entering], instruction.operands
        elif isinstance(instruction, Compute) and instruction.eqn.primitive.name in IN_PLACE:
            written = instruction.operands[:1]
        elif isinstance(instruction, Compute) and instruction.eqn.primitive.name in ELEMENTWISE:
            written = None
        else:
            return None
        if written is not None:
            own = self.held.read_by([v for v in written if not is_literal(v)])
            return next((v for v in dying if v in own and self.size(v) == size), None)
        if not self.rules.writes_over_temporaries or result in self.held.together:
            dying = [v for v in dying if v in self.entering]
        twice = self.rows.read_twice(self.read(instruction), result, self.size.elements)
        return next((v for v in dying if self.size(v) == size and v not in twice), None)

    def _inside(self, instruction: Instruction) -> _Inside:
        """What a loop's body, or a sum in another dtype, needs beside its results.

        The buffers are from 0 to 1.
        """
        assert not isinstance(instruction, Branch)
        if isinstance(instruction, Compute):
            size, name = workspace(instruction, self.size, self.rules)
            return size, {name: size} if size else {}, [HeapBuffer(size, 0, 0)] if size else []
        if isinstance(instruction, Relayout):
            size = sum_bytes(instruction, self.mesh)
            sums: Alive = {f"sums of a gradient in {instruction.sum_dtype}": size} if size else {}
            return size, sums, [HeapBuffer(size, 0, 0)] if size else []
        rules = self.rules
        if rules.loops_compute_again:
            rules = replace(rules, products_write_epilogues=False)
        consts, carry = loop_counts(instruction)
        inputs = instruction.body.inputs
        entering, slices = inputs[: consts + carry], inputs[consts + carry :]
        body = instruction.body
        moments = Moments(body, self.mesh, rules, entering[:consts], slices, in_body=True)
        return moments.beside(sum(map(self.size, entering)), {*entering})

    def beside(self, outside: int, entered: Collection[ShardedValue], at_least: int = 0) -> _Inside:
        """What a body needs beside so many bytes that are counted outside, and what entered it.

        The buffers are from 0 to 1.
        """
        size, alive = self.worst(self.for_gradients())
        size = max(size, at_least)
        end = len(self.block.instructions) + 2
        buffers = [
            HeapBuffer(x.bytes, (x.first + 1) / end, (x.last + 1) / end) for x in self.buffers
        ]
        there = {v: x for v, x in alive.items() if v not in entered}
        return (size - outside, there, buffers) if size > outside else (0, {}, [])

    def _branches(self, instruction: Branch, inside: Collection[ShardedValue]) -> _Inside:
        """What the worst of its branches needs beside what it is given, and results not `inside`.

        XLA keeps what a branch is given to its end, and copies what it returns of that.
        """
        found: _Inside = 0, {}, []
        for body in instruction.blocks:
            ends = zip(instruction.results, body.outputs, strict=True)
            made = [(v in inside, x) for v, x in ends if not is_literal(x)]
            counted = [x for counts, x in made if counts]  # of one that is several, each
            given = sum(map(self.size, body.inputs))
            apart = {x for _, x in made}.difference(counted, body.inputs)
            moments = Moments(body, self.mesh, self.rules, body.inputs, (), apart, self.in_body)
            at_end = given + sum(map(self.size, counted))
            found = max(found, moments.beside(given, body.inputs, at_end), key=lambda x: x[0])
        return found
