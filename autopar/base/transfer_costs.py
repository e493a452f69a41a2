"""What sending from one mesh to another takes: over which links it goes, and who else uses them.

Meshes lie one after another on a cluster's devices, or the largest first, so that none lies on
parts of several nodes (`places_of`). Within a node a transfer goes over the links between its
devices; between nodes it goes through network cards, each of which serves
`Cluster.devices_per_card` devices. A mesh can use every card that one of its devices has, and the
whole of it, as far as no other transfer does.

Contention is counted, not simulated: in a pipeline's steady state neighbours are in opposite phases
(one runs F while the other runs B), so what leaves a node forwards and what leaves it backwards
start together. Pairs of meshes that send through one card in the same direction once per microbatch
share it equally. Cards send and receive at full speed at the same time.

Where processes send by way of their hosts (`Cluster.process_bandwidth`), a mesh has one process in
each of its nodes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Collection, Sequence

from autopar.base import hardware
from autopar.base.cluster import Cluster
from autopar.base.device import Link

Pair = tuple[int, int]
"""Numbers of a mesh that sends and of one that receives."""


def places_of(sizes: Sequence[int], within: int) -> list[range]:
    """The devices of meshes: each lies inside a node of so many devices, or has whole nodes.

    One after another; where that does not do, the largest first, as Ray packs its bundles: powers
    of two and whole nodes fill a cluster so (Zheng et al., OSDI 2022, section 5.2). One after
    another also where nothing does.

    >>> places_of([4, 8, 4], 8)
    [range(8, 12), range(0, 8), range(12, 16)]
    """
    inner = range(len(sizes))
    for order in (inner, sorted(inner, key=lambda i: -sizes[i])):
        starts = itertools.accumulate((sizes[i] for i in order), initial=0)
        found = {i: range(start, start + sizes[i]) for i, start in zip(order, starts, strict=False)}
        if all(is_compact(found[i], within) for i in inner):
            return [found[i] for i in inner]
    starts = itertools.accumulate(sizes, initial=0)
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def is_compact(devices: range, within: int) -> bool:
    """Whether they are of one node, or are whole nodes."""
    if devices.start // within == (devices.stop - 1) // within:
        return True
    return devices.start % within == 0 and devices.stop % within == 0


class MeshLinks:
    """The links between meshes of `sizes` devices on a cluster.

    Args:
      cluster: all devices.
      sizes: devices of each mesh.
      busy: the pairs of meshes that send once per microbatch, and so at the same time as others.

    >>> cluster = Cluster.preset("p3.16xlarge", nodes=2)  # one card of 25 Gb/s for eight GPUs
    >>> links = MeshLinks(cluster, [4, 4, 4, 4], [(0, 1), (1, 2), (2, 3), (2, 1)])
    >>> for pair in ((0, 1), (1, 2), (2, 1)):
    ...     print(f"{links.link(*pair).bandwidth / 1e9:.2f} GB/s")
    120.00 GB/s
    3.12 GB/s
    3.12 GB/s
    """

    def __init__(self, cluster: Cluster, sizes: Sequence[int], busy: Collection[Pair] = ()):
        self.cluster = cluster
        self._devices = places_of(sizes, cluster.devices_per_node)
        self._known: dict[Pair, Link] = {}
        self._sent: Counter[tuple[int, int]] = Counter()
        self._received: Counter[tuple[int, int]] = Counter()
        for source, target in sorted(set(busy)):
            outside = self._outside(source, target)
            if outside:
                self._sent.update(self._cards(source, outside))
                self._received.update(self._cards(target, self._nodes(target)))

    def seconds(self, source: int, target: int, num_bytes: float) -> float:
        """Until so many bytes, each counted once, have arrived."""
        link = self.link(source, target)
        return link.latency + num_bytes / link.bandwidth

    def link(self, source: int, target: int) -> Link:
        """What one transfer has for itself; its bandwidth is that of all devices together."""
        pair = source, target
        if pair not in self._known:
            self._known[pair] = self._link(source, target)
        return self._known[pair]

    def _link(self, source: int, target: int) -> Link:
        link, most = self._direct(source, target), self.cluster.process_bandwidth
        if most:
            pairs = min(len(self._nodes(source)), len(self._nodes(target)))
            link = Link(min(link.bandwidth, pairs * most), link.latency)
        return link

    def _direct(self, source: int, target: int) -> Link:
        cluster = self.cluster
        sending, receiving = self._devices[source], self._devices[target]
        if not self._outside(source, target):
            within = cluster.devices_per_node
            places = [device % within for device in sending], [d % within for d in receiving]
            return Link(cluster.bandwidth_between(*places), cluster.intra_node.latency)
        nodes = self._nodes(source) | self._nodes(target)
        slower = cluster.between_nodes(min(nodes), max(nodes)).bandwidth
        sent = self._share(source, self._sent)
        received = self._share(target, self._received)
        own = slower / cluster.inter_node.bandwidth * min(sent, received)
        return Link(own, cluster.inter_node.latency)

    def _share(self, mesh: int, users: Counter[tuple[int, int]]) -> float:
        """Bytes per second of a mesh's cards for one of those who use them."""
        card = self.cluster.card_bandwidth
        return sum(card / max(users[at], 1) for at in self._cards(mesh, self._nodes(mesh)))

    def _nodes(self, mesh: int) -> set[int]:
        return {device // self.cluster.devices_per_node for device in self._devices[mesh]}

    def _outside(self, source: int, target: int) -> set[int]:
        """The nodes of the sender, if anything has to leave them."""
        nodes = self._nodes(source)
        return set() if nodes == self._nodes(target) and len(nodes) == 1 else nodes

    def _cards(self, mesh: int, nodes: Collection[int]) -> set[tuple[int, int]]:
        """(node, card) of the devices of a mesh that are in these nodes."""
        within = self.cluster.devices_per_node
        places = (divmod(device, within) for device in self._devices[mesh])
        return {(n, i // self.cluster.devices_per_card) for n, i in places if n in nodes}


def by_way_of_hosts(cluster: Cluster) -> Cluster:
    """The same devices, whose meshes send each other what they send through sockets."""
    if cluster.process_bandwidth:
        return cluster
    known = hardware.table()["transports"]["sockets"]["process_bandwidth"]
    return dataclasses.replace(cluster, process_bandwidth=known)


def seconds_to_next(cluster: Cluster, size: int, num_bytes: float) -> float:
    """Seconds of a transfer between neighbours in a row of meshes of `size` devices, on average.

    Of the meshes of one node only the last has a neighbour elsewhere.
    """
    links = _links_to_next(cluster, size)
    return sum(x.latency + num_bytes / x.bandwidth for x in links) / max(len(links), 1)


def seconds_across(
    cluster: Cluster, size: int, source: float, target: float, num_bytes: float
) -> float:
    """Seconds of a transfer between two in a row of meshes of `size` devices, beside no others.

    Args:
      cluster: all devices.
      size: of each mesh.
      source: where in the row it begins: 0.0 at the first mesh, 1.0 at the end of the last.
      target: where it ends; if that is in the same mesh, in the next one.
      num_bytes: each counted once.

    >>> cluster = Cluster.preset("p3.16xlarge", nodes=2)
    >>> [round(seconds_across(cluster, 4, 0.0, end, 10**9), 3) for end in (0.3, 0.9)]
    [0.008, 0.32]
    """
    count = cluster.num_devices // size
    if count < 2:
        return seconds_to_next(cluster, size, num_bytes)
    first, last = (min(int(place * count), count - 1) for place in (source, target))
    if first == last:
        last += 1 if last + 1 < count else -1
    return _row_of_meshes(cluster, size).seconds(first, last, num_bytes)


@functools.lru_cache(maxsize=256)
def _row_of_meshes(cluster: Cluster, size: int) -> MeshLinks:
    return MeshLinks(cluster, [size] * (cluster.num_devices // size))


@functools.lru_cache(maxsize=256)
def _links_to_next(cluster: Cluster, size: int) -> tuple[Link, ...]:
    """The links over which neighbours in a row of meshes send; none: there is only one."""
    within = max(cluster.devices_per_node // size, 1)
    count = min(3 * within, cluster.num_devices // size)
    if count < 2:  # what follows is smaller: it lies in the same node, or in another one
        rest = cluster.num_devices - size
        return (MeshLinks(cluster, [size, rest]).link(0, 1),) if rest else ()
    forwards = [(i, i + 1) for i in range(count - 1)]
    links = MeshLinks(cluster, [size] * count, [*forwards, *((j, i) for i, j in forwards)])
    # Of three nodes the one in the middle, whose card sends both ways.
    pairs = forwards[within : 2 * within] if count > 2 * within else forwards[:within]
    return tuple(links.link(*pair) for pair in pairs)
