"""`calibrate`: what the devices that are here do, measured into a `Cluster`.

All devices of this process work at the same time, as in a step. Each program repeats its operation,
and what repeating it more often takes, over how often, is the seconds of one: dispatching and
waiting cancel out. Links follow the model of `costs.py`: a collective-permute takes start + latency
+ bytes / bandwidth, an all-reduce of n devices start + 2 (n-1) latency + 2 (n-1)/n bytes /
bandwidth; each is measured with few and with many bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.arrays.split_array import HOST_MEMORY
from autopar.base.cluster import Cluster, Link
from autopar.base.errors import DeviceError, OptionError
from autopar.passes.graph.logical import no_mesh

AXIS = "devices"
SHORT, LONG = 2, 10
"""How often a program repeats its operation."""
FEW_KERNELS, MANY_KERNELS = 20, 220
"""The same of kernels that do nothing, a dozen of which a GPU runs while the host waits."""
MAIN_TYPES = ("bfloat16", "float16", "float32")
"""Whose share of the datasheet's rate is that of the device, the first that was measured."""

_NAMES = {"float8": "float8_e4m3fn"}
_SMALLEST = {"cpu": 128, "gpu": 2048, "tpu": 2048}
_LARGEST = {"cpu": 512, "gpu": 8192, "tpu": 8192}
"""Rows of matrices; accelerators are nowhere near their rate with smaller ones."""

_BYTES = {"cpu": (1 << 12, 1 << 22), "gpu": (1 << 14, 1 << 28), "tpu": (1 << 14, 1 << 27)}
"""Few bytes, and many: more than caches hold."""


@dataclass(frozen=True)
class MeasuredNumber:
    """One number of a cluster.

    Args:
      name: of the field, as in the cluster's file.
      value: as measured.
      before: what it was for such devices.
      unit: of both.
    """

    name: str
    value: float
    before: float
    unit: str


@dataclass(frozen=True)
class Calibration:
    """What was measured: the cluster with it, and the numbers one by one."""

    cluster: Cluster
    numbers: tuple[MeasuredNumber, ...]


def calibrate(
    cluster: Cluster | None = None,
    devices: Sequence[jax.Device] | None = None,
    seconds: float = 20.0,
) -> Calibration:
    """Measure this process's devices, for plans that fit them.

    Args:
      cluster: what the rest is taken from: how many nodes there are, and the links between them,
        which one process cannot measure. None: `Cluster.local(devices)`.
      devices: those to measure; by default all of this process.
      seconds: about how long it may measure, without compiling.

    Returns:
      The cluster, whose `save` writes the file that `cluster=` and `--cluster` take, and what was
      measured. Where the device is one that autopar has numbers of, its highest FLOP/s stay those
      of its maker, and `max_efficiency` is what was reached of them.

    Raises:
      DeviceError: there is no device, or the cluster's are of another kind.
      OptionError: `seconds` is not positive.
    """
    if not seconds > 0:
        raise OptionError(f"seconds={seconds!r} is not possible.", where="calibrate")
    devices = jax.local_devices() if devices is None else list(devices)
    local = Cluster.local(devices)
    base = local if cluster is None else cluster
    is_local_cpu, is_cpu = (x.device.name.startswith("CPU") for x in (local, base))
    if is_local_cpu != is_cpu:
        raise DeviceError(
            f"The devices here are {local.device.name}, and the cluster has {base.device.name}.",
            where="calibrate",
            why="what is measured here would be written down for others.",
            hint="run it on a node of the cluster, or leave --cluster out.",
        )
    with no_mesh():
        bench = _Bench(devices, seconds)
        rates = {name: rate for name in base.device.peak_flops if (rate := bench.flops(name))}
        bandwidth, kernel = bench.memory_bandwidth(), bench.kernel_seconds()
        links = bench.links() if len(devices) > 1 else None
        to_hosts = bench.host_bandwidth()
    return _written(base, rates, bandwidth, kernel, links, to_hosts)


