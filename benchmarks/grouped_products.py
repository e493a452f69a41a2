"""Grouped products of one device in three ways: our kernels, loops over tiles, XLA's own.

Beside them a plain product of as many operations, the seconds that plans price, and how far results
of kernels and loops are apart. Sizes are those of a Mixtral's and of a Qwen3's experts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.base.cluster import Cluster
from autopar.passes.primitives.group_kernels import KERNEL_TILES
from autopar.passes.primitives.group_tiles import product_in_tiles
from autopar.passes.primitives.group_tiling import LOOPS, GroupedMeans
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding.compiler_rules import rules_of
from autopar.passes.sharding.pricing import Pricing

ROUNDS = 10
TINY_SHARE = 64
"""By what number sizes are divided for tiny models."""
SUMS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


class Sizes(NamedTuple):
    """Rows, what is summed, columns, and groups; `xla` is tried where that takes no memory."""

    rows: int
    depth: int
    columns: int
    groups: int
    xla: bool = False


SHAPES = {
    "mixtral": Sizes(32768, 4096, 14336, 8),
    "qwen3": Sizes(131072, 2048, 768, 128),
    "qwen3, few rows": Sizes(8192, 2048, 768, 128, xla=True),
}


def measured_groups(cluster: Cluster, tiny: bool) -> list[dict[str, Any]]:
    """For each shape, and for products of rows and sums over them, seconds in each way."""
    return [
        _measured(name, sizes, kind, cluster, tiny)
        for name, sizes in SHAPES.items()
        for kind in ("rows", "sums")
    ]


def _measured(name: str, whole: Sizes, kind: str, cluster: Cluster, tiny: bool) -> dict[str, Any]:
    rows, depth, columns, groups, xla = whole
    if tiny:
        rows, depth, columns = (max(x // TINY_SHARE, 8) for x in (rows, depth, columns))
        groups = min(groups, 8)
    shapes = ((rows, depth), (groups, depth, columns), (rows, columns))
    left, matrices, other = (_operand(number, shape) for number, shape in enumerate(shapes))
    right = matrices if kind == "rows" else other
    sizes = _uneven(rows, groups)

    def product(left: Any, right: Any, sizes: Any) -> Any:
        if kind == "rows":
            return lax.ragged_dot(left, right, sizes)
        return lax.ragged_dot_general(left, right, sizes, SUMS)

    closed = jax.make_jaxpr(product)(left, right, sizes)
    (eqn,) = (x for x in closed.jaxpr.eqns if x.primitive.name == "ragged_dot_general")
    kernels = rules_of(cluster.device.name).grouped
    if kernels.tiles is None:  # as programs for CPUs
        kernels = GroupedMeans(tiles=KERNEL_TILES[9], interpret=True)
    ways: dict[str, Callable[..., Any]] = {
        "kernel": lambda *xs: product_in_tiles(eqn, xs, kernels),
        "loop": lambda *xs: product_in_tiles(eqn, xs, LOOPS),
    }
    if xla or tiny:
        ways["xla"] = product
    if kind == "rows":
        ways["plain"] = lambda left, right, sizes: left @ right[0]
    else:
        ways["plain"] = lambda left, right, sizes: left.T @ right
    operands = (left, right, jnp.asarray(sizes))
    made = {way: jax.jit(function)(*operands) for way, function in ways.items()}
    apart = jnp.max(jnp.abs(made["kernel"].astype(jnp.float32) - made["loop"].astype(jnp.float32)))
    largest = jnp.max(jnp.abs(made["loop"].astype(jnp.float32)))
    flops = 2 * rows * depth * columns
    seconds = {way: _seconds(jax.jit(function), operands) for way, function in ways.items()}
    pricing = Pricing(cluster, (1,))
    priced = pricing.compute(eqn, populate(closed.jaxpr)[eqn]) + pricing.start(eqn)
    return {
        "shape": name,
        "kind": kind,
        "sizes": tuple(whole[:4]) if not tiny else (rows, depth, columns, groups),
        "seconds": seconds,
        "tflops": {way: flops / x / 1e12 for way, x in seconds.items()},
        "priced_seconds": priced,
        "apart": float(apart / largest),
    }


def _operand(number: int, shape: tuple[int, ...]) -> jax.Array:
    """Random: chips that are short of power multiply zeros and ones faster."""
    return jax.random.normal(jax.random.key(number), shape, jnp.float32).astype(jnp.bfloat16)


def _uneven(rows: int, groups: int) -> np.ndarray:
    """Sizes as routers make them: the largest has some times as many rows as the least."""
    shares = np.random.default_rng(0).dirichlet(np.full(groups, 8.0))
    return np.diff(np.round(np.cumsum(shares) * rows).astype(np.int32), prepend=np.int32(0))


def _seconds(program: Any, operands: Any) -> float:
    """Of a call, at its quickest."""
    jax.block_until_ready(program(*operands))
    best = math.inf
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        jax.block_until_ready(program(*operands))
        best = min(best, time.perf_counter() - begun)
    return best
