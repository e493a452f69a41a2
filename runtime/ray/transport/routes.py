"""Which bytes go where when an array moves from one mesh to another, as plain data.

An array that is cut over a mesh consists of *tiles*, some of which several devices may hold. Every
part of the array crosses once: for each tile of the receiving mesh the overlapping tiles of the
sending mesh are found, each taken from one of the devices that hold it (the one that has sent
least), and the receiver gives the whole tile to all devices that want it.

A mesh may consist of several processes. What several of the receiving ones want is cut in as many
pieces; each gets one from the sender and passes it on to the others, which is an all-gather. So it
crosses between the meshes once also then. A mesh has one process, or one for each node whose
devices it takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.passes.schedules.schedule import Schedule
from autopar.passes.sharding.spmd_program import SpmdProgram

Box = tuple[tuple[int, int], ...]
"""First index and last index + 1 in every dimension."""


class Spread(NamedTuple):
    """How an array lies on a mesh.

    Args:
      shape: of the whole array.
      dims: for every dimension the mesh axes that cut it, the outermost first.
      mesh: the sizes of the mesh's axes. Devices are numbered in row-major order.
    """

    shape: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    mesh: tuple[int, ...]

    def boxes(self) -> list[Box]:
        """What each device holds.

        >>> Spread((4, 6), ((1,), ()), (2, 2)).boxes()[:2]
        [((0, 2), (0, 6)), ((2, 4), (0, 6))]
        """
        found = []
        for place in itertools.product(*map(range, self.mesh)):
            box = []
            for size, axes in zip(self.shape, self.dims, strict=True):
                number = 0
                for axis in axes:
                    number = number * self.mesh[axis] + place[axis]
                part = size // math.prod(self.mesh[axis] for axis in axes)
                box.append((number * part, (number + 1) * part))
            found.append(tuple(box))
        return found


class Move(NamedTuple):
    """Part of one device's tile that becomes part of a tile on the other mesh.

    Args:
      device: of the sending mesh.
      take: the part, counted from the start of what that device holds.
      tile: the number of the tile that receives it.
      put: where, counted from the start of that tile.
      processes: of the receiving mesh, which want it. The first gets it from the sender, and passes
        it on to the others.
    """

    device: int
    take: Box
    tile: int
    put: Box
    processes: tuple[int, ...] = (0,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what moves."""
        return tuple(stop - start for start, stop in self.take)


