"""What the strategies of a node use over time, as rows of constant usages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.passes.solver.problem import Integers


@dataclass(frozen=True)
class Rows:
    """Usages of a node's strategies over time: row `k` holds at the points `starts[k]:ends[k]`."""

    starts: Integers  # [rows]
    ends: Integers  # [rows]
    usage: Integers  # [rows, strategies]

    def select(self, strategies: Integers) -> Rows:
        return Rows(self.starts, self.ends, self.usage[:, strategies])

    def at(self, where: Integers) -> Rows:
        """Those rows only."""
        return Rows(self.starts[where], self.ends[where], self.usage[where])


def disjoint(chunks: Sequence[Rows]) -> Rows:
    """The same usages as rows that do not overlap in time, adjacent equal ones joined."""
    rows = joined(chunks)
    if len(rows.starts) == 1:
        return rows
    breaks = np.unique(np.concatenate([rows.starts, rows.ends]))
    changes = np.zeros((len(breaks), rows.usage.shape[1]), np.int64)
    np.add.at(changes, np.searchsorted(breaks, rows.starts), rows.usage)
    np.subtract.at(changes, np.searchsorted(breaks, rows.ends), rows.usage)
    first = np.flatnonzero(changes.any(axis=1))
    usage = np.cumsum(changes[first], axis=0)[:-1]
    return Rows(breaks[first[:-1]], breaks[first[1:]], usage).at(np.flatnonzero(usage.any(axis=1)))


def joined(chunks: Sequence[Rows]) -> Rows:
    """All rows together."""
    if len(chunks) == 1:
        return chunks[0]
    return Rows(
        np.concatenate([rows.starts for rows in chunks]),
        np.concatenate([rows.ends for rows in chunks]),
        np.concatenate([rows.usage for rows in chunks]),
    )


def add_rows(base: Integers, starts: Integers, ends: Integers, usage: Integers) -> None:
    """Adds `usage[k]` to `base[starts[k]:ends[k]]`, in place."""
    if len(starts) < 8:
        for start, end, amount in zip(starts, ends, usage, strict=True):
            base[start:end] += amount
        return
    base += over_points(starts, ends, usage, len(base))


def over_points(starts: Integers, ends: Integers, usage: Integers, points: int) -> Integers:
    """What each `usage[k]` that holds at the points `starts[k]:ends[k]` adds up to, per point."""
    changes = np.zeros(points + 1, usage.dtype)
    np.add.at(changes, starts, usage)
    np.subtract.at(changes, ends, usage)
    return np.cumsum(changes[:-1])
