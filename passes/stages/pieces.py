"""From lowered stages to pieces: the functions that a schedule's tasks run.

Every stage is planned and lowered as one program with its loop over the microbatches
(`passes/sharding`). Here that program is taken apart again: the loop's body into F, B and W, what
is around it into rounds between which values of other stages arrive. A piece is a block of the same
instructions, so what the plan lists and prices is what runs. What pieces pass to each other, and
what crosses between stages, becomes numbered values (`passes/pipeline`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jax.extend import core as jex_core
from jax.extend.core import DropVar

from autopar.passes import jax_compat
from autopar.passes.pipeline.instructions import Piece, PieceKind, Transfer, Value
from autopar.passes.sharding.layout import Layout, divides, without_partial
from autopar.passes.sharding.memory import version_bytes
from autopar.passes.sharding.program import (
    Block,
    Branch,
    Compute,
    Instruction,
    Loop,
    Program,
    Reshard,
    Version,
)
from autopar.passes.sharding.reshard import reshard_steps
from autopar.passes.sharding.scopes import aval_shape
from autopar.passes.stages.result import Link, StageGraph, Stages, Task

TASKS: tuple[Task, ...] = ("F", "B", "W")


class Port(NamedTuple):
    """A value that enters or leaves a piece.

    `stacked`: the value exists once per microbatch, and the block sees them all as one stack.
    """

    value: int
    version: Version
    stacked: bool = False


@dataclass(frozen=True)
class StagePiece:
    """A function that one stage's mesh runs: a block, and which values enter and leave it."""

    name: str
    stage: int
    kind: PieceKind
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    instructions: tuple[Instruction, ...]
    donates: tuple[int, ...]

    @property
    def block(self) -> Block:
        """The block that every device runs."""
        return Block(
            tuple(port.version for port in self.inputs),
            self.instructions,
            tuple(port.version for port in self.outputs),
        )

    def plain(self) -> Piece:
        """What the schedule needs to know of it."""
        return Piece(
            name=self.name,
            stage=self.stage,
            kind=self.kind,
            reads=tuple(port.value for port in self.inputs),
            writes=tuple(port.value for port in self.outputs),
            donates=self.donates,
        )


@dataclass(frozen=True)
class Pieces:
    """A pipelined program, ready to be scheduled.

    Args:
      programs: the lowered program of every stage (its mesh and its axes' names).
      values: what pieces pass on.
      versions: the variable and layout of every value, by number (of one microbatch, if so).
      pieces: what the meshes run.
      transfers: what crosses between stages.
      inputs: for every input leaf of the whole graph, the values that take it, by stage.
      outputs: for every output leaf of the whole graph, its value.
    """

    programs: tuple[Program, ...]
    values: tuple[Value, ...]
    versions: Mapping[int, Version]
    pieces: tuple[StagePiece, ...]
    transfers: tuple[Transfer, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.pieces)} pieces, {len(self.transfers)} transfers"]
        lines += [
            f"  {piece.name}: {len(piece.instructions)} instructions,"
            f" {len(piece.inputs)} values in, {len(piece.outputs)} out"
            for piece in self.pieces
        ]
        return "\n".join(lines)


def cut(
    stages: Stages,
    programs: Sequence[Program],
    flexible: Sequence[frozenset[int]],
    remat: Sequence[bool] | None = None,
) -> Pieces:
    """Take the lowered stages apart.

    Args:
      stages: what the programs were lowered from.
      programs: one for each stage.
      flexible: for each stage, the ids of the equations that are computed wherever they are read.
      remat: for each stage, whether its backward pass computes the forward pass again from what
        the stage receives, instead of keeping what that leaves. None: no stage does.
    """
    again = remat or (False,) * len(programs)
    cutters = [
        _Stage(number, stage, program, flexible[number], remat=again[number])
        for number, (stage, program) in enumerate(zip(stages.graphs, programs, strict=True))
    ]
    numbers = _Numbers()
    for link in stages.links:
        sender, receiver = cutters[link.source], cutters[link.target]
        receiver.receive(link, sender.send(link))
    levels = _levels(cutters, stages.links)
    for cutter, found in zip(cutters, levels, strict=True):
        cutter.finish(found, numbers)
    transfers = tuple(
        Transfer(cutters[x.source].sent(x, numbers), cutters[x.target].received[x.target_input])
        for x in stages.links
    )
    inputs: dict[int, list[int]] = defaultdict(list)
    outputs: dict[int, int] = {}
    for cutter in cutters:
        for number, leaf in zip(cutter.input_values, cutter.stage.inputs, strict=True):
            if leaf is not None:
                inputs[leaf].append(number)
        for made, leaf in zip(cutter.output_values, cutter.stage.outputs, strict=True):
            if leaf is not None and made is not None:
                outputs.setdefault(leaf, made)
    return Pieces(
        programs=tuple(programs),
        values=tuple(numbers.values),
        versions=dict(numbers.versions),
        pieces=tuple(piece for cutter in cutters for piece in cutter.pieces),
        transfers=transfers,
        inputs=tuple(tuple(inputs[i]) for i in range(max(inputs, default=-1) + 1)),
        outputs=tuple(outputs[i] for i in range(len(outputs))),
    )


