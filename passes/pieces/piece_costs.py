"""What a piece is expected to take, from the same prices that chose its strategies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.primitives import PRODUCTS
from autopar.passes.graph.tested_loops import GOES_ON
from autopar.passes.pieces.pieces import Pieces, StagePiece
from autopar.passes.pieces.taking_over import fresh_outputs
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.sharding.batch_dims import BatchDims
from autopar.passes.sharding.layout import Layout, num_parts
from autopar.passes.sharding.peak_memory import temporary_bytes as block_temporaries
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.reshard import COLLECTIVES, HOST_COPIES
from autopar.passes.sharding.scopes import aval_shape
from autopar.passes.sharding.spmd_program import (
    Block,
    Branch,
    Compute,
    Instruction,
    Loop,
    Relayout,
    ShardedValue,
    SpmdProgram,
    is_literal,
)
from autopar.passes.sharding.unknown_trips import trip_seconds


class InstructionTime(NamedTuple):
    """What a step's runs of an instruction take: all of it, and of that what devices exchange.

    It stands in a `block`; the `stack` is the name stack of the loops around it. It runs so many
    `times`, of which nobody `knows_trips` if it is in a loop of unknown length: one trip counts.
    """

    instruction: Compute | Relayout
    block: Block
    stack: str
    times: int
    knows_trips: bool
    seconds: float
    moving_seconds: float


class PieceCosts:
    """Seconds of blocks on one mesh. `rules` are the factor rules of the stage's equations."""

    def __init__(self, pricing: Pricing, rules: Rules):
        self.pricing, self.rules = pricing, rules

    def seconds(self, block: Block) -> float:
        """Compute and collectives of one run of a block on every device, one after the other.

        The cluster's `overlap` of what moves weights and gradients runs beside the computation of
        the same block.
        """
        seconds = hidden = computing = 0.0
        for instruction in block.instructions:
            each = self._instruction(instruction)
            seconds += each
            if not isinstance(instruction, Relayout):
                computing += each
            elif instruction.purpose in ("parameter", "gradient", "state"):
                hidden += self.pricing.cluster.overlap * each
        return seconds - min(hidden, computing)

    def each(
        self, block: Block, times: int = 1, stack: str = "", knows_trips: bool = True
    ) -> Iterator[InstructionTime]:
        """What the instructions of a block take if it runs so many times.

        Those of loops take all trips; of branches those of the one that takes longest do.

        Args:
          block: the block.
          times: how often it runs.
          stack: the name stack of the loops around it.
          knows_trips: whether that is known.
        """
        for instruction in block.instructions:
            if isinstance(instruction, Loop):
                length: int = instruction.eqn.params["length"]
                inner = inside(stack, instruction.eqn)
                known = knows_trips and GOES_ON not in instruction.eqn.params
                yield from self.each(instruction.body, times * length, inner, known)
            elif isinstance(instruction, Branch):
                longest = max(instruction.blocks, key=self.seconds)
                yield from self.each(longest, times, inside(stack, instruction.eqn), knows_trips)
            else:
                known = knows_trips and not _is_while(instruction)
                taken = self._instruction(instruction), self._moving(instruction)
                each = (times * x for x in taken)
                yield InstructionTime(instruction, block, stack, times, known, *each)

    def by_kind(self, block: Block) -> dict[str, float]:
        """Seconds of one run of a block: "products", "collectives", and the "rest"."""
        total = dict.fromkeys(("products", "collectives", "rest"), 0.0)
        for x in self.each(block):
            if isinstance(x.instruction, Relayout):
                total["collectives"] += x.seconds
            else:
                is_product = x.instruction.eqn.primitive.name in PRODUCTS
                total["products" if is_product else "rest"] += x.seconds
        return total

    def _moving(self, instruction: Compute | Relayout) -> float:
        """Of an instruction, what devices exchange with each other and with their hosts."""
        if isinstance(instruction, Compute):
            return sum(self.pricing.exchange(instruction.eqn, *instruction.layouts))
        total = 0.0
        for step, _, size in instruction.moves():
            if step.kind in (*COLLECTIVES, *HOST_COPIES):  # the rest is a device's own work
                alpha, beta = self.pricing.step(step)
                total += alpha + beta * size
        return total

    def memory_share(self, instruction: Compute) -> float:
        """Of what an equation takes, the share in which it does nothing but move memory."""
        eqn = instruction.eqn
        whole = self.pricing.compute(eqn, self.rules[eqn], self._row_parts(instruction))
        computing = self.pricing.arithmetic(eqn, self.rules[eqn])
        return 1 - min(computing / whole, 1.0) if whole else 0.0

    def rowless_seconds(self, block: Block, dims: BatchDims) -> float:
        """The part of a block's seconds that is as long with fewer rows of the batch.

        Starting kernels and collectives, moving weights and gradients, and what computes with these
        alone; `dims` are the dimensions of values that hold the batch.
        """
        total = 0.0
        for instruction in block.instructions:
            if isinstance(instruction, Relayout):
                lasts = instruction.purpose in ("parameter", "gradient", "state")
                for step, _, size in instruction.moves():
                    alpha, beta = self.pricing.step(step)
                    total += alpha + (beta * size if lasts else 0.0)
            elif isinstance(instruction, Loop):
                length: int = instruction.eqn.params["length"]
                total += length * self.rowless_seconds(instruction.body, dims)
            elif isinstance(instruction, Branch):
                total += max(self.rowless_seconds(inner, dims) for inner in instruction.blocks)
            else:
                atoms = (*instruction.eqn.invars, *instruction.eqn.outvars)
                has_rows = any(isinstance(atom, Var) and dims.get(atom) for atom in atoms)
                whole = self._instruction(instruction)
                least = self._rowless(instruction) if has_rows and whole else whole
                total += min(least, whole)
        return total

    def scalar_sums(self, block: Block) -> float:
        """Seconds of the collectives that complete scalars in one run of a block."""
        total = 0.0
        for instruction in block.instructions:
            if isinstance(instruction, Relayout):
                is_scalar = math.prod(aval_shape(instruction.source.atom)) <= 1
                total += self._instruction(instruction) if is_scalar else 0.0
            elif isinstance(instruction, Loop):
                length: int = instruction.eqn.params["length"]
                total += length * self.scalar_sums(instruction.body)
            elif isinstance(instruction, Branch):
                total += max(map(self.scalar_sums, instruction.blocks))
        return total

    def _rowless(self, instruction: Compute) -> float:
        """What an instruction takes with few rows: to start, and groups that are hardly there."""
        eqn, row_parts = instruction.eqn, self._row_parts(instruction)
        if eqn.primitive.name == "while":
            return 0.0  # at the least: its body may have rows in all that it does
        own = self.pricing.rowless(eqn, self.rules[eqn], row_parts)
        return self.pricing.start(eqn, row_parts) + own / self._division(instruction)

    def _row_parts(self, instruction: Compute) -> int:
        if not instruction.operands:
            return 1
        return self.pricing.row_parts(instruction.eqn, instruction.operands[0].layout)

    def _division(self, instruction: Compute) -> int:
        versions = (*instruction.operands, *instruction.results)
        return _parts(frozenset(version.layout for version in versions), self.pricing.mesh)

    def _instruction(self, instruction: Instruction) -> float:
        if isinstance(instruction, Relayout):
            total = 0.0
            for step, _, size in instruction.moves():
                alpha, beta = self.pricing.step(step)
                total += alpha + beta * size
            return total
        if isinstance(instruction, Compute):
            eqn = instruction.eqn
            if not eqn.outvars or is_barrier(eqn):  # an effect alone
                return 0.0
            if eqn.primitive.name == "while":
                return trip_seconds(eqn, self.rules, self.pricing)
            row_parts = self._row_parts(instruction)
            undivided = self.pricing.compute(eqn, self.rules[eqn], row_parts)
            own = undivided / self._division(instruction)
            exchanged = sum(self.pricing.exchange(eqn, *instruction.layouts))
            return self.pricing.start(eqn, row_parts) + own + exchanged
        if isinstance(instruction, Loop):
            length: int = instruction.eqn.params["length"]
            return length * self.seconds(instruction.body)
        return max(self.seconds(inner) for inner in instruction.blocks)


