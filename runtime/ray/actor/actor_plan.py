"""What an actor must know of a pipelined plan, as values that pickle.

A mesh has one process or several, each with as many of its devices, in their order. All processes
of a mesh run its list of instructions; a route tells each which bytes it sends and gets.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autopar.passes.pieces.pieces import Pieces
from autopar.passes.pipeline.instructions import (
    Instruction,
    PipelineProgram,
    Send,
)
from autopar.passes.sharding.layout import num_parts
from autopar.passes.sharding.spmd_program import ShardedValue, SpmdProgram
from autopar.runtime.ray.transport.host_tiles import plain
from autopar.runtime.ray.transport.mesh_processes import devices_of_process
from autopar.runtime.ray.transport.routes import (
    Arrival,
    Box,
    Departure,
    Spread,
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


@dataclass(frozen=True)
class HandOn:
    """A leaf that goes from its home to another mesh at the start of a step.

    Args:
      leaf, part: which.
      value: its number on this side.
      way: what this process sends or gets of its numbers.
    """

    leaf: int
    part: int
    value: int
    way: Departure | Arrival


@dataclass(frozen=True)
class ActorPlan:
    """What a process of one mesh must know.

    Args:
      mesh: its number.
      process: the number of the process among those of its mesh.
      processes: for every mesh, the actors that are its processes.
      stages: those that it runs.
      num_devices: of the mesh.
      pieces: those of the plan; only this mesh's are there.
      program: that of the plan; only this mesh's instructions are there.
      ways: for each `Send` and `Recv` of this mesh, by tag, the way of every buffer.
      slots: what takes the leaves.
      carried: those of `outputs` that the next step takes over, where the caller gives it all that
        this one returned for it.
      hand_on: by receiving mesh, what this mesh hands on.
      handed: by sending mesh, what others hand on to this mesh.
      copies: (leaf, part, home value, value) of what another stage of this mesh takes from it.
      outputs: numbers of the values that the caller takes.
      awaited: for the index of a `Run`, the tags of the `Send`s that must have read what it takes
        over.
    """

    mesh: int
    process: int
    processes: tuple[tuple[int, ...], ...]
    stages: tuple[int, ...]
    num_devices: int
    pieces: Pieces
    program: PipelineProgram
    ways: dict[int, tuple[Departure | Arrival, ...]]
    slots: tuple[Slot, ...]
    carried: tuple[int, ...]
    hand_on: dict[int, tuple[HandOn, ...]]
    handed: dict[int, tuple[HandOn, ...]]
    copies: tuple[tuple[int, int, int, int], ...]
    outputs: tuple[int, ...]
    awaited: dict[int, tuple[int, ...]]

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

    def shape_of(self, value: int) -> tuple[int, ...]:
        """Of a value's numbers."""
        return self._spread(value).shape

    def dtype_of(self, value: int) -> np.dtype[Any]:
        """Of a value's numbers."""
        return plain((), self.pieces.versions[value].atom.aval.dtype)[1]

    def _spread(self, value: int) -> Spread:
        stage = self.program.value_of[value].stage
        return spread_of(self.pieces.versions[value], self.pieces.programs[stage])


def spread_of(version: ShardedValue, program: SpmdProgram) -> Spread:
    """How the numbers behind a value lie on its stage's mesh."""
    aval, layout = version.atom.aval, version.layout
    shape, _ = plain(aval.shape, aval.dtype)
    dims = (*layout.dims, *((),) * (len(shape) - len(aval.shape)))
    if layout.partial:
        axes = tuple(axis for axis, _ in layout.partial)
        shape, dims = (num_parts(axes, program.mesh), *shape), (axes, *dims)
    return Spread(shape, dims, program.mesh)