def residual_bytes(stage: StageGraph, program: Program, flexible: frozenset[int]) -> int:
    """Bytes per device that one microbatch in flight holds: what F leaves or got, and B reads."""
    cutter = _Stage(0, stage, program, flexible)
    cutter.cut_body()
    if cutter.loop is None:
        return 0
    num_consts, num_carry = cutter.counts()
    made = {v: cutter.task_of[id(x)] for x in cutter.body for v in _writes(x)}
    made.update(dict.fromkeys(cutter.loop.body.inputs[num_consts + num_carry :], 0))
    kept = {
        v for x in cutter.body if cutter.task_of[id(x)] > 0 for v in _reads(x) if made.get(v) == 0
    }
    return sum(version_bytes(v, program.mesh) for v in kept)


@dataclass
class _Numbers:
    """Numbers of values, given in order."""

    values: list[Value] = field(default_factory=list)
    versions: dict[int, Version] = field(default_factory=dict)

    def new(
        self, stage: int, version: Version, mesh: Sequence[int], per_microbatch: bool, label: str
    ) -> int:
        number = len(self.values)
        size = version_bytes(version, mesh)
        self.values.append(Value(number, stage, size, per_microbatch, label))
        self.versions[number] = version
        return number


# Reading and writing of instructions.


def _reads(instruction: Instruction) -> tuple[Version, ...]:
    """The variables that an instruction reads; literals are not hashable, and come from nowhere."""
    if isinstance(instruction, Reshard):
        found: tuple[Version, ...] = (instruction.source,)
    elif isinstance(instruction, Branch):
        found = (instruction.index, *instruction.operands)
    else:
        found = instruction.operands
    return tuple(v for v in found if not _is_literal(v))


def _writes(instruction: Instruction) -> tuple[Version, ...]:
    if isinstance(instruction, Reshard):
        return (instruction.target,)
    return tuple(v for v in instruction.results if not isinstance(v.atom, DropVar))


def _is_literal(version: Version) -> bool:
    return isinstance(version.atom, jex_core.Literal)


def _has_effect(instruction: Instruction) -> bool:
    return not isinstance(instruction, Reshard) and bool(instruction.eqn.effects)


def _needed(instructions: Sequence[Instruction], wanted: Iterable[Version]) -> list[Instruction]:
    """The instructions that the wanted versions, or an effect, depend on."""
    live = {v for v in wanted if not _is_literal(v)}
    kept = []
    for instruction in reversed(instructions):
        if _has_effect(instruction) or any(v in live for v in _writes(instruction)):
            kept.append(instruction)
            live.update(_reads(instruction))
    return kept[::-1]


def _unstacked(layout: Layout) -> Layout:
    """The layout of one microbatch; a stack that the plan cuts along itself never exists."""
    return Layout(layout.dims[1:], layout.partial)


Level = tuple[int, int]  # before (0) or behind (1) the loop, and the round there
Levels = dict[Version, Level]
FIRST: Level = (0, 0)
BEFORE: Level = (-1, 0)
KINDS: tuple[PieceKind, PieceKind] = ("prologue", "epilogue")