def _is_while(instruction: Compute | Relayout) -> bool:
    return isinstance(instruction, Compute) and instruction.eqn.primitive.name == "while"


@lru_cache(4096)  # layers have the same layouts
def _parts(layouts: frozenset[Layout], mesh: tuple[int, ...]) -> int:
    """In how many parts the work is divided of what lies so.

    Devices that hold partial sums of a value divide none of the work on it: each has all of it.
    """
    return num_parts({axis for layout in layouts for dim in layout.dims for axis in dim}, mesh)


def inside(stack: str, eqn: JaxprEqn) -> str:
    """The name stack of what is inside of control flow."""
    return "/".join(filter(None, (stack, str(eqn.source_info.name_stack))))


def inner_bytes(pieces: Pieces, peaks: Sequence[int]) -> dict[str, int]:
    """Bytes per device that each piece needs beside what it reads and writes.

    Args:
      pieces: the stages' programs taken apart.
      peaks: bytes per device at the worst point of each stage's whole program.
    """
    if len(pieces.programs) > 1:
        known = dict[object, int]()
        for piece in pieces.pieces:
            if piece.name in pieces.inside:
                continue
            program = pieces.programs[piece.stage]
            same = (program.mesh, program.rules, _wiring(piece.block))
            if same not in known:
                known[same] = temporary_bytes(piece, program)
            pieces.inside[piece.name] = known[same]
        return dict(pieces.inside)
    # A whole step: what it writes takes the memory of what it donates.
    (piece,) = pieces.pieces
    reads, writes, donated = (
        sum(pieces.values[number].bytes_per_device for number in numbers)
        for numbers in (piece.plain().reads, piece.plain().writes, piece.donates)
    )
    return {piece.name: max(peaks[0] - max(reads, reads - donated + writes), 0)}


