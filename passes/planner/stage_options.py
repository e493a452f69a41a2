"""The ways to run every range of units on a size of submesh: arrays over its first and last unit.

What a range costs is what its units cost, one after the other, and its transfers. There are as many
ranges as pairs of units: one array operation finds something for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.passes.planner.sent_once import OnceSent
from autopar.passes.planner.stage_choice import StageOptions
from autopar.passes.planner.stage_costs import Way

Array = NDArray[Any]


class StageTransfers(NamedTuple):
    """What stages on submeshes of one size send and receive, by the units between which it passes.

    Args:
      seconds: after each unit, of what a microbatch sends from there to the next stage.
      received: before each unit, bytes per device of what a microbatch receives there.
      kept: the same, where a stage that begins there keeps it beside what its units keep.
      once: what passes once a step, with the seconds that it is on its way.
    """

    seconds: Sequence[float]
    received: Sequence[int]
    kept: Sequence[int]
    once: Sequence[tuple[OnceSent, float]]


@dataclass(frozen=True, eq=False)
class RangeTotals:
    """What ranges of units cost on one size of submesh, `[ways, first unit, last unit]`."""

    seconds: Array
    forward_seconds: Array
    once_seconds: Array
    bytes_fixed: Array
    bytes_per_microbatch: Array
    bytes_working: Array
    casts: Array

    @classmethod
    def of(cls, ways: Sequence[Way]) -> RangeTotals:
        """The totals of each way to run all units."""

        def over(name: str, join: np.ufunc) -> Array:
            values = np.array([[getattr(unit, name) for unit in way] for way in ways])
            # Row i has nothing before unit i, so that each total is taken from its first unit on.
            rows = np.triu(np.broadcast_to(values[:, None, :], (*values.shape, values.shape[1])))
            return join.accumulate(rows, axis=-1)

        return cls(
            seconds=over("seconds", np.add),
            forward_seconds=over("forward_seconds", np.add),
            once_seconds=over("once_seconds", np.add),
            bytes_fixed=over("bytes_fixed", np.add),
            bytes_per_microbatch=over("bytes_per_microbatch", np.add),
            bytes_working=over("bytes_working", np.maximum),
            casts=over("casts", np.logical_or),
        )

    def options(
        self, devices: int, transfers: StageTransfers, remat: str | None, *, is_hidden: bool
    ) -> StageOptions:
        """The options of each range that no other is as good as in everything.

        Args:
          devices: of the submesh.
          transfers: what the stages send and receive.
          remat: as in the user's options; a stage may keep what its forward pass made, or compute
            it again.
          is_hidden: whether a stage works on other microbatches while one is sent.
        """
        units = self.seconds.shape[1]
        there = np.array([*transfers.seconds[:-1], 0.0]) if units else np.zeros(0)
        both = np.broadcast_to(2 * there, (units, units))
        hidden = both if is_hidden else np.zeros((units, units))
        received = np.broadcast_to(np.array(transfers.received)[:, None], (units, units))
        awaited = np.zeros((units, units))
        for sent, arrives in transfers.once:
            awaited += np.where(sent.crosses(units), arrives, 0.0) if sent.is_awaited else 0.0
        fixed = self.bytes_fixed + self.bytes_working
        each = self.bytes_per_microbatch + np.array(transfers.kept, np.int64)[:, None]
        # Computed again: the input stays, and the rest is there for one microbatch at a time.
        kept = (self.seconds, fixed, each, np.zeros_like(self.casts))
        again = (
            self.seconds + self.forward_seconds,
            fixed + each,
            np.broadcast_to(received, each.shape),
            np.ones_like(self.casts),
        )
        tried = {"auto": [kept, again], "override": [kept, again], "full": [again]}
        columns = zip(*tried.get(remat or "", [kept]), strict=True)
        seconds, fixed, each, is_again = (_by_way(column) for column in columns)
        count = len(seconds) // max(len(self.seconds), 1)
        found = {
            "seconds": np.maximum(seconds + (both - hidden), there),
            "once_seconds": np.repeat(self._until_last(transfers.once), count, axis=0),
            "hidden_seconds": np.broadcast_to(hidden, seconds.shape),
            "bytes_fixed": fixed,
            "bytes_per_microbatch": each,
            "remat": is_again,
            "casts": np.repeat(self.casts, count, axis=0),
            "forward_seconds": np.repeat(self.forward_seconds, count, axis=0),
            "sent_seconds": np.broadcast_to(there, seconds.shape),
            "awaited_seconds": np.broadcast_to(awaited, seconds.shape),
        }
        return _by_cut(devices, _not_dominated(found))

    def _until_last(self, once: Sequence[tuple[OnceSent, float]]) -> Array:
        """Seconds once a step after the microbatches: of a range's own, or of others that wait.

        What it sends then is on its way, and the unit at whose home it arrives works on with it.
        """
        units = self.seconds.shape[1]
        sent, after = np.zeros((units, units)), np.zeros_like(self.once_seconds)
        for each, seconds in once:
            if not each.is_awaited:
                leaves = each.crosses(units)
                sent += np.where(leaves, seconds, 0.0)
                own = self.once_seconds[:, each.home, each.home][:, None, None]
                after = np.maximum(after, np.where(leaves, own, 0.0))
        return np.maximum(self.once_seconds, sent + after)


def _by_way(column: Sequence[Array]) -> Array:
    """What is kept and computed again of the first way, then of the second, and so on."""
    return np.stack(column, axis=1).reshape(-1, *column[0].shape[1:])


def _not_dominated(options: dict[str, Array]) -> dict[str, Array]:
    """Sorted, those that no other is as good as in everything; of equal ones the first.

    There are `[options, first, last]` again; where fewer are left, the seconds are infinite.
    """
    keys = [options[name] for name in ("bytes_fixed", "once_seconds", "seconds")]
    order = np.lexsort(keys, axis=0)
    options = {name: np.take_along_axis(x, order, axis=0) for name, x in options.items()}
    worse = [options[x] for x in ("once_seconds", "bytes_fixed", "bytes_per_microbatch")]
    left: Array = np.ones(order.shape, bool)
    for number in range(1, len(left)):
        as_good = np.logical_and.reduce([x[:number] <= x[number] for x in worse])
        left[number] = ~as_good.any(axis=0)
    units = left.shape[1]
    left &= np.triu(np.ones((units, units), bool))
    place, first, last = np.nonzero(left)
    new = (np.cumsum(left, axis=0) - 1)[place, first, last]
    found = dict[str, Array]()
    for name, values in options.items():
        fill = np.inf if name == "seconds" else 0.0
        packed = np.full((int(left.sum(axis=0).max(initial=0)), units, units), fill)
        packed[new, first, last] = values[place, first, last]
        found[name] = packed
    return found


def _by_cut(devices: int, options: dict[str, Array]) -> StageOptions:
    """The options by the cuts before the first unit and after the last one."""

    def moved(values: Array) -> Array:
        fill = np.inf if values is options["seconds"] else 0.0
        return np.pad(values, ((0, 0), (0, 1), (1, 0)), constant_values=fill)

    return StageOptions(devices, **{name: moved(x) for name, x in options.items()})
