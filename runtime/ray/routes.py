"""Which bytes go where when an array moves from one mesh to another, as plain data.

An array that is cut over a mesh consists of *tiles*, some of which several devices may hold. Every
part of the array crosses once: for each tile of the receiving mesh the overlapping tiles of the
sending mesh are found, each taken from one of the devices that hold it (the one that has sent
least), and the receiver gives the whole tile to all devices that want it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    """

    device: int
    take: Box
    tile: int
    put: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what moves."""
        return tuple(stop - start for start, stop in self.take)


class Tile(NamedTuple):
    """What some devices of the receiving mesh hold alike."""

    shape: tuple[int, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """How one array crosses.

    Args:
      moves: in the order in which their bytes are sent, each in row-major order.
      tiles: of the receiving mesh.
    """

    moves: tuple[Move, ...]
    tiles: tuple[Tile, ...]

    @property
    def size(self) -> int:
        """The number of elements that cross."""
        return sum(math.prod(move.shape) for move in self.moves)


def route(source: Spread, target: Spread, sent: list[int] | None = None) -> Route:
    """The moves that bring an array from one mesh to another.

    Args:
      source: how it lies on the sending mesh.
      target: how it shall lie on the receiving mesh.
      sent: elements that each sending device has sent before; what it sends here is added, so
        that one list for several arrays balances them all.

    >>> print(route(Spread((4,), ((0,),), (2,)), Spread((4,), ((),), (3,))).tiles)
    (Tile(shape=(4,), devices=(0, 1, 2)),)
    """
    assert source.shape == target.shape, (source, target)
    sent = [0] * math.prod(source.mesh) if sent is None else sent
    holders, wanted = _by_box(source), _by_box(target)
    moves = []
    for tile, box in enumerate(wanted):
        for held, devices in holders.items():
            both = _overlap(held, box)
            if both is None:
                continue
            device = min(devices, key=sent.__getitem__)
            sent[device] += math.prod(stop - start for start, stop in both)
            moves.append(Move(device, _within(both, held), tile, _within(both, box)))
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


def slices(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(start, stop) for start, stop in box)
