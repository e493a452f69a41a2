"""The worst moment of a program whose compiler fuses at any distance, by `compiler_rules`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable

from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.graph.scans import ScanParts
from autopar.passes.sharding.compiler_rules import IN_PLACE, CompilerRules, reduces_rows, takes_in
from autopar.passes.sharding.held_values import HeldValues, InstructionValues, held_values
from autopar.passes.sharding.reshard import adding
from autopar.passes.sharding.run_order import ties
from autopar.passes.sharding.scopes import aval_shape, dtype_bytes, itemsize
from autopar.passes.sharding.spmd_program import (
    Block,
    Compute,
    Instruction,
    Loop,
    Relayout,
    ShardedValue,
    is_literal,
    local_bytes,
    reads,
    writes,
)

Mesh = tuple[int, ...]
Alive = dict[str | ShardedValue, int]


def fused_peak(
    block: Block,
    mesh: Mesh,
    rules: CompilerRules,
    kept: Collection[ShardedValue],
    slices: Collection[ShardedValue] = (),
) -> tuple[int, Alive]:
    """Bytes of a device at the worst moment of a block, and what is there.

    Args:
      block: what runs.
      mesh: the logical mesh.
      rules: of the compiler.
      kept: inputs that somebody else reads afterwards.
      slices: inputs that are read from larger buffers, which are counted outside.
    """
    return _Moments(block, mesh, rules, kept, slices).worst()


class _Moments:
    """One block's buffers in time."""

    def __init__(
        self,
        block: Block,
        mesh: Mesh,
        rules: CompilerRules,
        kept: Collection[ShardedValue],
        slices: Collection[ShardedValue],
    ) -> None:
        self.block, self.mesh, self.rules, self.slices = block, mesh, rules, slices
        self.sizes: dict[ShardedValue, int] = {}
        self.constants = _of_constants(block.instructions)
        outputs = [v for v in (*block.outputs, *kept) if not is_literal(v)]
        self.held: HeldValues[ShardedValue] = held_values(
            [made_by(x) for x in block.instructions],
            block.inputs,
            outputs,
            self.size,
            self.elements,
        )
        self.last: dict[ShardedValue, int] = {}
        end = len(block.instructions)
        for time, instruction in enumerate(block.instructions):
            if self.runs(instruction):
                self.last.update(dict.fromkeys(self.read(instruction), time))
        self.reduced, self.filters = self._reductions(), self._filter_updates(outputs)
        self.turned = {
            x.target
            for x in block.instructions
            if isinstance(x, Relayout) and any(s.kind == "all-gather" and s.dim for s in x.steps)
        }
        if rules.keeps_order:
            for time, tie in ties(block, mesh).items():
                for value in self.held.read_by(tie.sources):
                    self.last[value] = max(self.last.get(value, 0), time)
        for value in self.held.read_by(outputs):
            self.last[value] = end

    def size(self, value: ShardedValue) -> int:
        if value not in self.sizes:
            self.sizes[value] = local_bytes(value, self.mesh)
        return self.sizes[value]

    def elements(self, value: ShardedValue) -> int:
        return self.size(value) // itemsize(value.atom.aval)

    def read(self, instruction: Instruction) -> set[ShardedValue]:
        """The buffers that an instruction reads, but for constants that a loop makes itself."""
        found = self.held.read_by(reads(instruction))
        return found - self.constants if isinstance(instruction, Loop) else found

    def runs(self, instruction: Instruction) -> bool:
        """Whether an instruction is a kernel's last: it writes a buffer."""
        results = writes(instruction)
        return not results or any(map(self.held.is_held, results))

    def worst(self) -> tuple[int, Alive]:
        freed: dict[int, list[ShardedValue]] = defaultdict(list)
        for value, time in self.last.items():
            freed[time].append(value)
        alive: Alive = {v: self.size(v) for v in self.block.inputs if v not in self.slices}
        copied = self._copied_slices()
        total = sum(alive.values())
        best, there = total, dict(alive)
        for time, instruction in enumerate(self.block.instructions):
            dying = [v for v in freed[time] if v in alive]
            results = [v for v in writes(instruction) if self._is_new(v, alive)]
            for value in copied[time]:
                alive[value] = self.size(value)
                total += alive[value]
            inside, beside = self._inside(instruction)
            if isinstance(instruction, Loop):
                again = (v for v in self.read(instruction) if self.last[v] > time)
                inside += sum(self.size(v) for v in again if v in self.turned)
            for value in results:
                taken = self._taken_over(instruction, value, dying)
                if taken is not None:
                    dying.remove(taken)
                    total -= alive.pop(taken)
                alive[value] = self.size(value)
                total += alive[value]
            if total + inside > best:
                best, there = total + inside, {**alive, **beside}
            for value in freed[time]:
                total -= alive.pop(value, 0)
        return best, there

    def _reductions(self) -> dict[ShardedValue, set[ShardedValue]]:
        """The results of reductions in kernels with their readers, and the buffers that they read.

        Those kernels hold whole rows.
        """
        return {
            value: self.held.read_by(reads(instruction))
            for instruction in self.block.instructions
            if isinstance(instruction, Compute) and reduces_rows(instruction.eqn)
            for value in instruction.results
        }

    def _filter_updates(self, outputs: Iterable[ShardedValue]) -> dict[ShardedValue, int]:
        """For the gradients of filters, the bytes of all that their updates write.

        An update runs as soon as its gradient is there.
        """
        gradients: set[ShardedValue] = set()
        found: dict[ShardedValue, int] = defaultdict(int)
        ends = {self.held.root(v) for v in outputs}
        for instruction in self.block.instructions:
            results = writes(instruction)
            if isinstance(instruction, Relayout):
                source = self.held.root(instruction.source)
                gradients.update(results if source in gradients else ())
            if not isinstance(instruction, Compute):
                continue
            name = instruction.eqn.primitive.name
            is_cast = name == "convert_element_type" and self.read(instruction) <= gradients
            if name == "conv_general_dilated" or (is_cast and ends.isdisjoint(results)):
                gradients.update(results)
                continue
            for value in results:
                of = self.held.read_by(reads(instruction)) & gradients
                if value in ends and of and self.held.is_held(value):
                    found[next(iter(of))] += self.size(value)
        return found

    def _is_new(self, value: ShardedValue, alive: Alive) -> bool:
        return value in self.last and value not in alive and self.held.is_held(value)

    def _copied_slices(self) -> dict[int, list[ShardedValue]]:
        """When slices are copied, of those that somebody reads as buffers."""
        found: dict[int, list[ShardedValue]] = defaultdict(list)
        first: dict[ShardedValue, int] = {}
        needed: set[ShardedValue] = set()
        for time, instruction in enumerate(self.block.instructions):
            made = made_by(instruction)
            if made.results and all(v in self.held.buffer_of for v in made.results):
                continue
            for place, value in enumerate(made.operands):
                buffer = None if value is None else self.held.root(value)
                if buffer in self.slices:
                    assert buffer is not None
                    first.setdefault(buffer, time)
                    if made.eqn is None or not takes_in(made.eqn, place):
                        needed.add(buffer)
        for value in needed:
            if value in self.last:
                found[first[value]].append(value)
        return found

    def _taken_over(
        self, instruction: Instruction, result: ShardedValue, dying: Iterable[ShardedValue]
    ) -> ShardedValue | None:
        """The buffer into which a result is written, of those that are read for the last time."""
        size = self.size(result)
        if isinstance(instruction, Loop):
            consts, carry = _counts(instruction)
            place = instruction.results.index(result)
            operand = instruction.operands[consts + place] if place < carry else None
            if operand is None or is_literal(operand):
                return None
            own = self.held.read_by([operand])
            return next((v for v in dying if v in own and self.size(v) == size), None)
        if isinstance(instruction, Relayout):
            return None
        if not isinstance(instruction, Compute):
            return None
        name = instruction.eqn.primitive.name
        if name in IN_PLACE:
            own = self.held.read_by([v for v in instruction.operands[:1] if not is_literal(v)])
            return next((v for v in dying if v in own and self.size(v) == size), None)
        if name not in ELEMENTWISE:
            return None
        twice = {v for r in self.read(instruction) for v in self.reduced.get(r, ())}
        return next((v for v in dying if self.size(v) == size and v not in twice), None)

    def _inside(self, instruction: Instruction) -> tuple[int, Alive]:
        """What a loop's or branch's body, or a sum in another dtype, needs beside its results."""
        if isinstance(instruction, Compute):
            size = sum(self.filters.get(v, 0) for v in instruction.results)
            return size, {"the update of a filter": size} if size else {}
        if isinstance(instruction, Relayout):
            size = sum_bytes(instruction, self.mesh)
            sums: Alive = {f"sums of a gradient in {instruction.sum_dtype}": size} if size else {}
            update = self.filters.get(instruction.target, 0)
            return size + update, sums | ({"the update of a filter": update} if update else {})
        worst, there = 0, Alive()
        if isinstance(instruction, Loop):
            consts, carry = _counts(instruction)
            inputs = instruction.body.inputs
            entering, slices = inputs[: consts + carry], inputs[consts + carry :]
            parts = [(instruction.body, entering[:consts], slices, {*entering})]
        else:
            parts = [(body, body.inputs, (), {*body.inputs}) for body in instruction.blocks]
        for body, kept, slices, entered in parts:
            size, alive = fused_peak(body, self.mesh, self.rules, kept, slices)
            size -= sum(map(self.size, entered))
            if size > worst:
                worst, there = size, {v: x for v, x in alive.items() if v not in entered}
        return worst, there


