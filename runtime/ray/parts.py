"""A pipelined plan taken apart: what each mesh's process must know, as values that pickle.

The instruction lists are those of the program. What the local runtime leaves to `jax.device_put`
is written down here: the route of every buffer of a `Send`, and that of a leaf which a stage reads
away from its home (a tied embedding, a counter): where it lives, the caller holds it between
steps, and its home hands it on when a step begins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from autopar.passes.pipeline.instructions import (
    Accumulate,
    Buffer,
    Instruction,
    PipelineProgram,
    Recv,
    Reshard,
    Run,
    Send,
)
from autopar.passes.sharding.layout import num_parts
from autopar.passes.sharding.program import Block, Program, Version
from autopar.passes.stages.candidate import Runnable
from autopar.passes.stages.pieces import Pieces
from autopar.passes.stages.result import LeafRows
from autopar.runtime.ray.routes import Route, Spread, route
from autopar.runtime.ray.tiles import plain
from autopar.runtime.stages import spec_of

FIRST_OWN_TAG = 1 << 32
"""Tags from here on are not a program's: leaves that their homes hand on."""


@dataclass(frozen=True)
class Slot:
    """A value of this mesh that takes a leaf, or rows of one, when a step begins.

    Args:
      value: its number.
      leaf: the number of the leaf.
      part: which rows of the leaf, 0 if it is whole.
      is_home: whether the leaf lives here between steps.
    """

    value: int
    leaf: int
    part: int
    is_home: bool


@dataclass(frozen=True)
class HandOn:
    """A leaf that goes from its home to another mesh at the start of a step.

    Args:
      leaf, part: which.
      value: its number on this side.
      route: of its numbers.
    """

    leaf: int
    part: int
    value: int
    route: Route


@dataclass(frozen=True)
class MeshPart:
    """What the process of one mesh must know.

    Args:
      mesh: its number.
      stages: those that it runs.
      num_devices: of the mesh.
      pieces: those of the plan; only this mesh's are there.
      program: that of the plan; only this mesh's instructions are there.
      routes: for each `Send` and `Recv` of this mesh, by tag, the route of every buffer.
      slots: what takes the leaves.
      hand_on: by receiving mesh, what this mesh hands on.
      handed: by sending mesh, what others hand on to this mesh.
      copies: (leaf, part, home value, value) of what another stage of this mesh takes from it.
      outputs: numbers of the values that the caller takes.
      awaited: for the index of a `Run`, the tags of the `Send`s that must have read what it takes
        over.
    """

    mesh: int
    stages: tuple[int, ...]
    num_devices: int
    pieces: Pieces
    program: PipelineProgram
    routes: dict[int, tuple[Route, ...]]
    slots: tuple[Slot, ...]
    hand_on: dict[int, tuple[HandOn, ...]]
    handed: dict[int, tuple[HandOn, ...]]
    copies: tuple[tuple[int, int, int, int], ...]
    outputs: tuple[int, ...]
    awaited: dict[int, tuple[int, ...]]

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """The list of this mesh."""
        return self.program.meshes[self.mesh]

    @property
    def peers(self) -> frozenset[int]:
        """The meshes that it sends to."""
        sends = {x.to for x in self.instructions if isinstance(x, Send)}
        return frozenset(sends | set(self.hand_on))

    @property
    def label(self) -> str:
        """`stage 0`, or `stages 0, 2` where the mesh has several."""
        return f"stage{'' if len(self.stages) == 1 else 's'} {', '.join(map(str, self.stages))}"


def take_apart(runnable: Runnable, num_leaves: int) -> tuple[MeshPart, ...]:
    """The part of every mesh.

    Args:
      runnable: the plan.
      num_leaves: of the step's arguments; the leaves behind them are constants, without slots.
    """
    pieces, program = runnable.pieces, runnable.program
    schedule = program.schedule
    routes = _routes(pieces, program)
    slots, hand_on, copies = _slots(runnable, num_leaves)
    wanted = {rows.number for group in runnable.results for rows in group}
    outputs = tuple(dict.fromkeys(pieces.outputs[number] for number in sorted(wanted)))
    parts = []
    for mesh in range(schedule.num_meshes):
        stages = tuple(s for s, home in enumerate(schedule.mesh_of_stage) if home == mesh)
        own = set(stages)
        numbers = {value.number for value in program.values if value.stage in own}
        instructions = program.meshes[mesh]
        tags = [x.tag for x in instructions if isinstance(x, (Send, Recv))]
        parts.append(
            MeshPart(
                mesh=mesh,
                stages=stages,
                num_devices=max(math.prod(pieces.programs[s].mesh) for s in stages),
                pieces=dataclasses.replace(
                    pieces,
                    programs=tuple(_without_block(p) for p in pieces.programs),
                    versions={n: v for n, v in pieces.versions.items() if n in numbers},
                    pieces=tuple(piece for piece in pieces.pieces if piece.stage in own),
                ),
                program=dataclasses.replace(
                    program,
                    meshes=tuple(x if m == mesh else () for m, x in enumerate(program.meshes)),
                    order=tuple((mesh, index) for index in range(len(instructions))),
                ),
                routes={tag: routes[tag] for tag in tags},
                slots=tuple(slots[mesh]),
                hand_on={
                    to: tuple(sent for sent, _ in pairs)
                    for (source, to), pairs in hand_on.items()
                    if source == mesh
                },
                handed={
                    source: tuple(received for _, received in pairs)
                    for (source, to), pairs in hand_on.items()
                    if to == mesh
                },
                copies=tuple(copies[mesh]),
                outputs=tuple(n for n in outputs if n in numbers),
                awaited=_awaited(instructions),
            )
        )
    return tuple(parts)


