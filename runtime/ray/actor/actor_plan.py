"""What an actor must know of a pipelined plan, as values that pickle.

A mesh has one process or several, each with as many of its devices, in their order. All processes
of a mesh run its list of instructions; a route tells each which bytes it sends and gets.

The instruction lists are those of the program. What the local runtime leaves to `jax.device_put`
is written down here: the route of every buffer of a `Send`, and that of a leaf which a stage reads
away from its home (a tied embedding, a counter): where it lives, the caller holds it between
steps, and its home hands it on when a step begins.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from autopar.passes.pieces.pieces import Pieces, Runnable
from autopar.passes.pipeline.instructions import Instruction, PipelineProgram, Recv, Send
from autopar.passes.sharding.layout import num_parts
from autopar.passes.sharding.spmd_program import Block
from autopar.runtime.ray.transport.host_tiles import plain
from autopar.runtime.ray.transport.routes import (
    Box,
    Route,
    Spread,
    Way,
    actors_of_meshes,
    devices_of_process,
    route,
)

FIRST_OWN_TAG = 1 << 32
"""Tags from here on are not a program's: leaves that their homes hand on."""
PASSED_ON = 1 << 40
"""This bit of a tag says that a process of the receiving mesh passes it on."""


class Slot(NamedTuple):
    """A value of this mesh that takes a leaf, or rows of one, when a step begins.

    Args:
      value: its number.
      leaf: the number of the leaf.
      part: which rows of the leaf, 0 if it is whole.
      is_home: whether the leaf lives here between steps.
      carried: the value of a step's result that the next step takes as this one, from wherever its
        home is; None: the leaf is not carried from step to step.
    """

    value: int
    leaf: int
    part: int
    is_home: bool
    carried: int | None = None


class HandOn(NamedTuple):
    """A part of a leaf that goes from its home to another mesh at the start of a step.

    It has the number `value` on this side; the way says what this process sends or gets of it.
    """

    leaf: int
    part: int
    value: int
    way: Way


