"""What every instruction of a planned step takes, and to which line of the user's code it belongs.

Of a model from a library (Hugging Face's), these are lines of the library.

What kernels read and write is shared out among the equations that XLA fuses into them
(`passes/sharding/traffic.py`). A collective belongs to the line that made what it moves; of what no
line makes, as parameters, to the line that reads it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Literal

from autopar.base.cluster import Cluster
from autopar.passes.graph import source_infos
from autopar.passes.graph.graph import Atom, variables
from autopar.passes.graph.name_stacks import pass_of
from autopar.passes.graph.primitives import KERNELS, PRODUCTS
from autopar.passes.pieces.piece_costs import InstructionTime, inside
from autopar.passes.planner.candidates import PlannedStep
from autopar.passes.sharding.spmd_program import (
    Block,
    Branch,
    Compute,
    Instruction,
    Loop,
    Relayout,
    ShardedValue,
    part_bytes,
    readers_of,
)

Readers = Sequence[Instruction | None]


class UserLine(NamedTuple):
    """A line of the user's code: the file, the line, and the function; or no line."""

    file: str = ""
    line: int = 0
    function: str = ""

    @property
    def source(self) -> str:
        """`file.py:12`, or ""; a plan must not depend on where files lie."""
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else ""


class Timed(NamedTuple):
    """What an instruction takes in a step, and of that what devices exchange; where, and when.

    `read_bytes` are those of a device that others read of what a checkpoint computes again. One
    trip counts of a loop of which nobody `knows_trips`.
    """

    instruction: Compute | Relayout
    stage: int
    place: UserLine
    when: str
    seconds: float
    moving: float
    knows_trips: bool = True
    read_bytes: int = 0

    @property
    def is_product(self) -> bool:
        return isinstance(self.instruction, Compute) and (
            self.instruction.eqn.primitive.name in PRODUCTS | KERNELS
        )

    def devices_alike(self, mesh: Sequence[int]) -> int:
        """How many devices of a mesh compute the same: along axes that cut none of its values."""
        assert isinstance(self.instruction, Compute)
        layouts = [layout for values in self.instruction.layouts for layout in values]
        cut = {axis for layout in layouts for axes in layout.dims for axis in axes}
        cut.update(axis for layout in layouts for axis, _ in layout.partial)
        return math.prod(size for axis, size in enumerate(mesh) if axis not in cut)

    @property
    def operation(self) -> str:
        if isinstance(self.instruction, Compute):
            return str(self.instruction.eqn.primitive.name)
        steps = "+".join(dict.fromkeys(step.kind for step in self.instruction.steps))
        return f"{self.instruction.purpose} {steps}"