class _Stage:
    """One stage being taken apart."""

    def __init__(
        self,
        number: int,
        stage: StageGraph,
        program: Program,
        flexible: frozenset[int],
        *,
        remat: bool = False,
    ):
        self.number, self.stage, self.program = number, stage, program
        self.flexible, self.remat = flexible, remat
        self.mesh = program.mesh
        outer = list(program.block.instructions)
        self.loop: Loop | None = None
        self.place = len(outer)
        if stage.loop is not None:
            eqn = stage.graph.jaxpr.eqns[stage.loop]
            self.place = next(
                i for i, x in enumerate(outer) if isinstance(x, Loop) and x.eqn is eqn
            )
            loop = outer[self.place]
            assert isinstance(loop, Loop)
            self.loop = loop
        self.before, self.behind = outer[: self.place], outer[self.place + 1 :]
        self.body: list[Instruction] = list(self.loop.body.instructions) if self.loop else []
        self.stacks = self._stacks()
        # What links change: body outputs by graph output, received versions by graph input.
        self.sends: dict[int, tuple[str, Version]] = {}
        self.arrives: dict[int, tuple[str, Version]] = {}
        self.received: dict[int, int] = {}
        self.input_values: tuple[int, ...] = ()
        self.output_values: tuple[int | None, ...] = ()
        self.pieces: list[StagePiece] = []

    def counts(self) -> tuple[int, int]:
        """How many constants and carries the loop has."""
        assert self.loop is not None
        return jax_compat.scan_counts(self.loop.eqn.params)

    def _stacks(self) -> dict[Version, Version]:
        """For stacks that leave the loop, the body's version that they are made of."""
        if self.loop is None:
            return {}
        _, num_carry = self.counts()
        pairs = zip(self.loop.results, self.loop.body.outputs, strict=True)
        return {
            outer: inner
            for outer, inner in list(pairs)[num_carry:]
            if not isinstance(outer.atom, DropVar)
        }

    # -- links -----------------------------------------------------------------------------------

    def send(self, link: Link) -> Layout:
        """The layout in which a value is sent: complete, and made by the body if per microbatch."""
        wanted = self.program.block.outputs[link.source_output]
        if not link.per_microbatch:
            self.sends[link.source_output] = ("outer", wanted)
            return wanted.layout
        made = {v: x for x in self.behind for v in _writes(x)}
        version = wanted
        while version not in self.stacks:
            step = made[version]
            assert isinstance(step, Reshard), f"what is sent is computed behind the loop: {link}"
            version = step.source
        inner = self.stacks[version]
        target = Version(inner.atom, without_partial(_unstacked(wanted.layout)))
        self._reshard_in_body(inner, target, "activation")
        self.sends[link.source_output] = ("inner", target)
        return target.layout

    def _reshard_in_body(self, source: Version, target: Version, purpose: str) -> None:
        known = {v for x in self.body for v in _writes(x)}
        assert self.loop is not None
        if target == source or target in known or target in self.loop.body.inputs:
            return
        steps = reshard_steps(source.layout, target.layout, self.mesh)
        self.body.append(Reshard(source, target, steps, purpose, ""))

    def receive(self, link: Link, sent: Layout) -> None:
        """Take a value over in a layout that sends every tile once; the rest happens here."""
        position = link.target_input
        version = self.program.block.inputs[position]
        if not link.per_microbatch:
            arriving = Version(version.atom, self._arriving(version, sent))
            if arriving != version:
                self.before = _entered(self.before, arriving, version, self.mesh, "state")
                self.behind = [x for x in self.behind if arriving not in _writes(x)]
            self.arrives[position] = ("outer", arriving)
            return
        inner = self._slice_of(version)
        arriving = Version(inner.atom, self._arriving(inner, sent))
        if arriving != inner:
            self.body = _entered(self.body, arriving, inner, self.mesh, "activation")
        self.arrives[position] = ("inner", arriving)

    def _slice_of(self, stack: Version) -> Version:
        """The body's version of a received stack, which nothing but the loop reads."""
        assert self.loop is not None
        num_consts, num_carry = self.counts()
        targets = {v.target: v.source for v in self.before if isinstance(v, Reshard)}
        for outer, inner in list(zip(self.loop.operands, self.loop.body.inputs, strict=True))[
            num_consts + num_carry :
        ]:
            source = outer
            while source != stack and source in targets:
                source = targets[source]
            if source == stack:
                return inner
        raise AssertionError(f"the loop does not read what is received: {stack}")

    def _arriving(self, version: Version, sent: Layout) -> Layout:
        """The sender's cuts where the meshes are alike, else ours; replicas are made here."""
        shape = aval_shape(version.atom)
        if len(sent.dims) == len(shape) and self._fits(sent) and divides(shape, sent, self.mesh):
            base = sent
        else:
            base = without_partial(version.layout)
        dims = [list(axes) for axes in base.dims]
        for axis in range(len(self.mesh)):
            if self.mesh[axis] == 1 or axis in base.used:
                continue
            for d in range(len(dims)):
                trial = [list(axes) for axes in dims]
                trial[d] = sorted([*trial[d], axis])
                layout = Layout(tuple(map(tuple, trial)))
                if shape[d] > 1 and divides(shape, layout, self.mesh):
                    dims = trial
                    break
        return Layout(tuple(map(tuple, dims)))

    def _fits(self, sent: Layout) -> bool:
        return all(axis < len(self.mesh) for axes in sent.dims for axis in axes)

    # -- values ------------------------------------------------------------------------------------

    def finish(self, levels: Levels, numbers: _Numbers) -> None:
        """Number the values and make the pieces."""
        self.cut_body()
        self._number_inputs(numbers)
        self._link_loop(numbers)
        groups = self._outer_groups(levels)
        self._number_outer(groups, numbers)
        self._make_outer(groups, 0)
        self._make_body(numbers)
        self._make_outer(groups, 1)

    def _number_inputs(self, numbers: _Numbers) -> None:
        found = []
        self.known: dict[Version, int] = {}  # outer versions
        self.stacked: set[Version] = set()  # outer versions that exist per microbatch
        self.inner: dict[Version, int] = {}  # body versions
        for position, version in enumerate(self.program.block.inputs):
            label = self.stage.graph.inputs[position].path
            if position not in self.arrives:
                number = numbers.new(self.number, version, self.mesh, False, label)
                self.known[version] = number
            else:
                where, arriving = self.arrives[position]
                inside = where == "inner"
                number = numbers.new(self.number, arriving, self.mesh, inside, label)
                (self.inner if inside else self.known)[arriving] = number
                if inside and version not in self.known:
                    self.known[version] = number
                    self.stacked.add(version)
                self.received[position] = number
            found.append(number)
        self.input_values = tuple(found)

    def cut_body(self) -> None:
        """A task for every instruction of the body."""
        self.task_of: dict[int, int] = {}
        if self.loop is None:
            return
        outputs = {v for v in self.loop.body.outputs if not _is_literal(v)}
        outputs.update(v for w, v in self.sends.values() if w == "inner")
        self.body = _needed(_ordered(self.body, self.loop.body.inputs), outputs)
        eqn_tasks = {
            id(eqn): TASKS.index(task)
            for eqn, task in zip(
                self.loop.eqn.params["jaxpr"].jaxpr.eqns, self.stage.tasks, strict=True
            )
        }
        earliest: dict[Version, int] = dict.fromkeys(self.loop.body.inputs, 0)
        early: list[int] = []
        for instruction in self.body:
            at = max((earliest.get(v, 0) for v in _reads(instruction)), default=0)
            if not isinstance(instruction, Reshard):
                at = max(at, eqn_tasks[id(instruction.eqn)])
            early.append(at)
            earliest.update((v, at) for v in _writes(instruction))
        latest: dict[Version, int] = {}
        for instruction, at in zip(reversed(self.body), reversed(early), strict=True):
            chosen = at
            movable = isinstance(instruction, Reshard) or (
                isinstance(instruction, Compute)
                and id(instruction.eqn) in self.flexible
                and not instruction.eqn.effects
            )
            wanted = [latest[v] for v in _writes(instruction) if v in latest]
            if movable and wanted and not any(v in outputs for v in _writes(instruction)):
                chosen = max(at, min(wanted))
            self.task_of[id(instruction)] = chosen
            for v in _reads(instruction):
                latest[v] = min(latest.get(v, chosen), chosen)

    def _link_loop(self, numbers: _Numbers) -> None:
        """Values on both sides of the loop's boundary have one number."""
        self.loop_inputs: list[Port] = []  # what the prologue has to provide, beside known values
        if self.loop is None:
            return
        num_consts, num_carry = self.counts()
        body = self.loop.body
        arrived = {self._slice_of(self.program.block.inputs[p]) for p, (w, _) in
                   self.arrives.items() if w == "inner"}  # fmt: skip
        for i, (outer, inner) in enumerate(zip(self.loop.operands, body.inputs, strict=True)):
            if i < num_consts:
                if not _is_literal(outer) and outer in self.known:
                    self.inner[inner] = self.known[outer]
                else:
                    number = numbers.new(self.number, inner, self.mesh, False, "")
                    self.inner[inner] = number
                    if _is_literal(outer):
                        self.loop_inputs.append(Port(number, outer))
                    else:
                        self.known[outer] = number
                        self.loop_inputs.append(Port(number, outer))
            elif i < num_consts + num_carry:
                number = numbers.new(self.number, inner, self.mesh, False, "accumulator")
                self.inner[inner] = number
                self.loop_inputs.append(Port(number, outer))
            elif inner not in arrived:
                number = numbers.new(self.number, inner, self.mesh, True, "")
                self.inner[inner] = number
                self.loop_inputs.append(Port(number, outer, stacked=True))
        made = {v: x for x in self.body for v in _writes(x)}
        self.body_outputs: list[tuple[int, Version]] = []  # numbers that the body writes
        for i, (outer, inner) in enumerate(zip(self.loop.results, body.outputs, strict=True)):
            if i < num_carry:
                number = self.inner[body.inputs[num_consts + i]]
                if _is_literal(inner) or inner != body.inputs[num_consts + i]:
                    self.body_outputs.append((number, inner))
                if not isinstance(outer.atom, DropVar):
                    self.known[outer] = number
            elif not isinstance(outer.atom, DropVar) and self._is_read_outside(outer):
                is_made = not _is_literal(inner) and inner in made
                number = self.inner.get(inner, -1) if is_made else -1
                if number < 0:
                    number = numbers.new(self.number, inner, self.mesh, True, "")
                    if is_made:
                        self.inner[inner] = number
                    self.body_outputs.append((number, inner))
                self.known[outer] = number
                self.stacked.add(outer)
        for where, version in self.sends.values():
            if where == "inner" and version not in self.inner:
                number = numbers.new(self.number, version, self.mesh, True, "activation")
                self.inner[version] = number
                self.body_outputs.append((number, version))
            elif where == "inner" and version not in made:
                raise AssertionError("a stage sends on what it received")

    def _is_read_outside(self, version: Version) -> bool:
        live = [v for o, v in enumerate(self.program.block.outputs) if o not in self.sends]
        live += [v for w, v in self.sends.values() if w == "outer"]
        if any(not _is_literal(v) and v == version for v in live):
            return True
        return any(version in _reads(x) for x in _needed(self.behind, live))

    def sent(self, link: Link, numbers: _Numbers) -> int:
        """The number of the value that a link carries."""
        where, version = self.sends[link.source_output]
        number = (self.inner if where == "inner" else self.known)[version]
        value = numbers.values[number]
        if not value.label:
            numbers.values[number] = replace(value, label=link.label)
        return number

    # -- around the loop ---------------------------------------------------------------------------

    def _outer_groups(self, levels: Levels) -> dict[Level, list[Instruction]]:
        wanted = [v for o, v in enumerate(self.program.block.outputs) if o not in self.sends]
        wanted += [v for w, v in self.sends.values() if w == "outer"]
        behind = _needed(self.behind, wanted)
        wanted += [v for x in behind for v in _reads(x)]
        wanted += [port.version for port in self.loop_inputs]
        before = _needed(self.before, wanted)
        groups: dict[Level, list[Instruction]] = defaultdict(list)
        for phase, part in ((0, before), (1, behind)):
            for instruction in part:
                operands = [levels.get(v, FIRST) for v in _reads(instruction)]
                groups[max([(phase, 0), *operands])].append(instruction)
        return groups

    def _number_outer(self, groups: dict[Level, list[Instruction]], numbers: _Numbers) -> None:
        """Numbers for what one round makes and another reads, or the caller or a link takes."""
        self.made_in: dict[Version, Level] = {}
        for key, group in groups.items():
            for instruction in group:
                self.made_in.update((v, key) for v in _writes(instruction))
        crossing: dict[Version, None] = {}
        for key, group in groups.items():
            for instruction in group:
                for v in _reads(instruction):
                    if not _is_literal(v) and self.made_in.get(v, key) != key:
                        crossing[v] = None
        self.literal_results: list[Port] = []
        for v in crossing:
            if v not in self.known:
                self.known[v] = numbers.new(self.number, v, self.mesh, False, "")
        found: list[int | None] = []
        for position, v in enumerate(self.program.block.outputs):
            if self.sends.get(position, ("outer", v))[0] == "inner":
                found.append(None)
            elif _is_literal(v):
                number = numbers.new(self.number, v, self.mesh, False, "")
                self.literal_results.append(Port(number, v))
                found.append(number)
            else:
                if v not in self.known:
                    self.known[v] = numbers.new(self.number, v, self.mesh, False, "")
                found.append(self.known[v])
        self.output_values = tuple(found)

    def _make_outer(self, groups: dict[Level, list[Instruction]], phase: int) -> None:
        ports: dict[Level, list[Port]] = defaultdict(list)
        if phase == 0:
            for port in self.loop_inputs:
                literal = _is_literal(port.version)
                ports[FIRST if literal else self.made_in.get(port.version, FIRST)].append(port)
        elif self.literal_results:
            ports[1, 0] += self.literal_results
        for v, level in self.made_in.items():
            if level[0] == phase and v in self.known:
                port = Port(self.known[v], v)
                if port not in ports[level]:
                    ports[level].append(port)
        kind = KINDS[phase]
        for level in sorted({key for key in groups if key[0] == phase} | set(ports)):
            group, outputs = groups.get(level, []), ports[level]
            inputs: dict[Version, Port] = {}
            local = {v for x in group for v in _writes(x)}
            for v in _entering(group, outputs):
                if v not in local:
                    inputs[v] = Port(self.known[v], v, v in self.stacked)
            self._add(f"{kind} {self.number}.{level[1]}", kind, inputs.values(), outputs, group)

    def _add(
        self,
        name: str,
        kind: PieceKind,
        inputs: Iterable[Port],
        outputs: Sequence[Port],
        instructions: Sequence[Instruction],
    ) -> None:
        inputs = tuple(inputs)
        if not outputs and not any(map(_has_effect, instructions)):
            return
        self.pieces.append(
            StagePiece(
                name,
                self.number,
                kind,
                inputs,
                tuple(outputs),
                tuple(instructions),
                _donated(inputs, outputs),
            )
        )

    def _recompute(
        self, by_task: dict[int, list[Instruction]], maker: Mapping[Version, int]
    ) -> dict[Version, int]:
        """Let the first later task run what it needs of F again; says where values are found.

        What F sends, collects and accumulates stays F's; effects happen once.
        """
        later = [task for task in sorted(by_task) if task > 0]
        if not later or 0 not in by_task:
            return dict(maker)
        wanted = {
            v for task in later for x in by_task[task] for v in _reads(x) if maker.get(v) == 0
        }
        again = _needed(_without_effects(by_task[0]), wanted)
        by_task[later[0]] = [*again, *by_task[later[0]]]
        remade = {v for x in again for v in _writes(x)}
        return {v: later[0] if v in remade else task for v, task in maker.items()}

    # -- the loop's body ---------------------------------------------------------------------------

    def _make_body(self, numbers: _Numbers) -> None:
        if self.loop is None:
            return
        by_task: dict[int, list[Instruction]] = defaultdict(list)
        for instruction in self.body:
            by_task[self.task_of[id(instruction)]].append(instruction)
        maker = {v: self.task_of[id(x)] for x in self.body for v in _writes(x)}
        found_in = self._recompute(by_task, maker) if self.remat else maker
        kept: dict[Version, int] = {}  # what one task leaves for another
        # A value that enters the body and leaves it as it is leaves with the first task.
        first = min(by_task, default=0)
        writes: dict[int, dict[Version, list[int]]] = defaultdict(lambda: defaultdict(list))
        constant: list[Port] = []
        for number, version in self.body_outputs:
            if _is_literal(version):
                constant.append(Port(number, version))
            else:
                writes[maker.get(version, first)][version].append(number)
        for _, group in sorted(by_task.items()):
            local = {v for x in group for v in _writes(x)}
            for v in dict.fromkeys(v for x in group for v in _reads(x)):
                if v not in maker or v in local:
                    continue
                if not writes[found_in[v]][v]:
                    number = numbers.new(self.number, v, self.mesh, True, "residual")
                    writes[found_in[v]][v].append(number)
                kept[v] = writes[found_in[v]][v][0]
        tasks = {*by_task, *(t for t, w in writes.items() if w), *([first] if constant else [])}
        for task in sorted(tasks):
            group = by_task.get(task, [])
            outputs = [Port(n, v) for v, found in writes[task].items() for n in found]
            if task == first:
                outputs += constant
            local = {v for x in group for v in _writes(x)}
            inputs: dict[Version, Port] = {}
            for v in _entering(group, outputs):
                if v not in local:
                    inputs[v] = Port(kept[v] if v in kept else self.inner[v], v)
            kind = TASKS[task]
            self._add(f"{kind}{self.number}", kind, inputs.values(), outputs, group)


