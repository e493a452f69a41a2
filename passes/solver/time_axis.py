"""The points of time at which memory can bind: all others are dropped from a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.passes.solver.flat import Tables
from autopar.passes.solver.model import Contradiction, Model
from autopar.passes.solver.problem import Integers
from autopar.passes.solver.usage_rows import Rows, add_rows, disjoint, over_points


@dataclass(frozen=True)
class _Single:
    """Nodes of one row each, the most common kind: where the row holds and what it uses."""

    nodes: list[int]
    starts: Integers
    ends: Integers
    largest: Integers
    usages: list[Integers]


def compress_time(model: Model) -> None:
    """Makes each node's rows disjoint, drops the points at which memory cannot bind.

    A point cannot bind if even the largest usages fit there, or if the next or previous point
    has the same rows or more and at least the same base.

    Raises:
        Contradiction: if even the least usages do not fit.
    """
    if model.limit is None:
        return
    model.check()
    single = _compress_single(model)
    spans = [(single.starts, single.ends, single.largest)]
    alone = set(single.nodes)
    others = [u for u in model.nodes if model.memory[u] and u not in alone]
    for u in model.checked(others):
        rows = disjoint(model.memory[u])
        least = rows.usage.min(axis=1)
        add_rows(model.base, rows.starts, rows.ends, least)
        usage = rows.usage - least[:, None]
        rows = Rows(rows.starts, rows.ends, usage).at(np.flatnonzero(usage.any(axis=1)))
        model.memory[u] = [rows] if len(rows.starts) else []
        spans.append((rows.starts, rows.ends, rows.usage.max(axis=1, initial=0)))
    if len(model.base) and int(model.base.max()) > model.limit:
        raise Contradiction
    points = len(model.base)
    starts, ends, largest = (np.concatenate(parts) for parts in zip(*spans, strict=True))
    binding = np.flatnonzero(model.base + over_points(starts, ends, largest, points) > model.limit)
    opened, closed = (np.cumsum(np.bincount(at, minlength=points)) for at in (starts, ends))
    kept = _maximal(binding, model.base, opened, closed)
    place = np.searchsorted(kept, np.arange(points + 1))
    _place_single(model, single, place)
    for u in others:
        for rows in model.memory[u]:
            placed = Rows(place[rows.starts], place[rows.ends], rows.usage)
            alive = np.flatnonzero(placed.starts < placed.ends)
            model.memory[u] = [placed.at(alive)] if len(alive) else []
    model.base = model.base[kept]
    model.times = [model.times[i] for i in kept]


def _compress_single(model: Model) -> _Single:
    """Moves the least usage of all nodes of one row to the base, all of them at once."""
    nodes = [
        u for u in model.nodes if len(model.memory[u]) == 1 and len(model.memory[u][0].starts) == 1
    ]
    rows = [model.memory[u][0] for u in nodes]
    starts = Tables.of([row.starts for row in rows]).cells
    ends = Tables.of([row.ends for row in rows]).cells
    usage = Tables.of([row.usage for row in rows])
    least = usage.least()
    model.base += over_points(starts, ends, least, len(model.base))
    largest = usage.most() - least
    tables = Tables(usage.cells - np.repeat(least, np.diff(usage.first)), usage.first).split()
    for i in np.flatnonzero(largest == 0).tolist():
        model.memory[nodes[i]] = []
    varied = np.flatnonzero(largest)
    names, usages = [nodes[i] for i in varied], [tables[i] for i in varied]
    return _Single(names, starts[varied], ends[varied], largest[varied], usages)


def _place_single(model: Model, single: _Single, place: Integers) -> None:
    """Gives the nodes of one row their usages, at the points that are left."""
    starts, ends = place[single.starts], place[single.ends]
    alive = (starts < ends).tolist()
    for i, (u, usage) in enumerate(zip(single.nodes, single.usages, strict=True)):
        model.memory[u] = (
            [Rows(starts[i : i + 1], ends[i : i + 1], usage[None, :])] if alive[i] else []
        )


def _maximal(points: Integers, base: Integers, opened: Integers, closed: Integers) -> Integers:
    """The points that no neighbouring point covers: rows only opened (or closed) in between."""
    kept: list[int] = []
    for point in points.tolist():
        while kept and closed[point] == closed[kept[-1]] and base[kept[-1]] <= base[point]:
            kept.pop()
        if not kept or opened[point] != opened[kept[-1]] or base[point] > base[kept[-1]]:
            kept.append(point)
    return np.array(kept, np.int64)