def home_values(runnable: Runnable) -> tuple[tuple[int, ...], ...]:
    """For every leaf of the arguments and constants, the value of each of its parts at home."""
    inputs = runnable.pieces.inputs
    return tuple(tuple(inputs[rows.number][0] for rows in group) for group in runnable.leaves)


def result_values(runnable: Runnable) -> tuple[tuple[int, ...], ...]:
    """For every leaf of the result, the value of each of its parts."""
    outputs = runnable.pieces.outputs
    return tuple(tuple(outputs[rows.number] for rows in group) for group in runnable.results)


def ends_of(group: Sequence[LeafRows]) -> tuple[int, ...]:
    """Behind the last row of each part of a leaf; () if it is whole."""
    return tuple(rows.stop for rows in group if rows.stop is not None)


def spread_of(version: Version, program: Program) -> Spread:
    """How the numbers behind a value lie on its stage's mesh."""
    aval, layout = version.atom.aval, version.layout
    shape, _ = plain(aval.shape, aval.dtype)
    dims = (*layout.dims, *((),) * (len(shape) - len(aval.shape)))
    if layout.partial:
        axes = tuple(axis for axis, _ in layout.partial)
        shape, dims = (num_parts(axes, program.mesh), *shape), (axes, *dims)
    return Spread(shape, dims, program.mesh)


def held_shape(version: Version, program: Program) -> tuple[int, ...]:
    """The shape of the array that holds a value (see `stages.Place`)."""
    _, partial = spec_of(version, program)
    shape = tuple(version.atom.aval.shape)
    return shape if partial == 1 else (partial, *shape)


def spec(version: Version, program: Program) -> PartitionSpec:
    """How the array that holds a value is cut."""
    return spec_of(version, program)[0]


def _without_block(program: Program) -> Program:
    return Program(program.mesh, program.axis_names, Block((), (), ()))


def _routes(pieces: Pieces, program: PipelineProgram) -> dict[int, tuple[Route, ...]]:
    """By tag, the route of every buffer of a transfer."""
    targets = {
        x.tag: x.buffers
        for instructions in program.meshes
        for x in instructions
        if isinstance(x, Recv)
    }
    found = {}
    for mesh, instructions in enumerate(program.meshes):
        sent: dict[int, list[int]] = {}  # sends are balanced over the whole step
        for x in instructions:
            if not isinstance(x, Send):
                continue
            pairs = zip(x.buffers, targets[x.tag], strict=True)
            found[x.tag] = tuple(
                _route(pieces, program, a.value, b.value, sent.setdefault(mesh, []))
                for a, b in pairs
            )
    return found


def _route(
    pieces: Pieces, program: PipelineProgram, source: int, target: int, sent: list[int]
) -> Route:
    ends = []
    for number in (source, target):
        stage = program.value_of[number].stage
        ends.append(spread_of(pieces.versions[number], pieces.programs[stage]))
    sent += [0] * (math.prod(ends[0].mesh) - len(sent))
    return route(ends[0], ends[1], sent)


def _slots(
    runnable: Runnable, num_leaves: int
) -> tuple[
    list[list[Slot]],
    dict[tuple[int, int], list[tuple[HandOn, HandOn]]],
    list[list[tuple[int, int, int, int]]],
]:
    """For every mesh its slots; what is handed on by (source, target); copies within a mesh."""
    pieces, program = runnable.pieces, runnable.program
    meshes = program.schedule.num_meshes
    slots: list[list[Slot]] = [[] for _ in range(meshes)]
    copies: list[list[tuple[int, int, int, int]]] = [[] for _ in range(meshes)]
    hand_on: dict[tuple[int, int], list[tuple[HandOn, HandOn]]] = {}
    for leaf, group in enumerate(runnable.leaves[:num_leaves]):
        for part, rows in enumerate(group):
            home, *others = pieces.inputs[rows.number]
            here = program.mesh_of(home)
            slots[here].append(Slot(home, leaf, part, True))
            for value in others:
                there = program.mesh_of(value)
                slots[there].append(Slot(value, leaf, part, False))
                if there == here:
                    copies[here].append((leaf, part, home, value))
                    continue
                way = _route(pieces, program, home, value, [])
                hand_on.setdefault((here, there), []).append(
                    (HandOn(leaf, part, home, way), HandOn(leaf, part, value, way))
                )
    return slots, hand_on, copies


def _awaited(instructions: Sequence[Instruction]) -> dict[int, tuple[int, ...]]:
    """Which `Send`s a `Run` must wait for: those that read what it donates.

    After an `Accumulate` or a `Reshard` one array may have two names.
    """
    alias: dict[Buffer, Buffer] = {}

    def root(buffer: Buffer) -> Buffer:
        while buffer in alias:
            buffer = alias[buffer]
        return buffer

    sends: dict[Buffer, list[int]] = {}
    found = {}
    for index, x in enumerate(instructions):
        if isinstance(x, Send):
            for buffer in x.buffers:
                sends.setdefault(root(buffer), []).append(x.tag)
        elif isinstance(x, (Accumulate, Reshard)):
            source = x.addend if isinstance(x, Accumulate) else x.source
            if root(source) != root(x.target):
                sends.setdefault(root(source), []).extend(sends.pop(root(x.target), []))
                alias[root(x.target)] = root(source)
        elif isinstance(x, Run):
            tags = [tag for buffer in x.donates for tag in sends.get(root(buffer), ())]
            if tags:
                found[index] = tuple(dict.fromkeys(tags))
    return found
