"""What a stage's devices hold at its worst moment, with its schedule's microbatches in flight.

It is the account of the simulated timeline, for one stage alone: its pieces run one after another,
and of what one task leaves for a later one of the same microbatch there is one for every microbatch
in flight between the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jax.extend.core import Var

from autopar.passes.graph.microbatched import Task
from autopar.passes.pieces.numbering import number_values
from autopar.passes.pieces.opened import open_stage, pruned, with_received, with_sent
from autopar.passes.pieces.piece_costs import PieceCosts, temporary_bytes
from autopar.passes.pieces.pieces import Numbers, StagePiece
from autopar.passes.pieces.rounds import find_levels, outer_rounds
from autopar.passes.pieces.stage_pieces import TASKS, body_by_task, stage_pieces
from autopar.passes.pieces.weight_gradients import waiting_bytes
from autopar.passes.sharding.batch_dims import BatchDims
from autopar.passes.sharding.held_values import MADE_AGAIN
from autopar.passes.sharding.memory_rows import StageMemory
from autopar.passes.sharding.peak_memory import MemoryPeak, label_of
from autopar.passes.sharding.spmd_program import (
    Compute,
    ShardedValue,
    SpmdProgram,
    is_literal,
    local_bytes,
)
from autopar.passes.slicing.stage_graphs import StageGraph


class Turn(NamedTuple):
    """Pieces that run together: bytes of what is there before, and of what lasts that they make.

    Of both, `ending` are the values that nothing later needs.
    """

    pieces: Sequence[StagePiece]
    before: dict[int, int]
    written: dict[int, int]
    ending: frozenset[int]


class Moment(NamedTuple):
    """What a piece needs inside, beside the bytes of the values that are there."""

    piece: StagePiece | None
    inside: int
    alive: Mapping[int, int]

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.inside + sum(self.alive.values())


@dataclass(frozen=True)
class StageAccount:
    """A stage taken apart as it will be, but for the layouts in which other stages send."""

    graph: StageGraph
    program: SpmdProgram
    memory: StageMemory
    numbers: Numbers
    inputs: Sequence[int]
    outputs: Sequence[int]
    pieces: Sequence[StagePiece]

    @classmethod
    def of(cls, graph: StageGraph, program: SpmdProgram, memory: StageMemory) -> StageAccount:
        """The account of a stage.

        Args:
          graph: what the program was lowered from.
          program: the stage's.
          memory: the microbatches in flight, and whether the forward pass is computed again.
        """
        passed = frozenset[Var]() if graph.loop is None else graph.loop.passed
        stage, block, numbers = open_stage(0, graph, program), program.block, Numbers()
        for position, version in enumerate(block.outputs):
            if not is_literal(version) and version.atom in passed:
                stage, _ = with_sent(stage, position, per_microbatch=True)
        for position, version in enumerate(block.inputs):
            if version.atom in passed:
                layout = version.layout._replace(dims=version.layout.dims[1:])
                stage = with_received(stage, position, layout, per_microbatch=True)
        stage = pruned(stage)
        (levels,) = find_levels([stage], ())
        rounds = outer_rounds(stage, levels)
        tasks = body_by_task(stage, remat=memory.remat, at_once=memory.at_once)
        known = number_values(stage, rounds, tasks, numbers)
        pieces = stage_pieces(stage, rounds, tasks, known)
        outputs = [number for number in known.outputs if number is not None]
        return cls(graph, program, memory, numbers, known.inputs, outputs, pieces)

    def peak(self, names: dict[Var, str]) -> MemoryPeak:
        """The worst moment; `names` label input variables."""
        worst, versions = (
            max(self._moments, key=lambda moment: moment.bytes),
            self.numbers.versions,
        )
        labelled = [(label_of(versions[n], names), size) for n, size in worst.alive.items()]
        inside = ("what single operations need", worst.inside)
        return MemoryPeak.of(worst.bytes, [*labelled, inside])

    def rowless_bytes(self, dims: BatchDims) -> int:
        """What is there at some moment at the least, however few rows of the batch there are.

        `dims` are the dimensions of values that hold the batch.
        """

        def has_rows(version: ShardedValue) -> bool:
            return isinstance(version.atom, Var) and bool(dims.get(version.atom))

        def inside(piece: StagePiece) -> int:
            """Of what one operation makes, as a gradient that is added to others."""
            made = [x for x in piece.block.instructions if isinstance(x, Compute)]
            held = [x.results for x in made if x.eqn.primitive.name not in MADE_AGAIN]
            inner = ([v for v in results if not has_rows(v)] for results in held)
            outer, mesh = set(piece.block.outputs), self.program.mesh
            sizes = (sum(local_bytes(v, mesh) for v in each if v not in outer) for each in inner)
            return max(sizes, default=0)

        versions, worst = self.numbers.versions, 0
        for piece, most, alive in self._moments:
            if piece is not None and piece.kind in TASKS:
                most = min(inside(piece), most)
            there = sum(size for number, size in alive.items() if not has_rows(versions[number]))
            worst = max(worst, there + most)
        return worst

    def waiting_bytes(self) -> int:
        """What the gradients of weights are made of, beside what the forward pass leaves for them.

        Of one microbatch: it is there for all of the stage if these gradients come last.
        """
        size, values = 0, self.numbers.values
        for piece in self.loop:
            sent = [x.version for x in piece.outputs if values[x.value].per_microbatch]
            if piece.kind == "B" and sent:
                known = self.between_tasks.keys() | self.lasting.keys()
                received = [x.version for x in piece.inputs if x.value not in known]
                size += waiting_bytes(piece.instructions, sent, received, self.program.mesh)
        return size

    @cached_property
    def throughout(self) -> Mapping[int, int]:
        """Bytes of what is there all the while the loop runs; without a loop, of the inputs."""
        for turn in self._turns():
            if turn.pieces[0].kind in TASKS:
                return turn.before | turn.written
        return self._given

    def loop_seconds(self, costs: PieceCosts) -> float:
        """What a microbatch takes, forward and backward."""
        return sum(costs.seconds(piece.block) for piece in self.loop)

    @cached_property
    def lasting(self) -> dict[int, int]:
        """Bytes of what is there once, or for all microbatches before the loop or after it."""
        outside = (p for p in self.pieces if p.kind not in TASKS)
        around = {port.value for p in outside for port in (*p.inputs, *p.outputs)}
        around.update(self.outputs)
        often = 1 if self.graph.loop is None else self.graph.loop.num_microbatches
        return {
            v.number: v.bytes_per_device * (often if v.per_microbatch else 1)
            for v in self.numbers.values
            if not v.per_microbatch or v.number in around
        }

    @cached_property
    def users(self) -> Mapping[int, list[Task]]:
        """For what else there is, the tasks that make it or read it, in order."""
        found: dict[int, list[Task]] = defaultdict(list)
        for task in TASKS:
            ports = (x for p in self.pieces if p.kind == task for x in (*p.inputs, *p.outputs))
            for number in dict.fromkeys(port.value for port in ports):
                if number not in self.lasting:
                    found[number].append(task)
        return found

    @property
    def loop(self) -> list[StagePiece]:
        """The pieces that run for every microbatch."""
        return [piece for piece in self.pieces if piece.kind in TASKS]

    @cached_property
    def between_tasks(self) -> dict[int, int]:
        """Bytes of what one task leaves for a later one, for all microbatches in flight."""
        return {
            number: self.memory.in_flight[tasks[0], tasks[-1]]
            * self.numbers.values[number].bytes_per_device
            for number, tasks in self.users.items()
            if tasks[0] != tasks[-1]
        }

    def within(self, task: str) -> dict[int, int]:
        """Bytes of what is there for one task alone."""
        return {
            number: self.numbers.values[number].bytes_per_device
            for number, tasks in self.users.items()
            if set(tasks) == {task}
        }

    @cached_property
    def _moments(self) -> Sequence[Moment]:
        moments = [Moment(None, 0, self._given)]
        for turn in self._turns():
            for piece in turn.pieces:
                inside = temporary_bytes(piece, self.program)
                if piece.kind in TASKS:
                    there = turn.before | turn.written
                    there = there | self.between_tasks | self.within(piece.kind)
                    moments.append(Moment(piece, inside, there))
                    continue
                taken = turn.ending.intersection(piece.donates)
                stays = {n: size for n, size in turn.before.items() if n not in taken}
                moments.append(Moment(piece, inside, turn.before))
                moments.append(Moment(piece, inside, stays | turn.written))
        return moments

    def _turns(self) -> Iterator[Turn]:
        turns: list[list[StagePiece]] = [[x] for x in self.pieces if x.kind == "prologue"]
        turns += [self.loop] if self.loop else []
        turns += [[piece] for piece in self.pieces if piece.kind == "epilogue"]
        ports = [[port for p in turn for port in (*p.inputs, *p.outputs)] for turn in turns]
        last = {port.value: time for time, turn in enumerate(ports) for port in turn}
        labels = self.graph.graph.inputs
        kept = [n for n, label in zip(self.inputs, labels, strict=True) if not label.donated]
        last.update(dict.fromkeys((*kept, *self.outputs), len(turns)))
        alive = self._given
        for time, pieces in enumerate(turns):
            made = {port.value for piece in pieces for port in piece.outputs}
            written = {n: self.lasting[n] for n in made if n in self.lasting}
            there = alive | written
            ending = frozenset(n for n in there if last.get(n, -1) <= time)
            yield Turn(pieces, alive, written, ending)
            alive = {n: size for n, size in there.items() if n not in ending}

    @property
    def _given(self) -> dict[int, int]:
        return {n: self.lasting[n] for n in self.inputs if n in self.lasting}