def _entered(
    instructions: Sequence[Instruction],
    arriving: Version,
    planned: Version,
    mesh: tuple[int, ...],
    purpose: str,
) -> list[Instruction]:
    """A value arrives in another layout than planned, which then is the one that has to be made."""
    steps = reshard_steps(arriving.layout, planned.layout, mesh)
    rest = [x for x in instructions if arriving not in _writes(x)]
    return [Reshard(arriving, planned, steps, purpose, ""), *rest]


def _without_effects(instructions: Sequence[Instruction]) -> list[Instruction]:
    return [x for x in instructions if not _has_effect(x)]


def _ordered(instructions: Sequence[Instruction], inputs: Sequence[Version]) -> list[Instruction]:
    """In an order in which everything is written before it is read."""
    known = set(inputs)
    made = {v for x in instructions for v in _writes(x)}
    waiting, result = list(instructions), []
    while waiting:
        left = []
        for instruction in waiting:
            if all(v in known or v not in made for v in _reads(instruction)):
                result.append(instruction)
                known.update(_writes(instruction))
            else:
                left.append(instruction)
        assert len(left) < len(waiting), "instructions wait for each other"
        waiting = left
    return result


def _entering(group: Sequence[Instruction], outputs: Sequence[Port]) -> list[Version]:
    """What instructions read, and what goes out as it came in."""
    return [
        *(v for x in group for v in _reads(x)),
        *(port.version for port in outputs if not _is_literal(port.version)),
    ]


