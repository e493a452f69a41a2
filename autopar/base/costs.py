"""What collectives and computations cost, in seconds, on a `Cluster`.

Collectives follow the alpha-beta model: starting one, plus a latency per message, plus bytes over
bandwidth, with ring algorithms inside a node and between nodes. In every formula `n` devices take
part, `k` of them on each of `m` nodes, and `B` is the same number as a plan's `Collective.bytes`:
the larger of one device's operand and one device's result. So B is

- all-reduce: the operand, which is as large as the result;
- reduce-scatter: the operand (the result is B/n);
- all-gather: the result (the operand is B/n);
- all-to-all: the operand, which is as large as the result;
- collective-permute: the operand.

The formulas for rings are those of Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH" (2005); over nodes they are composed as NCCL composes them:
reduce-scatter in the node, the collective among the devices of equal rank of all nodes,
all-gather in the node.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from autopar.base.cluster import AxisLink, Cluster

PICOSECONDS = 10**12
"""Per second; the unit of the solver's integer costs."""


def to_picoseconds(seconds: float) -> int:
    """A cost as the solver takes it.

    >>> to_picoseconds(1.5e-6)
    1500000
    """
    return round(seconds * PICOSECONDS)


def collective_seconds(
    kind: str, num_bytes: float, cluster: Cluster, mesh_shape: Sequence[int], axes: Sequence[int]
) -> float:
    """Seconds of one collective over axes of a logical mesh; none where one device takes part.

    Args:
      kind: "all-reduce", "reduce-scatter", "all-gather", "all-to-all" or "collective-permute".
      num_bytes: B above, the larger of one device's operand and result.
      cluster: on whose links it runs.
      mesh_shape: of the logical mesh.
      axes: numbers of the axes along which devices take part together.

    >>> from autopar.base.cluster import Cluster
    >>> seconds = collective_seconds("all-gather", 2**30, Cluster.preset("h100"), (4, 2), (0,))
    >>> print(f"{seconds * 1e3:.2f} ms")
    2.18 ms
    """
    alpha, beta = alpha_beta(kind, cluster, tuple(mesh_shape), tuple(axes))
    return alpha + beta * num_bytes


@functools.lru_cache(maxsize=4096)
def alpha_beta(
    kind: str, cluster: Cluster, mesh_shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[float, float]:
    """The (alpha, beta) of a collective: it takes alpha seconds plus beta seconds per byte of B.

    With latency and bandwidth a, w inside a node and A, W between nodes:

    - reduce-scatter and all-gather: alpha = start + (k-1) a + (m-1) A,
      beta = (k-1)/k / w + (m-1)/m / k / W;
    - all-reduce: twice that, started once;
    - all-to-all: alpha = start + (k-1) a + (n-k) A, beta = (k-1)/n / w + (n-k)/n / W;
    - collective-permute: alpha = start + latency, beta = 1 / bandwidth of the slower class of
      links.

    Raises:
      ValueError: there is no such kind.
    """
    link = cluster.axis_link(mesh_shape, axes)
    if kind not in _MODELS:
        raise ValueError(f"{kind!r} is no collective; there are {', '.join(_MODELS)}")
    if link.size == 1:
        return 0.0, 0.0
    alpha, beta = _MODELS[kind](link)
    return cluster.collective_seconds + alpha, beta


def _half_ring(link: AxisLink) -> tuple[float, float]:
    k, m = link.within, link.across
    alpha = (k - 1) * link.intra.latency + (m - 1) * link.inter.latency
    beta = (k - 1) / k / link.intra.bandwidth + (m - 1) / m / k / link.inter.bandwidth
    return alpha, beta


def _full_ring(link: AxisLink) -> tuple[float, float]:
    alpha, beta = _half_ring(link)
    return 2 * alpha, 2 * beta


def _direct(link: AxisLink) -> tuple[float, float]:
    k, n = link.within, link.size
    alpha = (k - 1) * link.intra.latency + (n - k) * link.inter.latency
    beta = (k - 1) / n / link.intra.bandwidth + (n - k) / n / link.inter.bandwidth
    return alpha, beta


def _one_message(link: AxisLink) -> tuple[float, float]:
    return link.latency, 1 / link.bandwidth


_MODELS = {
    "all-reduce": _full_ring,
    "reduce-scatter": _half_ring,
    "all-gather": _half_ring,
    "all-to-all": _direct,
    "collective-permute": _one_message,
}


def compute_seconds(
    flops: float, num_bytes: float, dtype: str, cluster: Cluster, *, is_matmul: bool = True
) -> float:
    """Seconds that one device computes: the longer of arithmetic and memory traffic (the roofline).

    Args:
      flops: operations of this device (a multiply-add counts as two).
      num_bytes: what this device reads and writes in its memory; what is fused away does not count.
      dtype: of the operands of the arithmetic, such as "bfloat16".
      cluster: whose device computes.
      is_matmul: a matrix product or convolution is a kernel of its own: starting it costs
        `kernel_seconds`, and it reaches `max_efficiency` of the peak, so that its efficiency
        grows with its size. Other arithmetic is fused into kernels around it and costs flops over
        peak.

    >>> from autopar.base.cluster import Cluster
    >>> n = 8192
    >>> seconds = compute_seconds(2 * n**3, 3 * 2 * n**2, "bfloat16", Cluster.preset("h100"))
    >>> print(f"{seconds * 1e3:.2f} ms")
    1.39 ms
    """
    start = cluster.device.kernel_seconds if flops and is_matmul else 0.0
    return start + roofline_seconds(flops, num_bytes, dtype, cluster, is_matmul=is_matmul)


def roofline_seconds(
    flops: float, num_bytes: float, dtype: str, cluster: Cluster, *, is_matmul: bool = True
) -> float:
    """The part of `compute_seconds` that falls in proportion where the work is divided.

    The model is that of Williams, Waterman and Patterson, "Roofline" (2009); starting a kernel is
    paid beside it, by every device in full.
    """
    device = cluster.device
    memory_seconds = num_bytes / device.memory_bandwidth
    if flops == 0:
        return memory_seconds
    arithmetic_seconds = flops / device.peak_flops_for(dtype)
    if is_matmul:
        arithmetic_seconds /= device.max_efficiency
    return max(memory_seconds, arithmetic_seconds)
