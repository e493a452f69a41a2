"""The points of time at which memory can bind: all others are dropped from a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.passes.solver.flat import Tables
from autopar.passes.solver.model import Contradiction, Model
from autopar.passes.solver.problem import Integers
from autopar.passes.solver.usage_rows import Rows, add_rows, disjoint


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
    most = np.zeros(len(model.base) + 1, np.int64)
    opens = np.zeros(len(model.base) + 1, np.int64)
    closes = np.zeros(len(model.base) + 1, np.int64)

    def count(starts: Integers, ends: Integers, largest: Integers) -> None:
        np.add.at(most, starts, largest)
        np.subtract.at(most, ends, largest)
        np.add.at(opens, starts, 1)
        np.add.at(closes, ends, 1)

    others = [u for u in model.nodes if model.memory[u]]
    if single is not None:
        count(single.starts, single.ends, single.largest)
        others = sorted(set(others).difference(single.nodes))
    for u in model.checked(others):
        rows = disjoint(model.memory[u])
        least = rows.usage.min(axis=1)
        add_rows(model.base, rows.starts, rows.ends, least)
        rows = Rows(rows.starts, rows.ends, rows.usage - least[:, None])
        varied = rows.usage.any(axis=1)
        if not varied.all():
            rows = Rows(rows.starts[varied], rows.ends[varied], rows.usage[varied])
        model.memory[u] = [rows] if len(rows.starts) else []
        count(rows.starts, rows.ends, rows.usage.max(axis=1, initial=0))
    if len(model.base) and int(model.base.max()) > model.limit:
        point = int(model.base.argmax())
        raise Contradiction(int(model.base[point]), point)
    binding = np.flatnonzero(model.base + np.cumsum(most[:-1]) > model.limit)
    kept = _maximal(binding, model.base, opens, closes)
    place = np.searchsorted(kept, np.arange(len(model.base) + 1))
    if single is not None:
        _place_single(model, single, place)
    for u in others:
        for rows in model.memory[u]:
            starts, ends = place[rows.starts], place[rows.ends]
            alive = starts < ends
            model.memory[u] = (
                [Rows(starts[alive], ends[alive], rows.usage[alive])] if alive.any() else []
            )
    model.base = model.base[kept]
    model.times = [model.times[i] for i in kept]


def _compress_single(model: Model) -> _Single | None:
    """Moves the least usage of all nodes of one row to the base, all of them at once."""
    nodes = [
        u for u in model.nodes if len(model.memory[u]) == 1 and len(model.memory[u][0].starts) == 1
    ]
    if not nodes:
        return None
    rows = [model.memory[u][0] for u in nodes]
    starts = np.concatenate([row.starts for row in rows])
    ends = np.concatenate([row.ends for row in rows])
    usage = Tables.of([row.usage for row in rows])
    least = usage.least()
    changes = np.zeros(len(model.base) + 1, np.int64)
    np.add.at(changes, starts, least)
    np.subtract.at(changes, ends, least)
    model.base += np.cumsum(changes[:-1])
    largest = usage.most() - least
    usage = Tables(usage.cells - np.repeat(least, np.diff(usage.first)), usage.first)
    varied = np.flatnonzero(largest)
    for i in np.flatnonzero(largest == 0).tolist():
        model.memory[nodes[i]] = []
    tables = usage.split()
    kept = varied.tolist()
    return _Single(
        [nodes[i] for i in kept],
        starts[varied],
        ends[varied],
        largest[varied],
        [tables[i] for i in kept],
    )


def _place_single(model: Model, single: _Single, place: Integers) -> None:
    """Gives the nodes of one row their usages, at the points that are left."""
    starts, ends = place[single.starts], place[single.ends]
    alive = (starts < ends).tolist()
    for i, (u, usage) in enumerate(zip(single.nodes, single.usages, strict=True)):
        model.memory[u] = (
            [Rows(starts[i : i + 1], ends[i : i + 1], usage[None, :])] if alive[i] else []
        )


def _maximal(points: Integers, base: Integers, opens: Integers, closes: Integers) -> Integers:
    """The points that no neighbouring point covers: rows only opened (or closed) in between."""
    opened, closed = np.cumsum(opens), np.cumsum(closes)
    kept: list[int] = []
    for point in points.tolist():
        while kept:
            last = kept[-1]
            none_closes = closed[point] == closed[last]
            none_opens = opened[point] == opened[last]
            if none_closes and base[last] <= base[point]:
                kept.pop()
            elif none_opens and base[point] <= base[last]:
                break
            else:
                kept.append(point)
                break
        else:
            kept.append(point)
    return np.array(kept, np.int64)