class MeshTimes:
    """What one mesh runs, and who made what it computes with."""

    def __init__(self, chosen: PlannedStep, number: int, cluster: Cluster) -> None:
        homes = chosen.schedule.mesh_of_stage
        self.chosen = chosen
        self.pieces = [x for x in chosen.pieces.pieces if homes[x.stage] == number]
        stages = sorted({piece.stage for piece in self.pieces})
        self.costs = {stage: chosen.planned[stage].costs(cluster) for stage in stages}
        self._makers: dict[Atom, tuple[UserLine, str]] = {}
        self._places: dict[int, tuple[UserLine, str]] = {}  # of equations, by their ids
        for stage in stages:
            self._note(chosen.pieces.programs[stage].block, "")
        self._readers: dict[int, tuple[Block, Mapping[ShardedValue, Readers]]] = {}

    def timed(self) -> Iterator[Timed]:
        """Every instruction of a step, but for those that take no time."""
        seen: dict[tuple[int, int], Instruction] = {}
        for piece in self.pieces:
            times = self.costs[piece.stage].each(piece.block, self.chosen.times(piece.kind))
            own: dict[tuple[int, int], Instruction] = {}
            for x in times:
                if not x.seconds:
                    continue
                key = piece.stage, id(x.instruction)
                own[key] = x.instruction
                place, when = self._place(x)
                if key in seen and isinstance(x.instruction, Compute) and when in ("", "forward"):
                    when = "again"
                read = self._read_bytes(x, piece.stage) if when == "checkpoint" else 0
                taken = x.seconds, x.moving_seconds, x.knows_trips
                yield Timed(x.instruction, piece.stage, place, when, *taken, read)
            seen |= own

    def _place(self, x: InstructionTime) -> tuple[UserLine, str]:
        """The line to which an instruction belongs, and the pass of the step."""
        if isinstance(x.instruction, Compute):
            return self._of_equation(x.instruction.eqn, x.stack)
        place, when = self._makers.get(_key(x.instruction.source.atom), _NOWHERE)
        if place.file:
            return place, when
        reader = self._reader(x.block, x.instruction.target, x.stack)
        return (place, when) if reader is None else reader

    def _of_equation(self, eqn: JaxprEqn, stack: str) -> tuple[UserLine, str]:
        if id(eqn) not in self._places:
            self._places[id(eqn)] = place_and_pass(eqn, stack, self._makers)
        return self._places[id(eqn)]

    def _note(self, block: Block, stack: str) -> None:
        """Who makes what, in a block and in those inside of it."""
        for x in block.instructions:
            if isinstance(x, Relayout):
                continue
            known = dict.fromkeys(x.results, self._of_equation(x.eqn, stack))
            bodies = (x.body,) if isinstance(x, Loop) else x.blocks if isinstance(x, Branch) else ()
            for body in bodies:
                self._note(body, inside(stack, x.eqn))
                for result, inner in zip(x.results, body.outputs, strict=True):
                    known[result] = self._makers.get(_key(inner.atom), known[result])
            self._makers.update((_key(v.atom), made) for v, made in known.items())

    def _read_bytes(self, x: InstructionTime, stage: int) -> int:
        """Of a device, what others than checkpoints read of an instruction in a step."""
        total = 0
        for value in () if isinstance(x.instruction, Relayout) else x.instruction.results:
            for reader in self._readers_of(x.block).get(value, ()):
                own = isinstance(reader, Compute) and self._of_equation(reader.eqn, x.stack)[1]
                if own != "checkpoint":
                    total += x.times * part_bytes(value, self.chosen.planned[stage].mesh)
                    break
        return total

    def _readers_of(self, block: Block) -> Mapping[ShardedValue, Readers]:
        if id(block) not in self._readers:
            self._readers[id(block)] = block, readers_of(block)
        return self._readers[id(block)][1]

    def _reader(self, block: Block, value: ShardedValue, stack: str) -> tuple[UserLine, str] | None:
        """The first line that reads a value."""
        for x in self._readers_of(block).get(value, ()):
            found = None
            if isinstance(x, Compute):
                found = self._of_equation(x.eqn, stack)
            elif isinstance(x, Relayout):
                found = self._reader(block, x.target, stack)
            elif isinstance(x, Loop | Branch):
                bodies = (x.body,) if isinstance(x, Loop) else x.blocks
                for body in bodies:
                    pairs = zip(x.operands, body.inputs, strict=True)
                    inner = [v for outer, v in pairs if outer == value]
                    within = inside(stack, x.eqn)
                    found = next(filter(None, (self._reader(body, v, within) for v in inner)), None)
            if found is not None and found[0].file:
                return found
        return None


_NOWHERE = UserLine(), ""
_pass = cache(pass_of)


def place_and_pass(
    eqn: JaxprEqn, stack: str, makers: Mapping[Atom, tuple[UserLine, str]]
) -> tuple[UserLine, str]:
    """The line and the pass of an equation inside of a name stack.

    Of one that no line of the user's made, the line is where its operands were made, and the pass
    is theirs if its own name has none.
    """
    place, when = place_of(eqn), _pass(f"{stack}/{eqn.source_info.name_stack}")
    if place.file:
        return place, when
    made = (makers.get(atom, _NOWHERE) for atom in variables(eqn.invars))
    its, earlier = next((each for each in made if each[0].file), (place, when))
    return its, when or earlier


def place_of(eqn: JaxprEqn) -> UserLine:
    """The line that made an equation: the user's, or that of a library of models."""
    frame = source_infos.model_frame(eqn)
    return UserLine() if frame is None else _short(frame)


@cache
def _short(frame: tuple[str, int, str]) -> UserLine:
    """The line, with a short name of its function.

    Of a local function the name alone, and of a comprehension (which some versions of Python call
    a function) or of a lambda that of the function around it.

    >>> _short(("/home/me/train.py", 12, "make.<locals>.step.<locals>.<genexpr>"))
    UserLine(file='/home/me/train.py', line=12, function='step')
    """
    file, line, function = frame
    outer, *names = function.split(".<locals>.")
    named = [name for name in names if not name.startswith("<")]
    return UserLine(file, line, named[-1] if named else outer)


def _key(atom: Atom) -> Atom | None:
    return None if isinstance(atom, Literal) else atom
