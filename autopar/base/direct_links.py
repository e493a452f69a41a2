"""What devices reach together that are joined by direct links rather than by a switch."""

from __future__ import annotations

from collections.abc import Sequence

Links = Sequence[Sequence[float]]
"""Bytes per second from each device of a node to each other; 0 where there is no link."""


def group_bandwidth(links: Links, group: Sequence[int]) -> float:
    """Bytes per second that each device of a group can send in rings over its links.

    Every ring crosses every cut of the group, so no more rings fit than its weakest cut has links:
    a pair has its own links, each of four devices those to the three others. Found as Stoer and
    Wagner do ("A simple min-cut algorithm", 1997).

    >>> ring = [[0, 1, 0, 2], [1, 0, 2, 0], [0, 2, 0, 1], [2, 0, 1, 0]]
    >>> group_bandwidth(ring, (0, 1)), group_bandwidth(ring, (0, 1, 2, 3))
    (1, 2)
    """
    between = {a: {b: links[a][b] for b in group if b != a} for a in group}
    weakest = sum(between[group[0]].values())
    while len(between) > 1:
        order = [next(iter(between))]
        tied = dict(between[order[0]])
        while tied:
            last = max(tied, key=lambda member: (tied[member], -member))
            cut = tied.pop(last)
            order.append(last)
            for other, bandwidth in between[last].items():
                if other in tied:
                    tied[other] += bandwidth
        weakest = min(weakest, cut)
        kept, merged = order[-2:]
        for other, bandwidth in between.pop(merged).items():
            del between[other][merged]
            if other != kept:
                between[other][kept] += bandwidth
                between[kept][other] += bandwidth
    return weakest or forwarded_bandwidth(links)


def forwarded_bandwidth(links: Links) -> float:
    """Where no link is direct, a device between forwards: a link of the slowest kind, shared."""
    return min(x for row in links for x in row if x) / 2
