"""Transfers between meshes: which links they go over, and what they share."""

import dataclasses
import doctest
import itertools

import pytest

import autopar
from autopar.base import transfer_costs
from autopar.base.cluster import Cluster
from autopar.base.transfer_costs import MeshLinks, is_compact, places_of, seconds_to_next
from autopar.building import as_carried

NODES = Cluster.preset("p3.16xlarge", nodes=4)  # one card for eight devices
RAILS = Cluster.preset("dgx-h100", nodes=4)  # one for each
CARD = NODES.card_bandwidth


def test_docstrings() -> None:
    assert doctest.testmod(transfer_costs).failed == 0


def test_in_a_node_its_own_links_are_used() -> None:
    links = MeshLinks(NODES, [4, 4, 4, 4])
    assert links.link(0, 1).bandwidth == 6 * 20e9
    assert links.link(0, 1).latency == NODES.intra_node.latency
    assert links.link(1, 2).latency == NODES.inter_node.latency
    switched = MeshLinks(RAILS, [4, 4, 8])
    assert switched.link(0, 1).bandwidth == 4 * RAILS.intra_node.bandwidth


@pytest.mark.parametrize("sizes", [[4, 8, 8, 8, 4], [2, 2, 8, 4, 16], [1, 16, 4, 8, 2, 1]])
def test_no_mesh_lies_on_parts_of_nodes(sizes: list[int]) -> None:
    """The largest are placed first, so two small ones have a node together, though far apart."""
    places = places_of(sizes, 8)
    assert sorted(itertools.chain.from_iterable(places)) == list(range(sum(sizes)))
    assert [len(place) for place in places] == sizes
    assert all(is_compact(place, 8) for place in places)


def test_meshes_in_a_row_stay_where_they_do() -> None:
    assert places_of([2, 2, 4, 8], 8) == [range(2), range(2, 4), range(4, 8), range(8, 16)]
    assert places_of([3, 3, 2], 4) == [range(3), range(3, 6), range(6, 8)], "nothing does"
    links = MeshLinks(NODES, [4, 8, 4], [(0, 1), (1, 2), (1, 0), (2, 1)])
    assert links.link(0, 2).latency == NODES.intra_node.latency
    assert links.link(0, 1).bandwidth == CARD / 2  # both small ones send through their node's card


def test_sockets_between_gpus_are_priced_and_transfers_by_the_links() -> None:
    sockets = as_carried(NODES, autopar.Ray(devices="gpu"))
    assert 0 < sockets.process_bandwidth < CARD
    links = MeshLinks(sockets, [4, 4, 16, 16])
    assert links.link(0, 1).bandwidth == sockets.process_bandwidth
    # From two nodes to two, two processes send to two others.
    assert links.link(2, 3).bandwidth == 2 * sockets.process_bandwidth
    for runtime in (autopar.Ray(devices="gpu", transport="transfer"), autopar.Ray()):
        assert as_carried(NODES, runtime) == NODES
    measured = dataclasses.replace(NODES, process_bandwidth=9e9)
    assert as_carried(measured, autopar.Ray(devices="gpu")) == measured


def test_one_device_alone_has_the_whole_card() -> None:
    assert pytest.approx(25e9 / 8) == CARD
    assert MeshLinks(NODES, [1, 7, 1]).link(0, 2).bandwidth == CARD
    # With a card for each device it has that one.
    assert MeshLinks(RAILS, [1, 7, 1]).link(0, 2).bandwidth == RAILS.inter_node.bandwidth
    assert MeshLinks(RAILS, [8, 8]).link(0, 1).bandwidth == 8 * RAILS.inter_node.bandwidth
    # The slower end decides.
    assert MeshLinks(RAILS, [8, 2]).link(0, 1).bandwidth == 2 * RAILS.inter_node.bandwidth
    assert MeshLinks(NODES, [16, 8]).link(0, 1).bandwidth == CARD


def test_what_leaves_a_node_together_shares_its_card() -> None:
    # Of a node in the middle, one half sends forwards and the other one backwards.
    links = MeshLinks(NODES, [4] * 6, [(i, i + 1) for i in range(5)] + [(1, 0), (2, 1), (4, 3)])
    assert links.link(1, 2).bandwidth == CARD / 2  # the other node receives from two
    assert MeshLinks(NODES, [4] * 6, [(1, 2)]).link(1, 2).bandwidth == CARD
    assert links.link(3, 4).bandwidth == CARD / 2
    assert links.link(2, 1).bandwidth == CARD / 2
    # Cards of their own are not shared.
    rails = MeshLinks(RAILS, [4] * 6, [(i, i + 1) for i in range(5)] + [(1, 0), (2, 1), (4, 3)])
    assert rails.link(3, 4).bandwidth == 4 * RAILS.inter_node.bandwidth


def test_more_bytes_and_slower_switches_take_longer() -> None:
    links = MeshLinks(RAILS, [8, 8])
    assert links.seconds(0, 1, 0) == RAILS.inter_node.latency
    assert links.seconds(0, 1, 2e9) > links.seconds(0, 1, 1e9)
    slow = dataclasses.replace(RAILS, nodes_per_switch=1, oversubscription=2.0)
    assert MeshLinks(slow, [8, 8]).link(0, 1).bandwidth == links.link(0, 1).bandwidth / 2


def test_neighbours_are_mostly_in_the_same_node() -> None:
    quarter, half, whole = (seconds_to_next(NODES, size, 1e9) for size in (2, 4, 8))
    assert quarter < half < whole
    # A node between two others sends both ways at once.
    assert whole == pytest.approx(2e9 / CARD, rel=1e-3)
    # All of the devices have no neighbour.
    assert seconds_to_next(NODES, 32, 1e9) == 0
