"""Clusters: presets and their sources, files, the local machine, logical meshes and their links."""

import dataclasses
import doctest
import json
import math
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.base import axis_links, direct_links
from autopar.base import cluster as cluster_module
from autopar.base.cluster import Cluster, Device, Link, axis_names
from autopar.base.errors import (
    AutoparWarning,
    DeviceError,
    MissingClusterError,
    MissingPlanError,
    OptionError,
)
from autopar.plans.plan import Plan


@pytest.mark.parametrize("module", [cluster_module, axis_links, direct_links])
def test_docstrings(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


def data(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("autopar").joinpath(f"base/data/{name}").read_text())


@pytest.mark.parametrize("name", ["hardware.toml", "gpu_targets.toml"])
def test_every_number_of_the_tables_names_its_source(name: str) -> None:
    table = data(name)
    used = set()

    def visit(node: Any, where: str) -> None:
        if isinstance(node, dict) and "value" in node:
            assert set(node) == {"value", "source"}, where
            used.add(node["source"])
        elif isinstance(node, dict):
            for key, child in node.items():
                visit(child, f"{where}.{key}")
        else:
            assert isinstance(node, str), f"{where} is a number without a source"

    for part in set(table) - {"sources", "aliases"}:
        visit(table[part], part)
    assert used == set(table["sources"])


@pytest.mark.parametrize("name", Cluster.presets())
def test_every_preset_builds(name: str) -> None:
    cluster = Cluster.preset(name, nodes=4)
    assert cluster.num_nodes == 4
    assert cluster.num_devices == 4 * cluster.devices_per_node
    assert cluster.intra_node.bandwidth >= cluster.inter_node.bandwidth
    assert cluster.device.peak_flops_for("bfloat16") > 0
    assert "preset" in cluster.source


def test_presets_have_the_datasheets_numbers() -> None:
    h100 = Cluster.preset("dgx-h100", nodes=8)
    assert h100.num_devices == 64
    assert h100.device.memory_bytes == 80 * 10**9
    # What programs reach, of the 3.35 TB/s that the datasheet has.
    assert h100.device.memory_bandwidth == pytest.approx(0.88 * 3.35e12, rel=0.01)
    # What NCCL reaches on each of the 18 links, of the 25 GB/s that the datasheet has.
    assert h100.intra_node.bandwidth == pytest.approx(18 * 20.6e9)
    assert h100.inter_node.bandwidth == 400e9 / 8
    assert Cluster.preset("p4d").inter_node.bandwidth == 400e9 / 8 / 8
    assert Cluster.preset("tpu-v5e").device.peak_flops["bfloat16"] == 197e12


def test_names_of_devices_mean_their_usual_nodes() -> None:
    assert Cluster.preset("H100").device == Cluster.preset("dgx-h100").device
    assert Cluster.preset("a100").device.memory_bytes == 80 * 10**9
    assert Cluster.preset("A100-40GB").device.memory_bytes == 40 * 10**9


def test_an_unknown_preset_gets_the_list_and_the_closest() -> None:
    with pytest.raises(OptionError, match="did you mean 'dgx-h100'") as caught:
        Cluster.preset("dgx_h100")
    assert all(name in str(caught.value) for name in Cluster.presets())


@pytest.mark.parametrize(("nodes", "devices"), [(0, 8), (-1, 8), (1, 0)])
def test_a_cluster_has_devices(nodes: int, devices: int) -> None:
    with pytest.raises(OptionError, match="less than 1"):
        Cluster.preset("h100", nodes=nodes, devices_per_node=devices)


def test_dtypes_without_a_number_count_as_others() -> None:
    device = Cluster.preset("h100").device
    assert device.peak_flops_for("float8_e4m3fn") == device.peak_flops["float8"]
    assert device.peak_flops_for("uint8") == device.peak_flops["int8"]
    assert device.peak_flops_for("int32") == device.peak_flops["float32"]
    assert device.peak_flops_for("complex64") == device.peak_flops["float32"]
    tpu = Cluster.preset("tpu-v4").device
    assert tpu.peak_flops_for("float16") == tpu.peak_flops["float32"]
    assert tpu.peak_flops_for("float8_e5m2") == tpu.peak_flops["bfloat16"]
    assert tpu.peak_flops_for("float64") == tpu.peak_flops["float32"] / 2


@pytest.mark.parametrize("suffix", [".toml", ".json"])
@pytest.mark.parametrize("name", ["p3.16xlarge", "p4d.24xlarge", "cpu", "tpu-v5p"])
def test_files_give_back_the_same_cluster(name: str, suffix: str, tmp_path: Path) -> None:
    cluster = dataclasses.replace(Cluster.preset(name, nodes=3), name='my "own" Ünit')
    cluster.save(tmp_path / f"cluster{suffix}")
    assert Cluster.load(tmp_path / f"cluster{suffix}") == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "must be a mapping"),
        ('{"name": "mine"}', "lacks the field"),
        ('{"nodes": 3}', "no field 'nodes'"),
    ],
)
def test_a_file_that_is_no_cluster_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(OptionError, match=message) as caught:
        Cluster.load(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_nodes", 1.5, "Cluster.num_nodes must be int"),
        ("intra_node", {"bandwidth": 0, "latency": 0}, "intra_node.bandwidth is 0.0"),
        ("collective_seconds", -1, "collective_seconds is -1.0, negative"),
    ],
)
def test_a_file_with_impossible_numbers_is_refused(
    field: str, value: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({**Cluster.preset("h100").to_dict(), field: value}))
    with pytest.raises(OptionError, match=message):
        Cluster.load(path)


