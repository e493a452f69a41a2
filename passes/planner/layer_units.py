"""Runs of layers that the search for stages does not cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autopar.base.errors import OptionError
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.slicing.slice_stages import slice_stages
from autopar.passes.slicing.stage_graphs import Stages

MAX_UNITS = 48


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


def units_of(split: SplitStep, report: Callable[[str], None]) -> Stages | None:
    """A step cut into units, a stage each; None where it cannot be cut."""
    try:
        layers = split.layers.found.layers
    except OptionError:
        return None
    starts = unit_starts([layer.digest for layer in layers])
    if len(starts) < 2:
        return None
    report(f"slicing into {len(starts)} layers")
    return slice_stages(split.step, split.rules, starts[1:], known=split.layers)