def _donated(inputs: Sequence[Port], outputs: Sequence[Port]) -> tuple[int, ...]:
    """Inputs in whose place an output of the same shape, dtype and layout can be written."""

    def form(port: Port) -> Any:
        aval = port.version.atom.aval
        return aval.shape, str(aval.dtype), port.version.layout

    free: dict[Any, int] = defaultdict(int)
    numbers = {port.value for port in inputs}
    same = {port.value for port in outputs if port.value in numbers}
    for port in outputs:
        if not port.stacked and port.value not in same:
            free[form(port)] += 1
    found = list(same)
    for port in inputs:
        if port.stacked or port.value in same:
            continue
        if free[form(port)] > 0:
            free[form(port)] -= 1
            found.append(port.value)
    return tuple(sorted(found))


def _levels(cutters: Sequence[_Stage], links: Sequence[Link]) -> list[Levels]:
    """The round of the prologue (0, r) or epilogue (1, r) in which each outer version is made.

    What arrives from another stage's round r can be read in round r + 1.
    """
    levels: list[Levels] = [
        dict.fromkeys(cutter.loop.results if cutter.loop else (), (1, 0)) for cutter in cutters
    ]
    changed = True
    most = len(links) + 2
    while changed:
        changed = False
        assert all(number < most for found in levels for _, number in found.values()), (
            "stages wait for each other's values in a cycle"
        )
        for cutter, found in zip(cutters, levels, strict=True):
            for phase, part in ((0, cutter.before), (1, cutter.behind)):
                for instruction in part:
                    operands = [found.get(v, FIRST) for v in _reads(instruction)]
                    level = max([(phase, 0), *operands])
                    for v in _writes(instruction):
                        changed |= found.get(v, BEFORE) < level
                        found[v] = max(found.get(v, BEFORE), level)
        for link in links:
            if link.per_microbatch:
                continue
            _, sent = cutters[link.source].sends[link.source_output]
            _, arriving = cutters[link.target].arrives[link.target_input]
            phase, number = levels[link.source].get(sent, FIRST)
            level = (phase, number + 1)
            known = levels[link.target].get(arriving, BEFORE)
            changed |= known < level
            levels[link.target][arriving] = max(known, level)
    return levels
