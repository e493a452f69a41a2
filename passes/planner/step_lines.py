"""Where the time of a planned step goes, by line of the user's code.

Every instruction takes what it was planned with; what kernels read and write is shared out among
the equations that XLA fuses into them (`passes/sharding/traffic.py`). A collective belongs to the
line that made what it moves; of what no line makes, as parameters, to the line that reads it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Literal

from autopar.base.cluster import Cluster
from autopar.base.hardware import known_capability
from autopar.base.line_times import (
    LEAST_SHARE,
    MOST_LINES,
    LineTime,
    StepLines,
    WrittenAttention,
    together,
)
from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom, variables
from autopar.passes.graph.name_stacks import pass_of
from autopar.passes.graph.primitives import KERNELS, PRODUCTS
from autopar.passes.pieces.piece_costs import InstructionTime, PieceCosts, inside
from autopar.passes.planner.candidates import PlannedStep
from autopar.passes.planner.undone_checkpoints import undone_shares
from autopar.passes.primitives.written_attention import WrittenSoftmax, written_attention
from autopar.passes.sharding.compiler_rules import GPU, TPU, backend_of
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

AMPERE, HOPPER = 8, 9
"""Compute capabilities: from which on cuDNN has flash attention, and for deeper heads."""
DEEPEST, DEEPEST_BEFORE_HOPPER = 256, 128
NARROW = ("bfloat16", "float16")
PALLAS_TILE = 128
"""Of which rows, and deeper heads, are multiples in JAX's flash attention for TPUs."""
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


@dataclass
class _Times:
    """Seconds of one line."""

    by_operation: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_kind: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_pass: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def step_lines(
    chosen: PlannedStep,
    mesh: int,
    cluster: Cluster,
    compute_seconds: float,
    communication_seconds: float,
) -> StepLines:
    """The lines that take longest on a device of one mesh.

    Args:
      chosen: the planned step.
      mesh: the number of the mesh.
      cluster: all devices.
      compute_seconds: what the plan expects that a device of it computes in a step. What
        instructions do not take of it, because the integer program priced several of them together
        or one of them otherwise, is no line's.
      communication_seconds: and what it communicates. Where some of it is hidden beside
        computation, lines take so much less.
    """
    run = _Mesh(chosen, mesh, cluster)
    times = [*run.timed()]
    moved = sum(x.moving for x in times)
    computed = sum(x.seconds for x in times) - moved
    wanted = (compute_seconds, computed), (communication_seconds, moved)
    computing, moving = (_scale(whole, own) for whole, own in wanted)
    known: dict[UserLine, _Times] = defaultdict(_Times)
    for x in times:
        own, took = known[x.place], (computing * (x.seconds - x.moving), moving * x.moving)
        own.by_kind["product" if x.is_product else "memory"] += took[0]
        own.by_kind["communication"] += took[1]
        own.by_pass[x.when] += sum(took)
        own.by_operation[x.operation] += sum(took)
    rest = known[UserLine()].by_kind
    rest["memory"] += compute_seconds - computing * computed if computing == 1 else 0.0
    rest["communication"] += communication_seconds - moving * moved if moving == 1 else 0.0
    attention = _attention(chosen, cluster, times, run.costs, computing)
    checkpointed = sum(own.by_pass["checkpoint"] for own in known.values())
    undone = _undone(chosen, times, computing) if checkpointed else (0.0, 0)
    return StepLines(_longest(known), tuple(attention), checkpointed, *undone)


def _scale(whole: float, own: float) -> float:
    """What makes instructions take as long as all of it, if they take longer (or are rounded)."""
    return whole / own if own and whole < (1 + 1e-6) * own else 1.0


def _undone(chosen: PlannedStep, times: Sequence[_Timed], scale: float) -> tuple[float, int]:
    """Of what the program's checkpoints compute again, the seconds that an override saves a step.

    And the bytes of a device that it would keep instead, if it kept all that the backward pass
    reads of it, as often as microbatches are in flight.
    """
    shares = undone_shares(chosen.split.graph, _line_and_name)
    again = [x for x in times if x.when == "checkpoint" and isinstance(x.instruction, Compute)]
    seconds = kept = 0.0
    for x in again:
        assert isinstance(x.instruction, Compute)
        share = shares.get(_line_and_name(x.instruction.eqn), 0.0)
        seconds, kept = seconds + share * x.seconds, kept + share * x.read_bytes
    count = chosen.split.num_microbatches
    in_flight = min(count, chosen.schedule.num_meshes)
    return scale * seconds, int(kept * in_flight / count)


def _line_and_name(eqn: JaxprEqn) -> tuple[UserLine, str]:
    return place_of(eqn), str(eqn.primitive.name)