@dataclass(frozen=True)
class ActorPlan:
    """What a process of one mesh must know.

    It is a process of a mesh, which runs stages on so many devices; of the pieces and the program
    of the plan only this mesh's are there.

    Args:
      processes: for every mesh, the actors that are its processes.
      ways: for each `Send` and `Recv` of this mesh, by tag, the way of every buffer.
      slots: what takes the leaves.
      carried: those of `outputs` that the next step takes over, where the caller gives it all that
        this one returned for it.
      hand_on: by receiving mesh, what this mesh hands on.
      handed: by sending mesh, what others hand on to this mesh.
      copies: (leaf, part, home value, value) of what another stage of this mesh takes from it.
      outputs: numbers of the values that the caller takes.
    """

    mesh: int
    process: int
    processes: tuple[tuple[int, ...], ...]
    stages: tuple[int, ...]
    num_devices: int
    pieces: Pieces
    program: PipelineProgram
    ways: dict[int, tuple[Way, ...]]
    slots: tuple[Slot, ...]
    carried: tuple[int, ...]
    hand_on: dict[int, tuple[HandOn, ...]]
    handed: dict[int, tuple[HandOn, ...]]
    copies: tuple[tuple[int, int, int, int], ...]
    outputs: tuple[int, ...]

    @property
    def content_hash(self) -> str:
        """Of what all processes of a mesh run alike: its pieces, and its list of instructions."""
        pieces = self.pieces
        blocks = (replace(pieces.programs[x.stage], block=x.block) for x in pieces.pieces)
        text = "\n".join(map(str, (*blocks, *self.program.meshes[self.mesh])))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """The list of this mesh."""
        return self.program.meshes[self.mesh]

    @functools.cached_property
    def fresh_slots(self) -> tuple[Slot, ...]:
        """Those of leaves that are not carried from step to step."""
        return tuple(slot for slot in self.slots if slot.carried is None)

    @property
    def actor(self) -> int:
        """The number of the process among all."""
        return self.siblings[self.process]

    @property
    def siblings(self) -> tuple[int, ...]:
        """The actors of this mesh."""
        return self.processes[self.mesh]

    @property
    def own(self) -> range:
        """The numbers of the process's devices in the mesh."""
        return devices_of_process(self.num_devices, self.process, len(self.siblings))

    @property
    def peers(self) -> frozenset[int]:
        """The actors that it sends to."""
        meshes = {x.to for x in self.instructions if isinstance(x, Send)} | set(self.hand_on)
        found = {actor for mesh in meshes for actor in self.processes[mesh]}
        return frozenset(found | set(self.siblings)) - {self.actor}

    @property
    def label(self) -> str:
        """`stage 0`, or `stages 0, 2` where the mesh has several; and which process of several."""
        stages = f"stage{'' if len(self.stages) == 1 else 's'} {', '.join(map(str, self.stages))}"
        return stages if len(self.siblings) == 1 else f"{stages} (process {self.process})"

    def held(self, value: int) -> dict[Box, list[int]]:
        """What the process's devices hold of a value's numbers, and the devices that hold it."""
        found: dict[Box, list[int]] = {}
        boxes = self._spread(value).boxes()
        for device in self.own:
            if device < len(boxes):
                found.setdefault(boxes[device], []).append(device)
        return found

    def sources(self, value: int) -> tuple[tuple[int, Box | None], ...]:
        """Where all of a value's numbers can be read: actors, and what each gives; None: all."""
        if len(self.siblings) == 1:
            return ((self.actor, None),)
        holders: dict[Box, list[int]] = {}
        for device, box in enumerate(self._spread(value).boxes()):
            actor = self.siblings[device // len(self.own)]
            if actor not in holders.setdefault(box, []):
                holders[box].append(actor)
        return tuple((actors[value % len(actors)], box) for box, actors in holders.items())

    def numbers_of(self, value: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of a value's numbers."""
        aval = self.pieces.versions[value].atom.aval
        return self._spread(value).shape, plain((), aval.dtype)[1]

    def _spread(self, value: int) -> Spread:
        return _spread_of(self.pieces, self.program, value)


def _spread_of(pieces: Pieces, program: PipelineProgram, value: int) -> Spread:
    """How the numbers behind a value lie on its stage's mesh."""
    aval, layout = pieces.versions[value].atom.aval, pieces.versions[value].layout
    mesh = pieces.programs[program.value_of[value].stage].mesh
    shape, _ = plain(aval.shape, aval.dtype)
    dims = (*layout.dims, *((),) * (len(shape) - len(aval.shape)))
    if layout.partial:
        axes = tuple(axis for axis, _ in layout.partial)
        shape, dims = (num_parts(axes, mesh), *shape), (axes, *dims)
    return Spread(shape, dims, mesh)


def partition_plan(
    runnable: Runnable,
    num_leaves: int,
    counts: Sequence[int],
    carried: Mapping[int, int] | None = None,
) -> tuple[ActorPlan, ...]:
    """The part of every process, by actor, where each mesh has so many processes (`counts`).

    The leaves after those of the step's arguments (`num_leaves`) are constants, without slots.
    `carried` is, by leaf, the number of the result that the next step takes over in its place.
    """
    pieces, program = runnable.pieces, runnable.program
    schedule = program.schedule
    processes = actors_of_meshes(counts)
    routes = _Routes(pieces, program, counts)
    values = result_values(runnable)
    followers = {leaf: values[result] for leaf, result in (carried or {}).items()}
    taken = set(itertools.chain.from_iterable(followers.values()))
    slots, hand_on, copies = _slots(runnable, num_leaves, routes, followers)
    wanted = {rows.number for group in runnable.results for rows in group}
    outputs = tuple(dict.fromkeys(pieces.outputs[number] for number in sorted(wanted)))
    parts = []
    for mesh, process in ((m, p) for m in range(schedule.num_meshes) for p in range(counts[m])):
        stages = tuple(s for s, home in enumerate(schedule.mesh_of_stage) if home == mesh)
        own = set(stages)
        numbers = {value.number for value in program.values if value.stage in own}
        instructions = program.meshes[mesh]
        way = functools.partial(routes.way, mesh=mesh, process=process)
        parts.append(
            ActorPlan(
                mesh=mesh,
                process=process,
                processes=processes,
                stages=stages,
                num_devices=routes.num_devices[mesh],
                pieces=dataclasses.replace(
                    pieces,
                    programs=tuple(
                        dataclasses.replace(p, block=Block((), (), ())) for p in pieces.programs
                    ),
                    versions={n: v for n, v in pieces.versions.items() if n in numbers},
                    pieces=tuple(piece for piece in pieces.pieces if piece.stage in own),
                ),
                program=dataclasses.replace(
                    program,
                    meshes=tuple(x if m == mesh else () for m, x in enumerate(program.meshes)),
                    order=tuple((mesh, index) for index in range(len(instructions))),
                ),
                ways={
                    x.tag: tuple(map(way, routes.by_tag[x.tag]))
                    for x in instructions
                    if isinstance(x, (Send, Recv))
                },
                slots=tuple(slots[mesh]),
                carried=tuple(n for n in outputs if n in numbers and n in taken),
                hand_on={
                    to: tuple(HandOn(x.leaf, x.part, x.home, way(x.crossing)) for x in found)
                    for (source, to), found in hand_on.items()
                    if source == mesh
                },
                handed={
                    source: tuple(HandOn(x.leaf, x.part, x.value, way(x.crossing)) for x in found)
                    for (source, to), found in hand_on.items()
                    if to == mesh
                },
                copies=tuple(copies[mesh]),
                outputs=tuple(n for n in outputs if n in numbers),
            )
        )
    return tuple(parts)


def result_values(runnable: Runnable) -> tuple[tuple[int, ...], ...]:
    """For every leaf of the result, the value of each of its parts."""
    outputs = runnable.pieces.outputs
    return tuple(tuple(outputs[rows.number] for rows in group) for group in runnable.results)


class _Crossing(NamedTuple):
    """The route of one array, and the meshes at its ends."""

    route: Route
    source: int
    target: int


class _Handed(NamedTuple):
    """A leaf, or rows of one, that its home hands on to another mesh."""

    leaf: int
    part: int
    home: int
    value: int
    crossing: _Crossing


class _Routes:
    """The routes of a plan, as each process sees them; `counts` are those of the meshes' processes.

    Attributes:
      num_devices: of every mesh.
      by_tag: for each `Send`, how every buffer crosses.
    """

    def __init__(self, pieces: Pieces, program: PipelineProgram, counts: Sequence[int]) -> None:
        self._pieces, self._program, self._counts = pieces, program, counts
        homes = program.schedule.mesh_of_stage
        self.num_devices = tuple(
            max(math.prod(pieces.programs[s].mesh) for s, home in enumerate(homes) if home == mesh)
            for mesh in range(program.schedule.num_meshes)
        )
        targets = {
            x.tag: x.buffers
            for instructions in program.meshes
            for x in instructions
            if isinstance(x, Recv)
        }
        self.by_tag: dict[int, tuple[_Crossing, ...]] = {}
        for instructions in program.meshes:
            sent: list[int] = []  # sends are balanced over the whole step
            for x in instructions:
                if isinstance(x, Send):
                    self.by_tag[x.tag] = tuple(
                        self.between(a.value, b.value, sent)
                        for a, b in zip(x.buffers, targets[x.tag], strict=True)
                    )

    def between(self, source: int, target: int, sent: list[int]) -> _Crossing:
        """The route from one value to another, which is added to what was sent."""
        here, there = map(self._program.mesh_of, (source, target))
        first, last = (_spread_of(self._pieces, self._program, n) for n in (source, target))
        sent += [0] * (math.prod(first.mesh) - len(sent))
        return _Crossing(route(first, last, sent, self._counts[there]), here, there)

    def way(self, crossing: _Crossing, mesh: int, process: int) -> Way:
        """What a process of one of its meshes sends, or gets."""
        own, num_targets = self._own(mesh, process), self._counts[crossing.target]
        if mesh == crossing.source:
            return crossing.route.departure(own, num_targets)
        sources = [self._own(crossing.source, n) for n in range(self._counts[crossing.source])]
        return crossing.route.arrival(process, own, num_targets, sources)

    def _own(self, mesh: int, process: int) -> range:
        return devices_of_process(self.num_devices[mesh], process, self._counts[mesh])


def _slots(
    runnable: Runnable, num_leaves: int, routes: _Routes, followers: Mapping[int, Sequence[int]]
) -> tuple[
    list[list[Slot]], dict[tuple[int, int], list[_Handed]], list[list[tuple[int, int, int, int]]]
]:
    """For every mesh its slots; what is handed on by (source, target); copies within a mesh."""
    pieces, program = runnable.pieces, runnable.program
    meshes = program.schedule.num_meshes
    slots: list[list[Slot]] = [[] for _ in range(meshes)]
    copies: list[list[tuple[int, int, int, int]]] = [[] for _ in range(meshes)]
    hand_on: dict[tuple[int, int], list[_Handed]] = {}
    for leaf, group in enumerate(runnable.leaves[:num_leaves]):
        for part, rows in enumerate(group):
            home, *others = pieces.inputs[rows.number]
            here = program.mesh_of(home)
            carried = followers[leaf][part] if leaf in followers else None
            slots[here].append(Slot(home, leaf, part, True, carried))
            for value in others:
                there = program.mesh_of(value)
                slots[there].append(Slot(value, leaf, part, False, carried))
                if there == here:
                    copies[here].append((leaf, part, home, value))
                else:
                    found = _Handed(leaf, part, home, value, routes.between(home, value, []))
                    hand_on.setdefault((here, there), []).append(found)
    return slots, hand_on, copies
