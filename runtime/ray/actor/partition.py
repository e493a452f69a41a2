"""A pipelined plan taken apart: the part of every actor.

The instruction lists are those of the program. What the local runtime leaves to `jax.device_put`
is written down here: the route of every buffer of a `Send`, and that of a leaf which a stage reads
away from its home (a tied embedding, a counter): where it lives, the caller holds it between
steps, and its home hands it on when a step begins.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.passes.pieces.pieces import Pieces, Runnable
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
from autopar.passes.sharding.spmd_program import Block, SpmdProgram
from autopar.passes.slicing.stage_graphs import LeafRows
from autopar.runtime.ray.actor.actor_plan import ActorPlan, HandOn, Slot, spread_of
from autopar.runtime.ray.transport.mesh_processes import actors_of_meshes, devices_of_process
from autopar.runtime.ray.transport.routes import (
    Arrival,
    Departure,
    Route,
    arrival,
    departure,
    route,
)


def partition_plan(
    runnable: Runnable,
    num_leaves: int,
    counts: Sequence[int],
    carried: Mapping[int, int] | None = None,
) -> tuple[ActorPlan, ...]:
    """The part of every process, by actor.

    Args:
      runnable: the plan.
      num_leaves: of the step's arguments; the leaves after them are constants, without slots.
      counts: how many processes each mesh has.
      carried: by leaf, the number of the result that the next step takes over in its place.
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
        parts.append(
            ActorPlan(
                mesh=mesh,
                process=process,
                processes=processes,
                stages=stages,
                num_devices=routes.num_devices[mesh],
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
                ways={
                    x.tag: tuple(routes.way(c, mesh, process) for c in routes.by_tag[x.tag])
                    for x in instructions
                    if isinstance(x, (Send, Recv))
                },
                slots=tuple(slots[mesh]),
                carried=tuple(n for n in outputs if n in numbers and n in taken),
                hand_on={
                    to: tuple(
                        HandOn(x.leaf, x.part, x.home, routes.way(x.crossing, mesh, process))
                        for x in found
                    )
                    for (source, to), found in hand_on.items()
                    if source == mesh
                },
                handed={
                    source: tuple(
                        HandOn(x.leaf, x.part, x.value, routes.way(x.crossing, mesh, process))
                        for x in found
                    )
                    for (source, to), found in hand_on.items()
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
    """After the last row of each part of a leaf; () if it is whole."""
    return tuple(rows.stop for rows in group if rows.stop is not None)


def _without_block(program: SpmdProgram) -> SpmdProgram:
    return SpmdProgram(program.mesh, program.axis_names, Block((), (), ()))


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
    """The routes of a plan, as each process sees them.

    Args:
      pieces: of the plan.
      program: of the plan.
      counts: how many processes each mesh has.

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
        ends, meshes = [], []
        for number in (source, target):
            stage = self._program.value_of[number].stage
            ends.append(spread_of(self._pieces.versions[number], self._pieces.programs[stage]))
            meshes.append(self._program.mesh_of(number))
        sent += [0] * (math.prod(ends[0].mesh) - len(sent))
        found = route(ends[0], ends[1], sent, self._counts[meshes[1]])
        return _Crossing(found, meshes[0], meshes[1])

    def way(self, crossing: _Crossing, mesh: int, process: int) -> Departure | Arrival:
        """What a process of one of its meshes sends, or gets."""
        own, num_targets = self._own(mesh, process), self._counts[crossing.target]
        if mesh == crossing.source:
            return departure(crossing.route, own, num_targets)
        sources = [self._own(crossing.source, n) for n in range(self._counts[crossing.source])]
        return arrival(crossing.route, process, own, num_targets, sources)

    def _own(self, mesh: int, process: int) -> range:
        return devices_of_process(self.num_devices[mesh], process, self._counts[mesh])


def _slots(
    runnable: Runnable,
    num_leaves: int,
    routes: _Routes,
    followers: Mapping[int, Sequence[int]],
) -> tuple[
    list[list[Slot]],
    dict[tuple[int, int], list[_Handed]],
    list[list[tuple[int, int, int, int]]],
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
                    continue
                crossing = routes.between(home, value, [])
                found = _Handed(leaf, part, home, value, crossing)
                hand_on.setdefault((here, there), []).append(found)
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
