"""Costs against closed forms worked out by hand, and properties that any cost model must have."""

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.base import costs
from autopar.base.cluster import Cluster, Device, Link

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")

# Round numbers: 1 s to start, 0.1 s and 100 B/s inside a node, 0.2 s and 10 B/s between nodes.
CLUSTER = Cluster(
    name="toy",
    num_nodes=4,
    devices_per_node=4,
    device=Device(
        name="toy",
        memory_bytes=1000,
        memory_bandwidth=50.0,
        peak_flops={"float32": 200.0, "bfloat16": 400.0},
        max_efficiency=0.5,
        kernel_seconds=3.0,
    ),
    intra_node=Link(100.0, 0.1),
    inter_node=Link(10.0, 0.2),
    collective_seconds=1.0,
    source="round numbers",
)


def seconds(kind: str, num_bytes: float, shape: tuple[int, ...], *axes: int) -> float:
    return costs.collective_seconds(kind, num_bytes, CLUSTER, shape, axes)


def test_docstrings() -> None:
    assert doctest.testmod(costs).failed == 0


def test_in_a_node() -> None:
    # Four devices: three messages and 3/4 of 800 bytes at 100 B/s.
    assert seconds("all-gather", 800, (4, 4), 1) == pytest.approx(1 + 3 * 0.1 + 6)
    assert seconds("reduce-scatter", 800, (4, 4), 1) == pytest.approx(1 + 3 * 0.1 + 6)
    assert seconds("all-reduce", 800, (4, 4), 1) == pytest.approx(1 + 6 * 0.1 + 12)
    assert seconds("all-to-all", 800, (4, 4), 1) == pytest.approx(1 + 3 * 0.1 + 6)
    assert seconds("collective-permute", 800, (4, 4), 1) == pytest.approx(1 + 0.1 + 8)


def test_across_nodes() -> None:
    assert seconds("all-gather", 800, (4, 4), 0) == pytest.approx(1 + 3 * 0.2 + 60)
    assert seconds("all-reduce", 800, (4, 4), 0) == pytest.approx(1 + 6 * 0.2 + 120)
    assert seconds("all-to-all", 800, (4, 4), 0) == pytest.approx(1 + 3 * 0.2 + 60)
    assert seconds("collective-permute", 800, (4, 4), 0) == pytest.approx(1 + 0.2 + 80)


def test_hierarchically_in_and_across_nodes() -> None:
    # In the node 3/4 of 800 bytes, then between nodes 3/4 of the 200 bytes that are left.
    half = 3 * 0.1 + 3 * 0.2 + 600 / 100 + 150 / 10
    assert seconds("all-gather", 800, (16,), 0) == pytest.approx(1 + half)
    assert seconds("reduce-scatter", 800, (4, 4), 0, 1) == pytest.approx(1 + half)
    assert seconds("all-reduce", 800, (16,), 0) == pytest.approx(1 + 2 * half)
    # Directly: 3 of 16 parts of 50 bytes stay in the node, 12 leave it.
    direct = 3 * 0.1 + 12 * 0.2 + 150 / 100 + 600 / 10
    assert seconds("all-to-all", 800, (16,), 0) == pytest.approx(1 + direct)


def test_half_a_node_on_each_of_two() -> None:
    # (2, 2, 2, 2) is not allowed, but (2, 8) with axis 1 of size 8 is 4 devices on each of 2 nodes.
    link = CLUSTER.axis_link((2, 8), 1)
    assert (link.within, link.across) == (4, 2)
    expected = 1 + 3 * 0.1 + 1 * 0.2 + 600 / 100 + 100 / 10
    assert seconds("all-gather", 800, (2, 8), 1) == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_one_device_does_not_communicate(kind: str) -> None:
    assert seconds(kind, 800, (1, 16), 0) == 0
    assert seconds(kind, 800, (16, 1), 1) == 0


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(ValueError, match="'gossip' is no collective"):
        seconds("gossip", 1, (16,), 0)


sizes = st.floats(0, 1e12)
shapes = st.sampled_from([(16,), (4, 4), (8, 2), (2, 8), (2, 2, 4), (4, 2, 2)])


@settings(deadline=None)
@given(kind=st.sampled_from(KINDS), size=sizes, more=sizes, shape=shapes, data=st.data())
def test_more_bytes_cost_more(
    kind: str, size: float, more: float, shape: tuple[int, ...], data: st.DataObject
) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    assert 0 < seconds(kind, size, shape, axis) <= seconds(kind, size + more, shape, axis)


@settings(deadline=None)
@given(size=sizes, shape=shapes, data=st.data())
def test_all_reduce_is_a_reduce_scatter_and_an_all_gather(
    size: float, shape: tuple[int, ...], data: st.DataObject
) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    both = seconds("reduce-scatter", size, shape, axis) + seconds("all-gather", size, shape, axis)
    start = CLUSTER.collective_seconds
    assert seconds("all-reduce", size, shape, axis) == pytest.approx(both - start)


@settings(deadline=None)
@given(size=sizes, kind=st.sampled_from(KINDS[:4]))
def test_order_of_axes_does_not_matter(size: float, kind: str) -> None:
    assert seconds(kind, size, (2, 2, 4), 0, 2) == seconds(kind, size, (2, 2, 4), 2, 0)


def test_the_longer_of_arithmetic_and_memory_counts() -> None:
    # 3 s to start; 1000 flops at half of 200/s, or 100 bytes at 50 B/s.
    assert costs.compute_seconds(1000, 100, "float32", CLUSTER) == pytest.approx(13)
    assert costs.compute_seconds(1000, 100, "bfloat16", CLUSTER) == pytest.approx(8)
    assert costs.compute_seconds(1000, 2000, "float32", CLUSTER) == pytest.approx(43)
    assert costs.compute_seconds(0, 100, "float32", CLUSTER) == pytest.approx(2)


def test_fused_arithmetic_starts_no_kernel() -> None:
    assert costs.compute_seconds(1000, 0, "float32", CLUSTER, is_matmul=False) == pytest.approx(5)
    assert costs.compute_seconds(1, 100, "float32", CLUSTER, is_matmul=False) == pytest.approx(2)


@settings(deadline=None)
@given(flops=st.floats(1, 1e15), factor=st.floats(1, 1e6))
def test_efficiency_grows_with_size_up_to_its_maximum(flops: float, factor: float) -> None:
    def efficiency(flops: float) -> float:
        """The share of the peak that a product reaches."""
        peak = CLUSTER.device.peak_flops_for("float32")
        return flops / (costs.compute_seconds(flops, 0, "float32", CLUSTER) * peak)

    small, large = efficiency(flops), efficiency(flops * factor)
    assert 0 < small <= large * (1 + 1e-9)
    assert large <= CLUSTER.device.max_efficiency * (1 + 1e-9)


def test_picoseconds_are_whole() -> None:
    assert costs.to_picoseconds(1e-12) == 1
    assert costs.to_picoseconds(2.5e-3) == 2_500_000_000
