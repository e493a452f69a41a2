"""`Cluster`: the devices that a plan is for, and the numbers by which it is judged.

A cluster is nodes of equal devices. Devices of one node are joined by one link class, nodes by
another; a logical mesh lays the devices out row-major, nodes first, so each of its axes runs
within nodes, across nodes, or both.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import tomllib
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from autopar.base import hardware
from autopar.base.axis_links import AxisLink, factorizations, groups_along, link_of_groups
from autopar.base.cluster_checks import impossible_numbers
from autopar.base.cluster_names import is_cluster_file, read_name
from autopar.base.device import Device, Link
from autopar.base.direct_links import forwarded_bandwidth
from autopar.base.displayed import Displayed
from autopar.base.errors import AutoparWarning, DeviceError, OptionError, did_you_mean
from autopar.base.missing_files import missing_cluster
from autopar.base.new_files import place_for
from autopar.base.records import Record, dump_json, dump_toml
from autopar.base.user_code import shortens

__all__ = ["AXIS_NAMES", "AxisLink", "Cluster", "Device", "Link", "axis_names"]

AXIS_NAMES = ("x", "y", "z")
"""Names of the axes of a logical mesh, in order."""


def axis_names(shape: Sequence[int]) -> tuple[str, ...]:
    """The names of the axes of a logical mesh of that shape.

    >>> axis_names((4, 2))
    ('x', 'y')
    """
    return AXIS_NAMES[: len(shape)]


@dataclasses.dataclass(frozen=True)
class Cluster(Displayed, Record):
    """Nodes of equal devices, the links that join them, and what they are known to do.

    Args:
      name: of the cluster, for people.
      num_nodes, devices_per_node: how many there are.
      device: every device.
      intra_node, inter_node: links between devices of one node and of different nodes.
      collective_seconds: what starting one collective costs.
      source: where the numbers are from.
      devices_per_card: devices of a node that share one network card (a rail). The bandwidth of
        `inter_node` is a device's share of it; one device that sends alone has all of it.
      nodes_per_switch: nodes that reach each other at full speed; 0: all.
      oversubscription: by what the bandwidth between nodes of different switches is divided.
      pair_bandwidth: where a node's devices are not joined by a switch, the bytes per second of the
        direct links from each device to each other, row by row. What a group of them reaches
        follows from its weakest cut, and `intra_node` has the bandwidth of all together.
      overlap: the share of the collectives of weights and gradients (what no next operation waits
        for) that the compiler runs beside computation, as far as there is computation. By default
        none, as XLA's on GPUs do not without `--xla_gpu_enable_latency_hiding_scheduler=true`.
      price_per_device_hour: what an hour of one device costs, in any currency; 0: not known.
      process_bandwidth: bytes per second that a process of one mesh sends one of another by way of
        their hosts; 0: meshes reach each other over the links alone. `autopar.Ray(devices="gpu")`
        with sockets sets it where it is 0.
      host_bandwidth: bytes per second that each device moves to or from the memory of its host, all
        devices at a time; 0: nothing is put there.
      host_memory_bytes: of each node, for what is put there; 0: not known, and no limit.

    >>> cluster = Cluster.preset("dgx-h100", nodes=2)
    >>> cluster.num_devices, cluster.axis_link((2, 8), 1).kind, cluster.axis_link((2, 8), 0).kind
    (16, 'intra', 'inter')
    """

    name: str
    num_nodes: int
    devices_per_node: int
    device: Device
    intra_node: Link
    inter_node: Link
    collective_seconds: float
    source: str
    devices_per_card: int = 1
    nodes_per_switch: int = 0
    oversubscription: float = 1.0
    pair_bandwidth: tuple[tuple[float, ...], ...] = ()
    overlap: float = 0.0
    price_per_device_hour: float = 0.0
    process_bandwidth: float = 0.0
    host_bandwidth: float = 0.0
    host_memory_bytes: int = 0

    page: ClassVar = ("small_pages", "cluster_page")

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = impossible_numbers(self)
        if problems:
            what = f"The cluster {self.name!r} is not possible."
            raise OptionError(what, why="; ".join(problems) + ".")

    @property
    def num_devices(self) -> int:
        """Number of devices of all nodes."""
        return self.num_nodes * self.devices_per_node

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} node{'' if self.num_nodes == 1 else 's'}"
        return f"{self.name}: {nodes} of {self.devices_per_node} x {self.device.name}"

    @classmethod
    @shortens
    def preset(cls, name: str, *, nodes: int = 1, devices_per_node: int | None = None) -> Cluster:
        """A cluster of a well-known kind, with numbers from public documents.

        Args:
          name: a kind of node, such as "dgx-h100", "p4d.24xlarge", "tpu-v5e" or "cpu", or of
            device, such as "h100", which means the usual node of those; `Cluster.presets()` lists
            all.
          nodes: how many.
          devices_per_node: how many devices each has; by default as many as that kind of node has.

        Raises:
          OptionError: there is no such preset, or a number is less than one.
        """
        data = hardware.table()
        system_name = data["aliases"].get(name.lower(), name.lower())
        if system_name not in data["systems"]:
            raise OptionError(
                f"There is no cluster preset {name!r}.",
                why=f"the presets are {', '.join(cls.presets())}.",
                hint=did_you_mean(name, cls.presets()),
            )
        system = data["systems"][system_name]
        if devices_per_node is None:
            devices_per_node = system["devices_per_node"]
        return cls(
            name=name.lower(),
            num_nodes=nodes,
            devices_per_node=devices_per_node,
            device=Device.from_dict(data["devices"][system["device"]]),
            intra_node=Link(system["intra_bandwidth"], system["intra_latency"]),
            inter_node=Link(system["inter_bandwidth"], system["inter_latency"]),
            collective_seconds=system["collective_seconds"],
            devices_per_card=system.get("devices_per_card", 1),
            pair_bandwidth=hardware.pair_bandwidth(system, devices_per_node),
            host_bandwidth=system.get("host_bandwidth", 0.0),
            host_memory_bytes=hardware.host_memory_bytes(system, devices_per_node),
            source=f"autopar's preset {system_name}",
        )

    @classmethod
    @shortens
    def named(cls, name: str | os.PathLike[str]) -> Cluster:
        """The cluster that a name says: a preset, with how many there are, or a file's path.

        Args:
          name: "h100" or "dgx-h100" (one node), "8xH100" (devices, in the usual nodes), "2x
            dgx-h100" (nodes), "8x8 h100" (nodes and their devices), or a path that ends in `.toml`
            or `.json`.

        Raises:
          OptionError: there is no such preset, or the numbers make no nodes.
          OSError: the file cannot be read.

        >>> print(Cluster.named("8x8 h100"))
        h100: 8 nodes of 8 x H100 SXM5 80GB
        >>> Cluster.named("64xH100") == Cluster.named("8x8 h100")
        True
        """
        if is_cluster_file(name):
            return cls.load(name)
        known = read_name(os.fspath(name), hardware.table())
        if isinstance(known, str):
            raise OptionError(f"{name!r} is no cluster.", why=f"{known}.")
        return cls.preset(known.preset, nodes=known.nodes, devices_per_node=known.devices_per_node)

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """The names that `preset` knows."""
        data = hardware.table()
        return tuple(sorted({*data["systems"], *data["aliases"]}))

    @classmethod
    def local(cls, devices: Sequence[Any] | None = None) -> Cluster:
        """The cluster of the devices that JAX sees.

        Args:
          devices: `jax.Device`s; by default all of `jax.devices()`. Those of one process are one
            node, on TPUs those of one slice, whose links do not end at its hosts. They may be those
            of a topology that is not there (`jax.experimental.topologies`). One that is there
            `k` times, for as many stages of a pipeline, has a `k`-th of its memory and rates for
            each.

        Raises:
          DeviceError: there is no device, or processes have different numbers of them.
        """
        import jax

        devices = jax.devices() if devices is None else list(devices)
        if not devices:
            raise DeviceError("There is no device to plan for.", where="Cluster.local")
        is_tpu = devices[0].platform == "tpu"
        counts = Counter(
            getattr(device, "slice_index", 0) if is_tpu else device.process_index
            for device in devices
        )
        per_node = set(counts.values())
        if len(per_node) > 1:
            raise DeviceError(
                "The processes have different numbers of devices.",
                where="Cluster.local",
                why=f"a cluster is nodes of equal devices, and these have {sorted(per_node)}.",
                hint="pass the devices to use.",
            )
        nodes, devices_per_node = len(counts), per_node.pop()
        if devices[0].platform == "cpu":
            return _local_cpus(nodes, devices_per_node)
        return _local_accelerators(devices, nodes, devices_per_node)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cluster as TOML, or as JSON where the file's name ends in `.json`."""
        plain = self.to_dict()
        text = dump_json(plain) if Path(path).suffix == ".json" else dump_toml(plain)
        place_for(path).write_text(text, encoding="utf-8")

    @classmethod
    @shortens
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Reads a file that `save` wrote, or that was written by hand in the same form.

        Raises:
          MissingClusterError: there is no such file; it is a `FileNotFoundError` too.
          OptionError: the file is not such a cluster; says which field is missing or wrong.
          OSError: the file cannot be read.
        """
        if not Path(path).exists():
            raise missing_cluster(Path(path))
        text = Path(path).read_text(encoding="utf-8")
        try:
            plain = json.loads(text) if Path(path).suffix == ".json" else tomllib.loads(text)
            return cls.from_dict(plain)
        except (ValueError, TypeError) as error:
            if isinstance(error, OptionError):
                raise
            raise OptionError(
                "The file is not a cluster.",
                where=os.fspath(path),
                why=f"{error}.",
                hint="see the form of a file that Cluster.save writes.",
            ) from None

    def logical_meshes(self, max_axes: int = 3) -> tuple[tuple[int, ...], ...]:
        """Shapes of logical meshes worth trying for all devices, fewest axes first, in fixed order.

        Shapes that only rename the axes of an earlier one are left out, and so are those with an
        axis that cuts nodes unevenly.

        Args:
          max_axes: from 1 to 3.

        >>> Cluster.preset("h100").logical_meshes()
        ((8,), (4, 2), (2, 2, 2))
        """
        if self.num_devices == 1:
            return ((1,),)
        shapes: dict[Any, tuple[int, ...]] = {}
        for num_axes in range(1, max_axes + 1):
            for shape in sorted(factorizations(self.num_devices, num_axes), reverse=True):
                links = [self.axis_link(shape, axis) for axis in range(num_axes)]
                if all(link.kind != "uneven" for link in links):
                    key = tuple(sorted((link.within, link.across) for link in links))
                    shapes.setdefault(key, shape)
        return tuple(shapes.values())

    def axis_link(self, shape: Sequence[int], axis: int | Sequence[int]) -> AxisLink:
        """How devices that differ only in their positions along an axis, or several, are joined.

        Args:
          shape: of a logical mesh over the first `prod(shape)` devices, row-major, nodes first.
          axis: the number of an axis of that mesh, or several.

        Raises:
          DeviceError: the cluster has fewer devices than the mesh.
        """
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        return _axis_link(self, tuple(shape), axes)

    @property
    def card_bandwidth(self) -> float:
        """Bytes per second of one network card, which `devices_per_card` devices share."""
        return self.inter_node.bandwidth * self.devices_per_card

    @property
    def host_share(self) -> int:
        """Bytes of a node's memory for each of its devices."""
        return self.host_memory_bytes // self.devices_per_node

    def with_links(self, scale: float) -> Cluster:
        """The same devices, their links so many times as quick."""

        def scaled(link: Link) -> Link:
            return dataclasses.replace(link, bandwidth=link.bandwidth * scale)

        return dataclasses.replace(
            self,
            intra_node=scaled(self.intra_node),
            inter_node=scaled(self.inter_node),
            pair_bandwidth=tuple(tuple(x * scale for x in row) for row in self.pair_bandwidth),
        )

    def between_nodes(self, first: Any, last: Any) -> Link:
        """The link between nodes that are numbered from `first` to `last`, or several such."""
        if not self.nodes_per_switch:
            return self.inter_node
        per = self.nodes_per_switch
        if (np.asarray(first) // per == np.asarray(last) // per).all():
            return self.inter_node
        slower = self.inter_node.bandwidth / self.oversubscription
        return dataclasses.replace(self.inter_node, bandwidth=slower)

    def bandwidth_between(self, first: Collection[int], second: Collection[int]) -> float:
        """Bytes per second from some devices of a node to others, by their places in it."""
        if not self.pair_bandwidth:
            return min(len(first), len(second)) * self.intra_node.bandwidth
        direct = sum(self.pair_bandwidth[a][b] for a in first for b in second)
        return direct or forwarded_bandwidth(self.pair_bandwidth)


@functools.lru_cache(maxsize=4096)
def _axis_link(cluster: Cluster, shape: tuple[int, ...], axes: tuple[int, ...]) -> AxisLink:
    size = math.prod(shape)
    if size > cluster.num_devices:
        raise DeviceError(
            f"The logical mesh {shape} needs {size} devices.",
            why=f"the cluster has {cluster.num_devices} ({cluster}).",
        )
    groups = groups_along(shape, axes)
    nodes, places = np.divmod(groups, cluster.devices_per_node)
    inter = cluster.between_nodes(nodes[:, 0], nodes[:, -1])
    return link_of_groups(nodes, places, cluster.intra_node, inter, cluster.pair_bandwidth)


def _local_cpus(nodes: int, devices_per_node: int) -> Cluster:
    """Virtual devices share the cores and the memory of their machine."""
    core = Cluster.preset("cpu")
    share = hardware.num_cores() / devices_per_node
    device = dataclasses.replace(
        core.device,
        name="CPU",
        memory_bytes=hardware.machine_memory_bytes() // devices_per_node,
        memory_bandwidth=core.device.memory_bandwidth * share,
        peak_flops={name: rate * share for name, rate in core.device.peak_flops.items()},
    )
    return dataclasses.replace(
        core,
        name="local cpu",
        num_nodes=nodes,
        devices_per_node=devices_per_node,
        device=device,
        intra_node=Link(core.intra_node.bandwidth * share, core.intra_node.latency),
        host_bandwidth=core.host_bandwidth * share,
        host_memory_bytes=hardware.machine_memory_bytes(),
        source=f"{core.source}, for {hardware.num_cores()} cores",
    )


def _local_accelerators(devices: Sequence[Any], nodes: int, devices_per_node: int) -> Cluster:
    first = devices[0]
    kind = first.device_kind
    name = hardware.preset_of(kind)
    if name is None:
        name = "h100" if first.platform in ("gpu", "cuda", "rocm") else "tpu-v5e"
        warnings.warn(
            f"autopar has no numbers for {kind!r} and plans with those of {name!r}; pass a "
            "cluster= of your own for better plans.",
            AutoparWarning,
            stacklevel=3,
        )
    preset = Cluster.preset(name, nodes=nodes, devices_per_node=devices_per_node)
    # What the allocator owns is the true limit of what programs can use, and tells variants apart.
    memory = hardware.allocator_bytes(devices)
    device = dataclasses.replace(preset.device, name=kind)
    if memory:
        device = dataclasses.replace(device, memory_bytes=memory, memory_fraction=1.0)
    device = device.part(len(devices) // len({id(one) for one in devices}))
    return dataclasses.replace(preset, name=f"local {kind}", device=device)