def _written(
    base: Cluster,
    rates: dict[str, float],
    bandwidth: float,
    kernel: float,
    links: tuple[Link, float] | None,
    to_hosts: float | None,
) -> Calibration:
    device, before = base.device, base
    # Of what programs compute in: of narrower types, XLA multiplies few at their full rate.
    main = next((name for name in MAIN_TYPES if name in rates), None)
    is_known = not device.name.startswith("CPU") and main is not None
    efficiency = 1.0
    if is_known and main is not None:
        efficiency = min(rates[main] / device.peak_flops[main], 1.0)
    peaks = {**device.peak_flops, **{name: rate / efficiency for name, rate in rates.items()}}
    device = dataclasses.replace(
        device,
        peak_flops=peaks,
        max_efficiency=efficiency,
        memory_bandwidth=bandwidth,
        kernel_seconds=kernel,
    )
    stamp = time.strftime("%Y-%m-%d")
    source = f"measured by autopar calibrate on {stamp} with jax {jax.__version__}"
    changes: dict[str, Any] = {"device": device}
    if links is not None:
        changes |= {"intra_node": links[0], "collective_seconds": links[1], "pair_bandwidth": ()}
    if to_hosts is not None:
        changes["host_bandwidth"] = to_hosts
    if base.num_nodes > 1 or links is None:
        source += f"; links {'between nodes' if links else ''} of {base.source}".replace("  ", " ")
    cluster = dataclasses.replace(base, source=source, **changes)
    rows = [
        MeasuredNumber(
            f"peak_flops.{name}", rates[name], old.peak_flops[name] * old.max_efficiency, "FLOP/s"
        )
        for old in (before.device,)
        for name in rates
    ]
    rows += [
        MeasuredNumber("memory_bandwidth", bandwidth, before.device.memory_bandwidth, "B/s"),
        MeasuredNumber("kernel_seconds", kernel, before.device.kernel_seconds, "s"),
    ]
    if links is not None:
        (link, start), was = links, before.intra_node
        rows += [
            MeasuredNumber(
                "intra_node.bandwidth", link.bandwidth, before.intra_node.bandwidth, "B/s"
            ),
            MeasuredNumber("intra_node.latency", link.latency, was.latency, "s"),
            MeasuredNumber("collective_seconds", start, before.collective_seconds, "s"),
        ]
    if to_hosts is not None:
        rows.append(MeasuredNumber("host_bandwidth", to_hosts, before.host_bandwidth, "B/s"))
    return Calibration(cluster, tuple(rows))