def test_local_shares_the_machine_among_virtual_devices() -> None:
    whole = Cluster.local(jax.devices("cpu")[:1])
    assert whole.num_devices == 1
    cluster = Cluster.local(jax.devices("cpu"))
    number = len(jax.devices("cpu"))
    assert (cluster.num_nodes, cluster.devices_per_node) == (1, number)
    assert cluster.device.memory_bytes == whole.device.memory_bytes // number
    shares = [c.device.peak_flops["float32"] * c.num_devices for c in (whole, cluster)]
    assert shares[0] == pytest.approx(shares[1])


def fake_devices(kind: str, counts: list[int], platform: str = "gpu") -> list[Any]:
    # Stands for accelerators, which the machines that run these tests do not have.
    return [
        SimpleNamespace(
            platform=platform,
            device_kind=kind,
            process_index=process,
            memory_stats=lambda: {"bytes_limit": 60 * 10**9},
        )
        for process, count in enumerate(counts)
        for _ in range(count)
    ]


def test_local_knows_accelerators_by_their_kind() -> None:
    cluster = Cluster.local(fake_devices("NVIDIA H100 80GB HBM3", [4, 4]))
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 4)
    assert cluster.device.peak_flops == Cluster.preset("h100").device.peak_flops
    assert cluster.device.memory_bytes == 60 * 10**9
    for kind, preset in [
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H200", "h200"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v4", "tpu-v4"),
    ]:
        local = Cluster.local(fake_devices(kind, [1]))
        assert local.device.peak_flops == Cluster.preset(preset).device.peak_flops, kind


def test_local_says_so_when_it_does_not_know_a_device() -> None:
    with pytest.warns(AutoparWarning, match="no numbers for 'Mystery 9000'"):
        Cluster.local(fake_devices("Mystery 9000", [2]))


def test_local_refuses_no_devices_and_unequal_nodes() -> None:
    with pytest.raises(DeviceError, match="no device"):
        Cluster.local([])
    with pytest.raises(DeviceError, match="different numbers of devices"):
        Cluster.local(fake_devices("NVIDIA H200", [4, 2]))


def test_logical_meshes_of_one_node_do_not_repeat_themselves() -> None:
    assert Cluster.preset("h100").logical_meshes() == ((8,), (4, 2), (2, 2, 2))
    assert Cluster.preset("h100", devices_per_node=1).logical_meshes() == ((1,),)
    assert Cluster.preset("h100", devices_per_node=7).logical_meshes() == ((7,),)
    assert Cluster.preset("h100").logical_meshes(max_axes=2) == ((8,), (4, 2))


def test_logical_meshes_of_two_nodes_differ_by_which_axis_crosses() -> None:
    assert Cluster.preset("h100", nodes=2).logical_meshes() == (
        (16,),
        (8, 2),
        (4, 4),
        (2, 8),
        (4, 2, 2),
        (2, 4, 2),
    )


@settings(deadline=None)
@given(nodes=st.integers(1, 12), devices=st.integers(1, 16), max_axes=st.integers(1, 3))
def test_logical_meshes_use_all_devices_evenly(nodes: int, devices: int, max_axes: int) -> None:
    cluster = Cluster.preset("h100", nodes=nodes, devices_per_node=devices)
    shapes = cluster.logical_meshes(max_axes)
    assert shapes == cluster.logical_meshes(max_axes)
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        assert math.prod(shape) == nodes * devices
        assert 1 <= len(shape) <= max_axes
        links = [cluster.axis_link(shape, axis) for axis in range(len(shape))]
        assert tuple(link.size for link in links) == shape
        assert math.prod(link.across for link in links) == nodes
        assert math.prod(link.within for link in links) == devices


