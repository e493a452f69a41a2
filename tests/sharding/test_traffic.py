"""What fusion leaves of a program's reads and writes, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autopar.passes.graph.graph import flatten, walk
from autopar.passes.sharding.traffic import MemoryTraffic

N = 256
ROW, MATRIX = 4 * N, 4 * N * N
x = jax.ShapeDtypeStruct((N, N), jnp.float32)
row = jax.ShapeDtypeStruct((N,), jnp.float32)


def totals(function: Callable[..., Any], *shapes: Any) -> tuple[int, int]:
    """Bytes and kernels of a whole function."""
    jaxpr = flatten(jax.make_jaxpr(function)(*shapes)).jaxpr
    traffic = MemoryTraffic(jaxpr)
    each = [traffic.of(eqn) for eqn in walk(jaxpr)]
    return sum(t.bytes for t in each), sum(t.kernels for t in each)


def test_a_chain_is_read_and_written_once() -> None:
    assert totals(lambda a: jnp.tanh(a * 2.0) + 1.0, x) == (2 * MATRIX, 1)
    assert totals(lambda a: a, x) == (0, 0)
    # What is read twice in a kernel is read once.
    assert totals(lambda a: jnp.tanh(a) * a, x) == (2 * MATRIX, 1)


def test_products_read_and_write_everything() -> None:
    assert totals(lambda a, b: a @ b, x, x) == (3 * MATRIX, 1)
    # What is made for a product is written for it, and the product's result read again.
    assert totals(lambda a, b: jnp.exp((a + 1.0) @ b), x, x) == ((2 + 3 + 2) * MATRIX, 3)
    # A transposed operand is moved, another shape of it is not.
    assert totals(lambda a, b: a.reshape(N * N, 1) @ b, x, row.update(shape=(1, 1)))[1] == 1


def test_broadcasts_are_not_written() -> None:
    assert totals(lambda a, b: a * b, x, row) == (2 * MATRIX + ROW, 1)


def test_reductions_take_their_operand_in() -> None:
    assert totals(lambda a: (a * a).sum(axis=0), x) == (MATRIX + ROW, 1)
    # A softmax reads its argument for the maximum, for the sum and for the result.
    bytes_moved, kernels = totals(lambda a: jax.nn.softmax(a), x)
    assert 4 * MATRIX <= bytes_moved <= 4 * MATRIX + 8 * ROW and kernels == 3


def test_siblings_are_one_kernel() -> None:
    def adam(p: Any, m: Any, v: Any, g: Any) -> Any:
        m, v = 0.9 * m + 0.1 * g, 0.9 * v + 0.1 * g * g
        return p - m / (jnp.sqrt(v) + 1e-8), m, v

    assert totals(adam, x, x, x, x) == (7 * MATRIX, 1)


def test_a_residual_stream_is_written() -> None:
    def blocks(a: Any, w: Any) -> Any:
        for _ in range(6):
            a = a + jnp.tanh(a - a.mean(axis=0)) @ w
        return a

    one, six = (
        totals(lambda a, w: a + jnp.tanh(a - a.mean(axis=0)) @ w, x, x)[0],
        totals(blocks, x, x)[0],
    )
    assert six <= 6 * one + MATRIX  # not more and more from block to block


def test_parts_are_read_in_part() -> None:
    indices = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert totals(lambda a: a[:2] + 1.0, x) == (4 * ROW, 1)
    assert totals(lambda a, i: jnp.take(a, i, axis=0), x, indices)[0] < 8 * ROW
    assert totals(lambda a, b: a.at[3:5].set(b), x, row.update(shape=(2, N)))[0] < 7 * ROW


def test_barriers_keep_what_passes_them() -> None:
    def forward(a: Any) -> Any:
        return jnp.sin(jax.lax.optimization_barrier(jnp.exp(a)))

    assert totals(forward, x) == (4 * MATRIX, 2)


def test_loops_count_what_a_trip_moves() -> None:
    def loop(a: Any, rows: Any) -> Any:
        return jax.lax.scan(lambda c, r: (c + r, r.sum()), a, rows)

    bytes_moved, _ = totals(loop, row, x)
    # A trip reads its row and the carry, writes the carry and a number.
    assert bytes_moved == 3 * ROW + 4


def blocks(depth: int) -> Callable[..., Any]:
    """Residual blocks, each after a normalization, and their gradient: nothing stops a fusion."""

    def loss_fn(weights: Any, h: Any) -> Any:
        for w in weights:
            y = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
            h = h + y @ w
        return jnp.sum(h * h)

    return jax.grad(loss_fn, argnums=(0, 1))


def test_a_residual_stream_is_written_from_block_to_block() -> None:
    """Every block reads as much as any other, however many there are before it."""
    moved = [totals(blocks(depth), [x] * depth, x) for depth in (4, 8, 16)]
    (first, some), (second, more), (third, most) = moved
    assert third - second == 2 * (second - first)
    assert most - more == 2 * (more - some)


def test_turned_dimensions_of_one_are_views() -> None:
    wide = jax.ShapeDtypeStruct((N, 1, N), jnp.float32)
    turned = totals(lambda a, b: jnp.transpose(a, (1, 0, 2))[0] @ b, wide, x)
    assert turned == totals(lambda a, b: a @ b, x, x)
    # Others are not.
    assert totals(lambda a, b: a.T @ b, x, x)[0] > totals(lambda a, b: a @ b, x, x)[0]
