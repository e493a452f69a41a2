"""One accelerator and one class of links: the numbers of which a `Cluster` is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.base.records import Record

_NUM_BYTES = {"float8": 1, "int8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
FLOATS = ("float8", "bfloat16", "float32", "float64")
"""Floating types by width; every device has a number for one of them."""


@dataclasses.dataclass(frozen=True)
class Device(Record):
    """One accelerator.

    Args:
      name: its kind.
      memory_bytes: how much it has; of a local device, what the allocator owns.
      memory_bandwidth: bytes per second.
      peak_flops: operations per second of dense matrix products by dtype name; "float8" and
        "int8" stand for all types of eight bits.
      max_efficiency: the share of the peak that large matrix products reach.
      kernel_seconds: what starting one kernel costs; with it, the efficiency of a product of f
        operations is max_efficiency * f / (f + kernel_seconds * peak * max_efficiency).
      fused_speedup: how many times quicker a value is passed on inside of a kernel than written to
        memory. By default 16: an L1 cache of a V100 gives 14 TB/s where its memory gives 0.9 (Jia
        et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", 2018).
      row_share: the share of the memory's bandwidth that kernels reach which reduce rows and have
        the sums meet them again: softmaxes, norms. Those of an H200 are hardly quicker than those
        of an H100, whose memory has 0.7 of its bandwidth and whose cores are the same.
      memory_fraction: the share that programs may fill. The rest is what the driver's context,
        collectives' buffers and products' workspaces take. A run must let JAX have it: of a GPU it
        takes 0.75 unless the environment's XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: Mapping[str, float] = dataclasses.field(hash=False)
    max_efficiency: float
    kernel_seconds: float
    fused_speedup: float = 16.0
    row_share: float = 1.0
    memory_fraction: float = 1.0

    @property
    def program_bytes(self) -> int:
        """What programs may fill."""
        return int(self.memory_bytes * self.memory_fraction)

    def part(self, count: int) -> Device:
        """What each of `count` programs that share the device at all times has of it."""
        return dataclasses.replace(
            self,
            memory_bytes=self.memory_bytes // count,
            memory_bandwidth=self.memory_bandwidth / count,
            peak_flops={name: rate / count for name, rate in self.peak_flops.items()},
        )

    def peak_flops_for(self, dtype: str) -> float:
        """Operations per second for matrix products of `dtype`.

        A dtype without a number counts as the next wider floating type that has one. Where there is
        none (float64 on a TPU), the speed of the widest falls in proportion to the width.
        """
        name = _dtype_class(dtype)
        if name in self.peak_flops:
            return self.peak_flops[name]
        known = [n for n in FLOATS if n in self.peak_flops]
        wider = [n for n in known if _NUM_BYTES[n] >= _NUM_BYTES[name]]
        if wider:
            return self.peak_flops[wider[0]]
        return self.peak_flops[known[-1]] * _NUM_BYTES[known[-1]] / _NUM_BYTES[name]


@dataclasses.dataclass(frozen=True)
class Link(Record):
    """A class of links: bytes per second that a device can send, seconds that a message takes."""

    bandwidth: float
    latency: float


def _dtype_class(dtype: str) -> str:
    """The row of a device's table in which a dtype's operations count."""
    if dtype in ("float16", "bfloat16", "float32", "float64"):
        return dtype
    if dtype.startswith(("float8", "float6", "float4")):
        return "float8"
    if dtype in ("int8", "uint8", "int4", "uint4", "int2", "uint2", "bool"):
        return "int8"
    return "float64" if dtype in ("int64", "uint64", "complex128") else "float32"
