"""Clusters for people: all presets in one table, one cluster as a card."""

from __future__ import annotations

from collections.abc import Iterable

from rich.panel import Panel
from rich.table import Table

from autopar.base.cluster import Cluster
from autopar.base.device import Device, Link
from autopar.base.units import format_bytes, format_count, format_seconds
from autopar.report.rich_parts import add_row, captioned, new_table


def presets_table() -> Table:
    """A row for each kind of node, with the other names that mean it."""
    right = ("devices", "memory", "bfloat16", "within", "between")
    table = new_table("Clusters by name", "name", "device", *right, right=right)
    alike: dict[Cluster, list[str]] = {}
    for name in Cluster.presets():
        cluster = Cluster.preset(name)
        alike.setdefault(cluster_without_names(cluster), []).append(name)
    for cluster, names in alike.items():
        add_row(
            table,
            ", ".join(names),
            cluster.device.name,
            str(cluster.devices_per_node),
            format_bytes(cluster.device.memory_bytes),
            f"{format_count(cluster.device.peak_flops_for('bfloat16'))}FLOP/s",
            _rate(cluster.intra_node),
            _rate(cluster.inter_node),
        )
    return captioned(
        table,
        "devices: of a node; within a node, between nodes: of one device in one direction.\n"
        'several nodes: "4x dgx-h100" or "4x8 h100"; so many devices: "64xh100"; others: a file.',
    )


def measured_table(title: str, rows: Iterable[tuple[str, float, float, str]]) -> Table:
    """What was measured beside what was known: name, both values, and their unit, row by row."""
    table = new_table(title, "number", "measured", "before", right=("measured", "before"))
    for name, value, before, unit in rows:
        add_row(table, name, *(_number(x, unit) for x in (value, before)))
    return table


def _number(value: float, unit: str) -> str:
    if unit == "s":
        return format_seconds(value)
    return f"{format_count(value)}{unit}"


def cluster_without_names(cluster: Cluster) -> Cluster:
    """The cluster without what it is called, to tell which are alike."""
    plain = cluster.to_dict()
    return Cluster.from_dict({**plain, "name": "", "source": ""})


def cluster_card(cluster: Cluster) -> Panel:
    """What the planner knows of a cluster."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in cluster_rows(cluster):
        add_row(grid, name, text)
    return Panel.fit(grid, title=str(cluster.name), title_align="left", border_style="blue")


def cluster_rows(cluster: Cluster) -> list[tuple[str, str]]:
    """Names and values of what is known of a cluster, as every view of it shows them."""
    nodes, device = cluster.num_nodes, cluster.device
    rows = [
        (
            "devices",
            f"{cluster.num_devices} x {device.name}, {nodes} node{'s' * (nodes != 1)} of "
            f"{cluster.devices_per_node}",
        ),
        ("memory", _memory(device)),
        ("peak", ", ".join(_peaks(device))),
        ("within nodes", f"{_rate(cluster.intra_node)}, {_latency(cluster.intra_node)}"),
    ]
    if nodes > 1:
        rows.append(
            ("between nodes", f"{_rate(cluster.inter_node)}, {_latency(cluster.inter_node)}")
        )
    if cluster.nodes_per_switch:
        text = f"{cluster.nodes_per_switch} nodes, beyond it 1/{cluster.oversubscription:g} as fast"
        rows.append(("switch", text))
    if cluster.price_per_device_hour:
        rows.append(("price", f"{cluster.price_per_device_hour:g} for an hour of a device"))
    if cluster.num_devices > 1:
        meshes = cluster.logical_meshes(2)
        rows.append(("meshes", ", ".join(" x ".join(map(str, mesh)) for mesh in meshes)))
    rows.append(("source", cluster.source))
    return rows


def _memory(device: Device) -> str:
    text = f"{format_bytes(device.memory_bytes)} a device"
    if device.memory_fraction < 1:
        text += f", {format_bytes(device.program_bytes)} of it for programs"
    return f"{text}, {format_count(device.memory_bandwidth)}B/s"


def _peaks(device: Device) -> list[str]:
    """The dtypes and their operations a second, those alike together."""
    alike: dict[float, list[str]] = {}
    for dtype, flops in device.peak_flops.items():
        alike.setdefault(flops, []).append(dtype)
    ordered = sorted(alike.items(), reverse=True)
    return [f"{'/'.join(names)} {format_count(flops)}FLOP/s" for flops, names in ordered]


def _rate(link: Link) -> str:
    return f"{format_count(link.bandwidth)}B/s"


def _latency(link: Link) -> str:
    return f"{format_seconds(link.latency)} for a message"