def test_axis_link_tells_where_an_axis_runs() -> None:
    cluster = Cluster.preset("h100", nodes=4)

    def kind(shape: tuple[int, ...], axis: int | tuple[int, ...]) -> tuple[str, int, int]:
        link = cluster.axis_link(shape, axis)
        return link.kind, link.within, link.across

    assert kind((4, 8), 1) == ("intra", 8, 1)
    assert kind((4, 8), 0) == ("inter", 1, 4)
    assert kind((4, 8), (0, 1)) == ("mixed", 8, 4)
    assert kind((16, 2), 0) == ("mixed", 4, 4)
    assert kind((2, 16), 0) == ("inter", 1, 2)
    assert kind((2, 16), 1) == ("mixed", 8, 2)
    assert kind((2, 2, 8), (0, 1)) == ("inter", 1, 4)
    assert kind((2, 2, 8), (0, 2)) == ("mixed", 8, 2)
    assert kind((8,), 0) == ("intra", 8, 1)
    assert kind((12,), 0) == ("uneven", 1, 12)


def test_axis_link_gives_the_slower_links_numbers() -> None:
    cluster = Cluster.preset("h100", nodes=2)
    assert cluster.axis_link((2, 8), 1).bandwidth == cluster.intra_node.bandwidth
    assert cluster.axis_link((2, 8), 0).bandwidth == cluster.inter_node.bandwidth
    assert cluster.axis_link((16,), 0).latency == cluster.inter_node.latency


def test_a_mesh_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(DeviceError, match="needs 16 devices"):
        Cluster.preset("h100").axis_link((16,), 0)


def test_axis_names_and_text() -> None:
    assert axis_names((2, 2, 2)) == ("x", "y", "z")
    assert str(Cluster.preset("p5", nodes=2)) == "p5: 2 nodes of 8 x H100 SXM5 80GB"


def test_a_cluster_of_ones_own() -> None:
    device = Device("Abacus", 2**30, 1e9, {"float32": 1e9}, 0.5, 1e-6)
    link = Link(1e6, 1e-3)
    cluster = Cluster("mine", 2, 2, device, link, link, 1e-4, "counted")
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    with pytest.raises(OptionError, match="none of float8"):
        dataclasses.replace(cluster, device=dataclasses.replace(device, peak_flops={"int8": 1e9}))


def test_the_ground_imports_neither_jax_nor_what_draws() -> None:
    code = (
        "import sys; from autopar import errors, plans, report; from autopar.plans import Plan; "
        "from autopar.base import cluster, options; print(*sorted(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "autopar.plans.plan" in loaded
    assert not loaded & {"jax", "jaxlib", "flax", "ray", "ortools", "matplotlib", "rich"}


def test_direct_links_give_groups_what_their_weakest_cut_has() -> None:
    node = Cluster.preset("p3.16xlarge")
    one = 20e9  # a link
    assert node.axis_link((8,), 0).bandwidth == node.intra_node.bandwidth == 6 * one
    assert node.axis_link((2, 4), 1).bandwidth == 4 * one  # four that are all joined
    assert node.axis_link((4, 2), 1).bandwidth == one  # the slowest of the pairs
    assert node.axis_link((2, 4), 0).bandwidth == one
    assert node.bandwidth_between([0], [3]) == 2 * one
    assert node.bandwidth_between(range(4), range(4, 8)) == 6 * one
    assert node.bandwidth_between([0], [5]) == one / 2  # through another one
    switched = dataclasses.replace(node, pair_bandwidth=())
    assert switched.axis_link((4, 2), 1).bandwidth == 6 * one


def test_switches_may_be_oversubscribed() -> None:
    cluster = dataclasses.replace(
        Cluster.preset("h100", nodes=4), nodes_per_switch=2, oversubscription=4.0
    )
    whole = cluster.inter_node.bandwidth
    assert cluster.axis_link((2, 2, 8), 1).bandwidth == whole
    assert cluster.axis_link((2, 2, 8), 0).bandwidth == whole / 4
    assert cluster.axis_link((4, 8), 0).bandwidth == whole / 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("oversubscription", 0.5, "oversubscription is less than 1"),
        ("oversubscription", 4.0, "4, and nodes_per_switch is 0: all nodes are joined by one"),
        ("oversubscription", float("inf"), "oversubscription is inf, no finite number"),
        ("oversubscription", float("nan"), "oversubscription is nan, no finite number"),
        ("collective_seconds", float("nan"), "collective_seconds is nan, no finite number"),
        ("collective_seconds", -1.0, "collective_seconds is -1.0, negative"),
        ("devices_per_card", 0, "devices_per_card is 0"),
        ("pair_bandwidth", [[0.0, 1.0]], "not 8 rows"),
        ("pair_bandwidth", [[-1.0] * 8] * 8, "negative"),
    ],
)
def test_impossible_links_are_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Cluster.from_dict({**Cluster.preset("h100").to_dict(), field: value})


