"""What passes between stages once a step, beside what passes for every microbatch.

A weight that several layers read (a tied embedding) is at home on the lowest stage that reads it.
The others are sent it at the beginning, and cannot begin without it; the sums of its gradients
come back when their microbatches are done, and its update waits for them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.base.cluster import Cluster
from autopar.base.transfer_costs import seconds_across
from autopar.passes.slicing.stage_graphs import StageLink, Stages


class OnceSent(NamedTuple):
    """Values that pass once a step between the stage of one unit and those of others.

    Args:
      home: the unit whose stage has them at the beginning, or works on with them at the end.
      others: the units whose stages cannot begin without them, or whose microbatches they are of.
      bytes: of all of them.
      is_awaited: whether they are sent at the beginning.
    """

    home: int
    others: tuple[int, ...]
    bytes: int
    is_awaited: bool

    def crosses(self, units: int) -> NDArray[np.bool_]:
        """Which ranges have one of the others and not the home, by their first and last unit."""
        first, last = np.indices((units, units))
        places = [(first <= unit) & (unit <= last) for unit in (self.home, *self.others)]
        found: NDArray[np.bool_] = np.logical_or.reduce(places[1:]) & ~places[0]
        return found

    def seconds(self, cluster: Cluster, size: int, units: int) -> float:
        """Until they have arrived, in a row of meshes of `size` devices that have equal parts."""
        farthest = max(self.others, key=lambda unit: abs(unit - self.home))
        ends = (self.home, farthest) if self.is_awaited else (farthest, self.home)
        source, target = (unit / units for unit in ends)
        return seconds_across(cluster, size, source, target, self.bytes)


def sent_once(stages: Stages, first_of: Callable[[int], int]) -> tuple[OnceSent, ...]:
    """What units send each other once a step; not what has all the time of a step for that.

    A stage is sent a value once, however many of its units read it, and sends one sum of its terms.

    Args:
      stages: a stage of each unit.
      first_of: the number, among the units that may be cut, of the first one of a stage.
    """
    awaited, late = defaultdict[Any, list[StageLink]](list), defaultdict[Any, list[StageLink]](list)
    alike = Counter[Any]()
    for link in (x for x in stages.links if not x.per_microbatch):
        if stages.graphs[link.target].step.is_read_early(link.target_input):
            awaited[link.source, link.source_output].append(link)
        elif stages.graphs[link.source].step.is_made_late(link.source_output):
            # Terms of one sum, as far as one may tell: those of each stage come in the same order.
            kind = link.target, link.label, link.shape, str(link.dtype)
            late[*kind, alike[link.source, kind]].append(link)
            alike[link.source, kind] += 1
    found = Counter[tuple[bool, int, tuple[int, ...]]]()
    for is_awaited, groups in ((True, awaited), (False, late)):
        for links in groups.values():
            ends = [(x.source, x.target) if is_awaited else (x.target, x.source) for x in links]
            others = sorted({first_of(other) for _, other in ends})
            found[is_awaited, first_of(ends[0][0]), tuple(others)] += links[0].bytes
    return tuple(
        OnceSent(home, others, size, is_awaited)
        for (is_awaited, home, others), size in sorted(found.items())
    )