class Tile(NamedTuple):
    """What some devices of the receiving mesh hold alike."""

    shape: tuple[int, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """A route as one process sees it.

    Args:
      moves: of the sending mesh: from its devices, by the receiving process that gets them; of the
        receiving one: what it gets from the sending mesh, by sending process.
      passed_on: what it gets from the processes of its own mesh, in the order of their senders.
      tiles: by number, those that its devices hold, where it receives.
    """

    moves: tuple[tuple[Move, ...], ...]
    passed_on: tuple[tuple[Move, ...], ...] = ()
    tiles: dict[int, Tile] = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    """How one array crosses, to tiles of the receiving mesh.

    The moves are in the order in which their bytes are sent, each in row-major order.
    """

    moves: tuple[Move, ...]
    tiles: tuple[Tile, ...]

    def departure(self, own: Sequence[int], num_targets: int) -> Way:
        """What leaves from devices `own`, where the receiving mesh has `num_targets` processes."""
        moves: list[list[Move]] = [[] for _ in range(num_targets)]
        for move in self.moves:
            if move.device in own:
                moves[move.processes[0]].append(move)
        return Way(tuple(map(tuple, moves)))

    def arrival(
        self, process: int, own: Sequence[int], num_processes: int, sources: Sequence[range]
    ) -> Way:
        """What comes to a process, with devices `own`, of the receiving mesh's `num_processes`.

        `sources` are the numbers of the devices of each process of the sending mesh.
        """
        moves: list[list[Move]] = [[] for _ in sources]
        passed_on: list[list[Move]] = [[] for _ in range(num_processes)]
        # A message holds its moves in their order, and whoever passes on has read one after the
        # other.
        for sender, theirs in enumerate(sources):
            for move in self.moves:
                if move.device in theirs:
                    first, *others = move.processes
                    if first == process:
                        moves[sender].append(move)
                    elif process in others:
                        passed_on[first].append(move)
        tiles = {
            number: Tile(tile.shape, devices)
            for number, tile in enumerate(self.tiles)
            if (devices := tuple(device for device in tile.devices if device in own))
        }
        return Way(tuple(map(tuple, moves)), tuple(map(tuple, passed_on)), tiles)


def route(
    source: Spread, target: Spread, sent: list[int] | None = None, num_processes: int = 1
) -> Route:
    """The moves that bring an array from how it lies on one mesh to how it shall lie on another.

    Each process of the receiving mesh has as many of its devices, in their order. `sent` are the
    elements that each sending device has sent before; what it sends here is added, so that one list
    for several arrays balances them all.

    >>> print(route(Spread((4,), ((0,),), (2,)), Spread((4,), ((),), (3,))).tiles)
    (Tile(shape=(4,), devices=(0, 1, 2)),)
    """
    assert source.shape == target.shape, (source, target)
    sent = [0] * math.prod(source.mesh) if sent is None else sent
    holders, wanted = _by_box(source), _by_box(target)
    per_process = math.prod(target.mesh) // num_processes
    moves: list[Move] = []
    for tile, (box, devices) in enumerate(wanted.items()):
        processes = tuple(sorted({device // per_process for device in devices}))
        for held, senders in holders.items():
            both = _overlap(held, box)
            for piece in () if both is None else _cut(both, len(processes)):
                device = min(senders, key=sent.__getitem__)
                sent[device] += math.prod(stop - start for start, stop in piece)
                first = len(moves) % len(processes)
                order = processes[first:] + processes[:first]
                moves.append(Move(device, _within(piece, held), tile, _within(piece, box), order))
    tiles = tuple(
        Tile(tuple(stop - start for start, stop in box), tuple(devices))
        for box, devices in wanted.items()
    )
    return Route(tuple(moves), tiles)


def _by_box(spread: Spread) -> dict[Box, list[int]]:
    found: dict[Box, list[int]] = {}
    for device, box in enumerate(spread.boxes()):
        found.setdefault(box, []).append(device)
    return found


def _overlap(left: Box, right: Box) -> Box | None:
    """What both have; None if that is nothing (an array of no elements never crosses)."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return None if any(start >= stop for start, stop in both) else both


def _within(box: Box, outer: Box) -> Box:
    return tuple((a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))


def _cut(box: Box, count: int) -> list[Box]:
    """So many pieces of about one size along the longest dimension, none of them empty."""
    if count == 1 or not box:
        return [box]
    dim = max(range(len(box)), key=lambda d: box[d][1] - box[d][0])
    start, stop = box[dim]
    count = min(count, stop - start)
    bounds = [start + (stop - start) * n // count for n in range(count + 1)]
    return [(*box[:dim], rows, *box[dim + 1 :]) for rows in itertools.pairwise(bounds)]


def slices(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(start, stop) for start, stop in box)


def num_processes(
    schedule: Schedule, programs: Sequence[SpmdProgram], devices_per_node: int
) -> tuple[int, ...]:
    """How many processes every mesh has, where the programs are those of all stages.

    A mesh that does not consist of whole nodes, or whose stages have meshes of different sizes, has
    one process.
    """
    counts = []
    for mesh in range(schedule.num_meshes):
        sizes = {
            math.prod(programs[stage].mesh)
            for stage, home in enumerate(schedule.mesh_of_stage)
            if home == mesh
        }
        size = max(sizes)
        is_even = len(sizes) == 1 and size % devices_per_node == 0
        counts.append(size // devices_per_node if is_even else 1)
    return tuple(counts)


def actors_of_meshes(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For every mesh, the actors that are its processes.

    >>> actors_of_meshes([1, 2])
    ((0,), (1, 2))
    """
    ends = itertools.accumulate(counts)
    return tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True))


def devices_of_process(num_devices: int, process: int, num_processes: int) -> range:
    """The numbers of a process's devices in its mesh."""
    size = num_devices // num_processes
    return range(process * size, (process + 1) * size)
