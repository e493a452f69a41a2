"""Runs of layers that the search for stages does not cut."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.base.errors import OptionError
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_costs import UnitCost, Way
from autopar.passes.planner.stage_labels import label_batch
from autopar.passes.slicing.slice_stages import slice_stages
from autopar.passes.slicing.stage_graphs import Layer, StageGraph, Stages

MAX_UNITS = 64

Kind = tuple[str, ...]
"""The digests of a unit's layers."""


def unit_starts(kinds: Sequence[object], most: int = MAX_UNITS) -> list[int]:
    """Where units begin, if there are at most about so many: layers, or else blocks that repeat.

    A model of many blocks is a row of layers whose kinds repeat with some period. It is cut between
    blocks only; what is before the first block and after the last is a unit of its own. Where
    little repeats, units are runs of equally many layers.

    Args:
      kinds: for every layer; equal for layers that compute the same.
      most: the units that are wanted, but for what is before and after the blocks.

    >>> unit_starts("abcdef")
    [0, 1, 2, 3, 4, 5]
    >>> unit_starts("e" + 6 * "xy" + "h", most=6)
    [0, 1, 3, 5, 7, 9, 11, 13]
    >>> unit_starts("e" + 6 * "xy" + "h", most=3)
    [0, 1, 5, 9, 13]
    >>> unit_starts("abcdefgh", most=3)
    [0, 3, 6]
    """
    count = len(kinds)
    if count <= most:
        return list(range(count))
    start, stop, period = _longest_repetition(kinds)
    if stop - start < count / 2:
        return list(range(0, count, math.ceil(count / most)))
    blocks = (stop - start) // period
    step = period * math.ceil(blocks / most)
    ends = start + blocks * period
    return sorted({0, *range(start, ends, step), *([ends] if ends < count else [])})


def _longest_repetition(kinds: Sequence[object]) -> tuple[int, int, int]:
    """The longest run that repeats: from, to, and its period; the shortest one that it has."""
    count = len(kinds)
    best = (0, 0, 1)
    for period in range(1, count // 2 + 1):
        start = 0
        for place in range(period, count + 1):
            if place < count and kinds[place] == kinds[place - period]:
                continue
            if place - start >= 2 * period and place - start > best[1] - best[0]:
                best = (start, place, period)
            start = place - period + 1
    return best


@dataclass(frozen=True)
class Units:
    """Runs of layers that the search for stages does not cut; `starts` are their first layers."""

    layers: tuple[Layer, ...]
    starts: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """The layers after them."""
        return (*self.starts[1:], len(self.layers))

    @cached_property
    def runs(self) -> list[tuple[Layer, ...]]:
        """The layers of each."""
        return [self.layers[a:b] for a, b in zip(self.starts, self.ends, strict=True)]

    @cached_property
    def kinds(self) -> list[Kind]:
        """The kind of each."""
        return [tuple(layer.digest for layer in run) for run in self.runs]

    @cached_property
    def typical(self) -> dict[Kind, int]:
        """For each kind the unit in the middle of those that are alike.

        That has the backward pass of its own layers: where layers are cut inside of what is
        computed again as a whole, the next unit has the backward pass of such a block, and the
        second one that of the first one as well.
        """
        places = defaultdict[Kind, list[int]](list)
        for place, kind in enumerate(self.kinds):
            places[kind].append(place)
        return {kind: found[len(found) // 2] for kind, found in places.items()}

    def sliced(self, split: SplitStep) -> Stages:
        """A stage of each."""
        return split.cut_at(self.starts[1:])

    def typical_graphs(self, split: SplitStep) -> dict[Kind, StageGraph]:
        """The graph of the typical unit of each kind; others are not cut from each other."""
        places = self.typical.values()
        ends = {x for place in places for x in (self.starts[place], self.ends[place])}
        boundaries = tuple(sorted(ends - {0, len(self.layers)}))
        if boundaries == self.starts[1:]:
            return self.graphs_of(self.sliced(split))
        stages = slice_stages(split.step, split.rules, boundaries, known=split.layers)
        graphs, begins = label_batch(stages), (0, *boundaries)
        of_start = dict(zip(begins, graphs, strict=True))
        return {kind: of_start[self.starts[place]] for kind, place in self.typical.items()}

    def graphs_of(self, stages: Stages) -> dict[Kind, StageGraph]:
        """The graph of the typical unit of each kind, of what `sliced` gives."""
        graphs = label_batch(stages)
        return {kind: graphs[place] for kind, place in self.typical.items()}


def units_of(split: SplitStep) -> Units | None:
    """The units of a step; None where it cannot be cut.

    What is computed again as a whole is not cut, if two units are left.
    """
    try:
        layers = split.layers.found.layers
    except OptionError:
        return None
    blocks = [0, *(end for end, layer in enumerate(layers[:-1], 1) if not layer.inside)]
    if len(blocks) < 2:
        blocks = [*range(len(layers))]
    runs = itertools.pairwise((*blocks, len(layers)))
    kinds = [tuple(layer.digest for layer in layers[start:stop]) for start, stop in runs]
    starts = [blocks[block] for block in unit_starts(kinds)]
    return Units(layers, tuple(starts)) if len(starts) > 1 else None


class FinerUnits:
    """Layers as units of their own, if there are few: stages may be cut inside of a unit.

    What a unit costs is shared out among its layers: time by FLOPs, and by parameters what is there
    all the time. Its first layer keeps what the unit keeps of a microbatch; a stage that begins
    with another one keeps what it receives.
    """

    def __init__(self, units: Units) -> None:
        self.layers = units.layers
        count, self._ends = len(self.layers), (*units.starts, len(units.layers))
        self.starts = list(range(count)) if count <= MAX_UNITS else [*self._ends[:-1]]
        self.crossing = [self.layers[end - 1].cut_bytes for end in (*self.starts[1:], count)]
        self.inside = [start > 0 and start not in self._ends for start in self.starts]

    def first_of(self, unit: int) -> int:
        """The number of the first of the layers of a unit."""
        return self.starts.index(self._ends[unit])

    def shared_out(self, way: Way) -> Way:
        """What the layers cost, by what the units do."""
        if len(self.starts) == len(way):
            return way
        found = list[UnitCost]()
        for cost, (start, stop) in zip(way, itertools.pairwise(self._ends), strict=True):
            layers = self.layers[start:stop]
            flops = _shares([layer.flops for layer in layers])
            weights = _shares([layer.weight_bytes for layer in layers])
            for number, (time, fixed) in enumerate(zip(flops, weights, strict=True)):
                found.append(
                    cost._replace(
                        seconds=time * cost.seconds,
                        forward_seconds=time * cost.forward_seconds,
                        rowless_seconds=time * cost.rowless_seconds,
                        once_seconds=fixed * cost.once_seconds,
                        bytes_fixed=math.ceil(fixed * cost.bytes_fixed),
                        bytes_per_microbatch=0 if number else cost.bytes_per_microbatch,
                    )
                )
        return tuple(found)


def _shares(sizes: Sequence[int]) -> list[float]:
    total = sum(sizes)
    return [size / total for size in sizes] if total else [1 / len(sizes)] * len(sizes)
