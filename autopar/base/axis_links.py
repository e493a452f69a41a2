"""Groups of devices along axes of a logical mesh, and the links that join them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from autopar.base.device import Link
from autopar.base.direct_links import Links, group_bandwidth
from autopar.base.records import Record


@dataclasses.dataclass(frozen=True)
class AxisLink(Record):
    """How the devices along some axes of a logical mesh are joined.

    Every group of devices along the axes is `across` nodes with `within` devices in each; `kind`
    is "intra" (one node), "inter" (one device per node), "mixed", or "uneven" where nodes hold
    different numbers of the group's devices, which then counts as `across` single devices.

    `bandwidth` and `latency` are those of the slower class of links that the group uses.
    """

    kind: str
    within: int
    across: int
    intra: Link
    inter: Link

    @property
    def size(self) -> int:
        """Number of devices in a group."""
        return self.within * self.across

    @property
    def bandwidth(self) -> float:
        """Bytes per second that each device can send over the slowest links of the group."""
        return self.intra.bandwidth if self.kind == "intra" else self.inter.bandwidth

    @property
    def latency(self) -> float:
        """Seconds that a message takes over the slowest links of the group."""
        return self.intra.latency if self.kind == "intra" else self.inter.latency


def groups_along(shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The devices of each group along some axes of a row-major mesh, a row a group, in order.

    >>> groups_along((2, 2), (0,)).tolist()
    [[0, 2], [1, 3]]
    """
    others = [axis for axis in range(len(shape)) if axis not in axes]
    order = np.arange(math.prod(shape)).reshape(shape).transpose(*others, *axes)
    return np.sort(order.reshape(-1, math.prod(shape[axis] for axis in axes)), axis=1)


def link_of_groups(
    nodes: np.ndarray[Any, Any],
    places: np.ndarray[Any, Any],
    intra: Link,
    inter: Link,
    pairs: Links,
) -> AxisLink:
    """How groups are joined, by the nodes of their devices and the places in these.

    Args:
      nodes: of the devices, a row a group.
      places: of the devices in their nodes, a row a group.
      intra: the link inside a node.
      inter: that between the nodes that the groups span.
      pairs: direct links of a node's devices; empty where a switch joins them.
    """
    group_size = nodes.shape[1]
    distinct = 1 + np.count_nonzero(np.diff(nodes, axis=1), axis=1)
    across = int(distinct.max())
    within, rest = divmod(group_size, across)
    blocks = nodes[:, : across * within].reshape(-1, across, within)
    if rest or (distinct != across).any() or (blocks[..., 0] != blocks[..., -1]).any():
        return AxisLink(kind="uneven", within=1, across=group_size, intra=intra, inter=inter)
    kind = "intra" if across == 1 else "inter" if within == 1 else "mixed"
    if pairs and within > 1:
        kinds = set(map(tuple, places.reshape(-1, within).tolist()))
        slowest = min(group_bandwidth(pairs, group) for group in kinds)
        intra = dataclasses.replace(intra, bandwidth=slowest)
    return AxisLink(kind=kind, within=within, across=across, intra=intra, inter=inter)


def factorizations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """Ways to write a number as an ordered product of factors of at least two."""
    divisors = [d for d in range(2, number + 1) if number % d == 0]
    for head in itertools.product(divisors, repeat=num_factors - 1):
        last, rest = divmod(number, math.prod(head))
        if rest == 0 and last >= 2:
            yield (*head, last)