class _Bench:
    """Programs on all devices at once, and what they take."""

    def __init__(self, devices: Sequence[jax.Device], seconds: float):
        self._mesh = Mesh(np.asarray(devices), (AXIS,), axis_types=(AxisType.Auto,))
        self._count = len(devices)
        platform = devices[0].platform
        self._kind = platform if platform in ("cpu", "tpu") else "gpu"
        self._share = seconds / 13  # of each number

    def flops(self, name: str) -> float | None:
        """FLOP/s of a device in products of large matrices; None: JAX has no such here."""
        dtype = jnp.dtype(getattr(jnp, _NAMES.get(name, name)))
        if dtype.itemsize == 8 and not jax.config.read("jax_enable_x64"):
            return None
        is_whole = jnp.issubdtype(dtype, jnp.integer)
        into = jnp.int32 if is_whole else jnp.float32 if dtype.itemsize < 4 else dtype

        def times(x: Any, w: Any) -> Any:
            product = jax.lax.dot(x, w, preferred_element_type=into)
            return (product if is_whole else product * x.shape[0] ** -0.5).astype(dtype)

        best, rows = 0.0, _SMALLEST[self._kind]
        try:
            while rows <= _LARGEST[self._kind]:
                w = self._random((rows, rows), dtype)
                took = self._each(times, w, w)
                best = max(best, 2 * rows**3 / took)
                if took > self._share / LONG:
                    break
                rows *= 2
        except (jax.errors.JaxRuntimeError, TypeError, NotImplementedError):
            return best or None  # of a type that this device's compiler does not know
        return best

    def memory_bandwidth(self) -> float:
        """Bytes per second that a device reads and writes."""
        size = 16 * _BYTES[self._kind][1]
        x = self._ones((size // 4,), jnp.float32)

        return 2 * size / self._each(lambda x, _: x * 1.0001, x, x[..., :1], fuses=True)

    def kernel_seconds(self) -> float:
        """What one more kernel of a program takes, that does next to nothing."""
        x = self._ones((8, 8), jnp.float32)
        counts = FEW_KERNELS, MANY_KERNELS
        return self._each(lambda x, w: jnp.tanh(x @ w), x, x, counts=counts)

    def host_bandwidth(self) -> float | None:
        """Bytes per second to the host's memory and back; None: JAX has no such here."""
        device = self._mesh.devices.flat[0]
        if all(memory.kind != HOST_MEMORY for memory in device.addressable_memories()):
            return None
        size = _BYTES[self._kind][1]
        here = self._ones((size // 4,), jnp.float32)
        lies = here.sharding
        there = jax.device_put(here, lies.with_memory_kind(HOST_MEMORY))

        def copied(x: jax.Array, to: jax.Array) -> float:
            return self._quickest(lambda: jax.device_put(x, to.sharding, may_alias=False))

        return 2 * size / (copied(here, there) + copied(there, here))

    def links(self) -> tuple[Link, float]:
        """The link between two devices, and what starting a collective takes."""
        ring = [(i, (i + 1) % self._count) for i in range(self._count)]

        def reduced(x: Any, _: Any) -> Any:
            return jax.lax.psum(x, AXIS) * (1 / self._count)

        def moved(x: Any, _: Any) -> Any:
            return jax.lax.ppermute(x, AXIS, ring)

        all_reduce, permute = self._line(reduced), self._line(moved)
        hops = 2 * (self._count - 1)
        bandwidth = hops / self._count / all_reduce[1]
        least = 1e-9
        latency = max((all_reduce[0] - permute[0]) / (hops - 1), least) if hops > 1 else least
        start = max(permute[0] - latency, least)
        return Link(bandwidth, latency), start

    def _line(self, operation: Callable[[Any, Any], Any]) -> tuple[float, float]:
        """Seconds of an operation without bytes, and per byte."""
        few, many = _BYTES[self._kind]
        took = []
        for size in (few, many):
            x = self._ones((size // 4,), jnp.float32)
            took.append(self._each(operation, x, x[..., :1]))
        per_byte = max(took[1] - took[0], 1e-12) / (many - few)
        return max(took[0] - per_byte * few, 0.0), per_byte

    def _ones(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """An array of that shape for each device."""
        sharding = NamedSharding(self._mesh, PartitionSpec(AXIS))
        whole = (self._count, *shape)
        make = jax.jit(lambda: jnp.ones(whole, dtype), out_shardings=sharding)
        return make()

    def _random(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """An array of that shape for each device, of numbers that have all their bits.

        With numbers of few bits, chips that are short of power multiply up to a tenth faster.
        """
        sharding = NamedSharding(self._mesh, PartitionSpec(AXIS))
        whole = (self._count, *shape)

        def make() -> jax.Array:
            if jnp.issubdtype(dtype, jnp.integer):
                return jax.random.randint(jax.random.key(0), whole, -8, 8, jnp.int32).astype(dtype)
            return jax.random.normal(jax.random.key(0), whole, jnp.float32).astype(dtype)

        return jax.jit(make, out_shardings=sharding)()

    def _each(
        self,
        operation: Callable[[Any, Any], Any],
        x: jax.Array,
        w: jax.Array,
        fuses: bool = False,
        counts: tuple[int, int] = (SHORT, LONG),
    ) -> float:
        """The seconds of one operation on every device's `x`; one that `fuses` is in a loop."""
        spec, took = PartitionSpec(AXIS), dict[int, float]()
        few, many = counts
        for count in counts:

            def repeated(x: Any, w: Any, trips: Any, count: int = count) -> Any:
                x, w = x[0], w[0]
                if fuses:  # a loop whose trips the compiler does not know stays one
                    return jax.lax.fori_loop(0, trips[0], lambda _, x: operation(x, w), x)[None]
                for _ in range(count):
                    x = operation(x, w)
                return x[None]

            mapped = jax.shard_map(
                repeated, mesh=self._mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
            )
            arguments = x, w, self._ones((), jnp.int32) * count
            run = jax.jit(mapped).lower(*arguments).compile()
            took[count] = self._quickest(functools.partial(run, *arguments))
        return max((took[many] - took[few]) / (many - few), 1e-9)

    def _quickest(self, call: Callable[[], Any]) -> float:
        """The least seconds of several calls."""
        call().block_until_ready()
        best, end = float("inf"), time.perf_counter() + self._share / 4
        for number in range(1000):
            began = time.perf_counter()
            call().block_until_ready()
            now = time.perf_counter()
            best = min(best, now - began)
            if number >= 2 and now > end:
                break
        return best
