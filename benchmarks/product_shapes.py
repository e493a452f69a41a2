"""What products of matrices of several shapes reach on a device, beside what plans price them at.

Plans know one efficiency of large products and what starting a kernel costs; tall and thin
products, and those that add up few or many terms, show where that is not enough.
"""

from __future__ import annotations

import math
import time
from typing import Any

import jax
import jax.numpy as jnp

from autopar.base.cluster import Cluster
from autopar.base.costs import compute_seconds

SHAPES = {
    "square": (4096, 4096, 4096),
    "tall": (65536, 1024, 1024),
    "wide": (1024, 1024, 65536),
    "thin result": (16384, 4096, 64),
    "few terms": (8192, 64, 8192),
    "many terms": (1024, 65536, 1024),
}
"""Rows, terms that are added up, and columns."""

TINY_SHARE = 32
"""By what number sizes are divided for tiny models."""

ROUNDS = 10
FEW, MANY = 2, 10


def measured_products(
    cluster: Cluster, tiny: bool, dtype: str = "bfloat16"
) -> list[dict[str, Any]]:
    """For each shape, seconds measured and priced, and FLOP/s."""
    made = []
    for name, whole in SHAPES.items():
        sizes = tuple(max(size // TINY_SHARE, 1) if tiny else size for size in whole)
        height, terms, columns = sizes
        flops = 2 * height * terms * columns
        numbers = height * terms + terms * columns + height * columns
        seconds = _seconds(sizes, dtype)
        made.append(
            {
                "shape": name,
                "sizes": sizes,
                "seconds": seconds,
                "priced_seconds": compute_seconds(
                    flops, jnp.dtype(dtype).itemsize * numbers, dtype, cluster
                ),
                "flops_per_second": flops / seconds,
            }
        )
    return made


def _seconds(sizes: tuple[int, ...], dtype: str) -> float:
    """Of one product: what a program of many takes more than one of few, at its quickest.

    Both programs take the same arguments and return as many numbers, so what a call takes is not
    counted, which for small products is most. Operands are random: chips that are short of power
    multiply zeros and ones faster.
    """
    rows, terms, columns = sizes

    def operand(number: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(number), shape, jnp.float32).astype(dtype)

    pairs = [(operand(2 * n, rows, terms), operand(2 * n + 1, terms, columns)) for n in range(MANY)]
    taken = []
    for count in (FEW, MANY):

        def multiply(pairs: Any, count: int = count) -> jax.Array:
            found = [jnp.matmul(a, b, preferred_element_type=dtype) for a, b in pairs[:count]]
            # Whole products, of which then one number each is taken.
            return jnp.stack([x[0, 0] for x in jax.lax.optimization_barrier(found)])

        program = jax.jit(multiply, keep_unused=True)
        jax.block_until_ready(program(pairs))
        best = math.inf
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            jax.block_until_ready(program(pairs))
            best = min(best, time.perf_counter() - begun)
        taken.append(best)
    return max((taken[1] - taken[0]) / (MANY - FEW), 1e-9)