def _wiring(block: Block) -> tuple[object, ...]:
    """What two blocks have in common that hold the same: equations, variables and layouts.

    Stages that are alike have one program, of which each has pieces of its own.
    """

    def values(versions: Sequence[ShardedValue]) -> tuple[object, ...]:
        return tuple((id(version.atom), version.layout) for version in versions)

    def one(instruction: Instruction) -> tuple[object, ...]:
        if isinstance(instruction, Relayout):
            wires = values((instruction.source, instruction.target))
            return ("moved", wires, instruction.steps, instruction.sum_dtype)
        wires = values(instruction.operands), values(instruction.results)
        if isinstance(instruction, Compute):
            return id(instruction.eqn), wires
        blocks = (instruction.body,) if isinstance(instruction, Loop) else instruction.blocks
        return id(instruction.eqn), wires, tuple(map(_wiring, blocks))

    inside = tuple(map(one, block.instructions))
    return values(block.inputs), inside, values(block.outputs)


def temporary_bytes(piece: StagePiece, program: SpmdProgram) -> int:
    """Bytes per device that a piece needs beside what it reads and writes; found once."""
    block, fresh = piece.block, fresh_outputs(piece)
    outputs = tuple(v for v in block.outputs if not is_literal(v))
    held = frozenset((*block.inputs, *outputs))
    key = frozenset(outputs), held, frozenset(fresh), tuple(map(id, block.instructions))
    if key not in program.temporaries:
        inside = block_temporaries(program, replace(block, outputs=outputs), fresh)
        program.temporaries[key] = inside, block.instructions  # which live, with their ids
    return program.temporaries[key][0]