def made_by(instruction: Instruction) -> InstructionValues[ShardedValue]:
    """An instruction as `held_values` takes it."""
    if isinstance(instruction, Compute):
        operands = tuple(None if is_literal(v) else v for v in instruction.operands)
        return InstructionValues(instruction.eqn, operands, instruction.results)
    return InstructionValues(None, reads(instruction), writes(instruction))


def sum_bytes(relayout: Relayout, mesh: Mesh) -> int:
    """What is added in another dtype is there before and after the sum in that dtype as well."""
    moves = list(relayout.moves()) if relayout.sum_dtype else []
    inside = [moves[place] for place in adding(relayout.steps)] if moves else []
    if not inside:
        return 0
    whole = math.prod(aval_shape(relayout.source.atom))
    (first, dtype, _), (last, *_) = inside[0], inside[-1]
    before, after = (
        dtype_bytes(dtype) * (whole // parts) for parts in (first.parts_in, last.parts_out)
    )
    return max(before + after - local_bytes(relayout.target, mesh), after)


def _counts(loop: Loop) -> tuple[int, int]:
    parts = ScanParts.of(loop.eqn)
    return parts.num_consts, parts.num_carry


def _of_constants(instructions: Iterable[Instruction]) -> set[ShardedValue]:
    """What is made of constants alone by broadcasts and casts."""
    found: set[ShardedValue] = set()
    for instruction in instructions:
        if isinstance(instruction, Compute):
            is_plain = instruction.eqn.primitive.name in _PLAIN
        else:
            is_plain = isinstance(instruction, Relayout)
        if is_plain and all(v in found for v in reads(instruction)):
            found.update(writes(instruction))
    return found


_PLAIN = frozenset(("broadcast_in_dim", "convert_element_type", "iota", "reshape"))