def _longest(known: Mapping[UserLine, _Times]) -> tuple[LineTime, ...]:
    lines = [_line(place, own) for place, own in known.items()]
    lines.sort(key=lambda x: (not x.source, -x.seconds, x.source, x.function))
    least = LEAST_SHARE * sum(x.seconds for x in lines)
    told = [x for x in lines[:MOST_LINES] if x.source and x.seconds > least]
    others = [x for x in lines[len(told) :] if x.seconds > 0]
    return (*told, together(others)) if others else tuple(told)


def _line(place: UserLine, own: _Times) -> LineTime:
    longest = sorted(own.by_operation.items(), key=lambda item: (-item[1], item[0]))
    return LineTime(
        source=place.source,
        function=place.function,
        operations=tuple(name for name, seconds in longest[:3] if seconds > 0),
        product_seconds=own.by_kind["product"],
        memory_seconds=own.by_kind["memory"],
        communication_seconds=own.by_kind["communication"],
        forward_seconds=own.by_pass["forward"],
        backward_seconds=own.by_pass["backward"],
        again_seconds=own.by_pass["again"] + own.by_pass["checkpoint"],
    )


class _Timed(NamedTuple):
    """What an instruction takes in a step, and of that what devices exchange; where, and when.

    `read_bytes` are those of a device that others read of what a checkpoint computes again.
    """

    instruction: Compute | Relayout
    stage: int
    place: UserLine
    when: str
    seconds: float
    moving: float
    read_bytes: int = 0

    @property
    def is_product(self) -> bool:
        return isinstance(self.instruction, Compute) and (
            self.instruction.eqn.primitive.name in PRODUCTS | KERNELS
        )

    @property
    def operation(self) -> str:
        if isinstance(self.instruction, Compute):
            return str(self.instruction.eqn.primitive.name)
        steps = "+".join(dict.fromkeys(step.kind for step in self.instruction.steps))
        return f"{self.instruction.purpose} {steps}"


class _Mesh:
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

    def timed(self) -> Iterator[_Timed]:
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
                taken = x.seconds, x.moving_seconds
                yield _Timed(x.instruction, piece.stage, place, when, *taken, read)
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
    """The user's line that made an equation."""
    frame = jax_compat.user_frame(eqn)
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


def _attention(
    chosen: PlannedStep,
    cluster: Cluster,
    times: Sequence[_Timed],
    costs: Mapping[int, PieceCosts],
    scale: float,
) -> Iterator[WrittenAttention]:
    """Attention written by hand, for which the devices have a kernel; the longest first.

    The plan's seconds are those of instructions times the `scale`.
    """
    kernel = partial(_kernel, cluster.device.name)
    found: dict[UserLine, list[WrittenSoftmax]] = defaultdict(list)
    for softmax in written_attention(chosen.split.graph.jaxpr):
        if kernel(softmax) and softmax.exponentials is not None:
            found[place_of(softmax.exponentials)].append(softmax)
    made = []
    for place, softmaxes in found.items():
        places = {place_of(eqn) for softmax in softmaxes for eqn in softmax.equations}
        sizes = {softmax.elements for softmax in softmaxes}
        seconds = bound = 0.0
        for x in times:
            if x.place not in places or not _touches(x.instruction, sizes):
                continue
            assert isinstance(x.instruction, Compute)
            own = scale * (x.seconds - x.moving)
            if x.is_product:
                bound += own * costs[x.stage].memory_share(x.instruction)
            else:
                seconds, bound = seconds + own, bound + own
        name = kernel(softmaxes[0])
        made.append(WrittenAttention(place.source, place.function, seconds, bound, name))
    return iter(sorted(made, key=lambda x: (-x.seconds, x.source)))


def _touches(instruction: Compute | Relayout, sizes: Collection[int]) -> bool:
    if not isinstance(instruction, Compute):
        return False
    atoms = (*instruction.eqn.invars, *instruction.eqn.outvars)
    return any(getattr(atom.aval, "size", 0) in sizes for atom in atoms)


def _kernel(device: str, softmax: WrittenSoftmax) -> str:
    """The kernel of a kind of devices for some attention, or ""."""
    if softmax.values != softmax.depth:
        return ""
    if backend_of(device) == TPU:
        rows = softmax.row % PALLAS_TILE == 0 and softmax.queries % PALLAS_TILE == 0
        deep = softmax.depth > PALLAS_TILE and softmax.depth % PALLAS_TILE
        return "pallas" if rows and not deep and not softmax.is_grouped else ""
    capability = known_capability(device) if backend_of(device) == GPU else 0
    deepest = DEEPEST if capability >= HOPPER else DEEPEST_BEFORE_HOPPER
    fits = softmax.depth % 8 == 0 and softmax.depth <= deepest and softmax.dtype in NARROW
    if softmax.masked and (softmax.row % 2 or softmax.queries % 2):
        return ""  # a bias, as which masks are given, of an odd length cannot be trained
    return "cudnn" if capability >= AMPERE and fits else ""