@pytest.mark.parametrize(
    ("name", "preset", "nodes", "devices"),
    [
        ("h100", "h100", 1, 8),
        ("8x8 h100", "h100", 8, 8),
        ("8 x 4 h100", "h100", 8, 4),
        ("2x8 x h100", "h100", 2, 8),
        ("8xH100", "h100", 1, 8),
        ("4xH100", "h100", 1, 4),
        ("64xh100", "h100", 8, 8),
        ("8x dgx-h100", "dgx-h100", 8, 8),
        ("2x p3.16xlarge", "p3.16xlarge", 2, 8),
        ("p3.16xlarge", "p3.16xlarge", 1, 8),
        ("8xp5", "p5", 8, 8),
        ("16xtpu-v4", "tpu-v4", 4, 4),
        ("2xa100-40gb", "a100-40gb", 1, 2),
        ("8 H100", "h100", 1, 8),
        ("16 h100s", "h100", 2, 8),
        ("h100:16", "h100", 2, 8),
        ("2 nodes of 8 x H100", "h100", 2, 8),
        ("8x NVIDIA H100 80GB GPUs", "h100", 1, 8),
        ("4xA100 40GB", "a100-40gb", 1, 4),
        ("H100 SXM5", "h100", 1, 8),
        ("TPU v5e", "tpu-v5e", 1, 8),
        ("8 nodes h100", "h100", 8, 8),
        ("2 nodes of dgx-h100", "dgx-h100", 2, 8),
        ("tpu v5e-8", "tpu-v5e", 1, 8),
        ("v5e-256", "tpu-v5e", 32, 8),
        ("v5litepod-16", "tpu-v5e", 2, 8),
    ],
)
def test_names_of_clusters(name: str, preset: str, nodes: int, devices: int) -> None:
    expected = Cluster.preset(preset, nodes=nodes, devices_per_node=devices)
    assert Cluster.named(name) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("12xH100", "do not fill nodes of 8"),
        ("8x8x8 h100", "not of the form"),
        ("8x8 h1000", "no cluster preset"),
        ("eight h100", "not of the form"),
        ("8xH100-40GB", "no cluster preset"),
        ("", "not of the form"),
        ("v4-8", "say for example '4xtpu-v4'"),
        ("8 nodes", "no cluster preset"),
        ("0xh100", "less than 1"),
    ],
)
def test_names_that_are_none(name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Cluster.named(name)


def test_programs_may_not_fill_a_gpu() -> None:
    device = Cluster.preset("h100").device
    assert 0.9 * device.memory_bytes < device.program_bytes < device.memory_bytes
    # What JAX's allocator owns is all for programs.
    local = Cluster.local(fake_devices("NVIDIA H100 80GB HBM3", [8])).device
    assert local.program_bytes == local.memory_bytes == 60 * 10**9


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_shares_are_shares(share: float) -> None:
    for name in ("overlap", "memory_fraction", "row_share"):
        plain = Cluster.preset("h100").to_dict()
        (plain if name == "overlap" else plain["device"])[name] = share
        with pytest.raises(OptionError, match=f"{name} is {share}, not a share"):
            Cluster.from_dict(plain)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.trace.json").write_text("{}")  # a timeline
    with pytest.raises(MissingClusterError, match="no cluster file") as found:
        Cluster.named(tmp_path / "rack.toml")
    assert "has no .toml or .json file at all" in " ".join(str(found.value).split())
    assert isinstance(found.value, FileNotFoundError) and isinstance(found.value, OptionError)
    Cluster.preset("h100").save(tmp_path / "racks.toml")
    with pytest.raises(MissingClusterError, match=r"'racks\.toml'"):
        Cluster.named(tmp_path / "rack.toml")
    with pytest.raises(MissingPlanError) as missing:
        Plan.load(tmp_path / "plan.json")
    assert "has no .json file at all" in " ".join(str(missing.value).split())
