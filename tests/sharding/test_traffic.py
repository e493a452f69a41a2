"""What fusion leaves of a program's reads and writes, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.base.cluster import Cluster
from autopar.passes.graph.graph import flatten, walk
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.traffic import MemoryTraffic, Traffic

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


@pytest.mark.parametrize("dtype, each", [(jnp.bfloat16, 32), (jnp.float16, 32), (jnp.float32, 12)])
def test_narrow_numbers_are_added_one_by_one(dtype: Any, each: int) -> None:
    """A GPU's memory adds words; narrower numbers cost a sector each, where several may meet."""
    whole, part = (jax.ShapeDtypeStruct((n, N), dtype) for n in (N, 8))
    index = jax.ShapeDtypeStruct((8,), jnp.int32)

    def moved(unique: bool) -> int:
        def add(a: Any, b: Any, i: Any) -> Any:
            return a.at[i].add(b, unique_indices=unique, mode="promise_in_bounds")

        jaxpr = flatten(jax.make_jaxpr(add)(whole, part, index)).jaxpr
        traffic = MemoryTraffic(jaxpr)
        (scatter,) = (eqn for eqn in walk(jaxpr) if eqn.primitive.name == "scatter-add")
        own = traffic.of(scatter)
        return own.bytes + own.added_bytes - 8 * 4

    assert moved(unique=False) == each * 8 * N
    assert moved(unique=True) == 3 * dtype(0).itemsize * 8 * N


@pytest.mark.parametrize("dtype, each", [(jnp.bfloat16, 32), (jnp.float32, 0)])
def test_gradients_of_maxima_over_windows_are_added_too(dtype: Any, each: int) -> None:
    image = jax.ShapeDtypeStruct((1, 16, 16, 8), dtype)
    pooled = jax.ShapeDtypeStruct((1, 8, 8, 8), dtype)

    def gradient(a: Any, g: Any) -> Any:
        pool = lambda a: jax.lax.reduce_window(  # noqa: E731
            a, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
        )
        return jax.vjp(pool, a)[1](g)[0]

    jaxpr = flatten(jax.make_jaxpr(gradient)(image, pooled)).jaxpr
    traffic = MemoryTraffic(jaxpr)
    (added,) = (eqn for eqn in walk(jaxpr) if eqn.primitive.name == "select_and_scatter_add")
    plain = dtype(0).itemsize * (2 * image.size + pooled.size)
    own = traffic.of(added)
    assert (own.bytes, own.added_bytes) == (plain, each * pooled.size)


def test_few_gathered_numbers_are_computed() -> None:
    """The logarithms of a loss are nowhere: one of each row is taken of them."""
    labels = jax.ShapeDtypeStruct((N,), jnp.int32)

    def loss(a: Any, y: Any) -> Any:
        logs = jax.nn.log_softmax(a.astype(jnp.float32))
        return jnp.take_along_axis(logs, y[:, None], 1).mean()

    narrow = x.update(dtype=jnp.bfloat16)
    # Read for the largest numbers and for the sums, in 16 bits.
    assert MATRIX <= totals(loss, narrow, labels)[0] < 1.2 * MATRIX
    # What takes as much as there is has it written.
    assert totals(lambda a, i: jnp.take(a + 1.0, i, axis=0), x, labels)[0] >= 4 * MATRIX
    # TPUs gather from memory.
    jaxpr = flatten(jax.make_jaxpr(loss)(narrow, labels)).jaxpr
    on_tpus = MemoryTraffic(jaxpr, gathers_read_buffers=True)
    assert sum(on_tpus.of(eqn).bytes for eqn in walk(jaxpr)) > 2 * MATRIX


def moving(function: Callable[..., Any], *shapes: Any) -> list[Traffic]:
    """That of every equation which moves something."""
    jaxpr = flatten(jax.make_jaxpr(function)(*shapes)).jaxpr
    traffic = MemoryTraffic(jaxpr)
    return [t for t in map(traffic.of, walk(jaxpr)) if t.bytes]


def test_rows_that_meet_their_sums_are_told() -> None:
    def has_rows(function: Callable[..., Any], *shapes: Any) -> list[bool]:
        return [t.has_rows for t in moving(function, *shapes)]

    assert has_rows(jax.nn.softmax, x) == [True, True, True]
    assert has_rows(lambda a: a * jax.lax.rsqrt(jnp.mean(a * a, -1, keepdims=True)), x)[-1]
    assert has_rows(lambda a, b: jnp.tanh(a + 0.1 * b), x, x) == [False]
    assert has_rows(lambda a, b: jnp.tanh(a + b), x, row) == [False]
    # Sums of columns, of everything, and of rows that others read are kernels like any other.
    assert not any(has_rows(lambda a: a - a.sum(axis=0), x))
    assert not any(has_rows(lambda a: a - a.sum(), x))
    assert not any(has_rows(lambda a: a - a.sum(), row))
    assert not any(has_rows(lambda a: jnp.tanh(a.sum(axis=1)), x))
    # Sums that meet other values, too.
    assert not any(has_rows(lambda a, b: b * a.sum(axis=1)[:, None], x, x))

    def clipped(a: Any, b: Any) -> Any:
        norm = jnp.sqrt((a * a).sum() + (b * b).sum())
        return a / norm, b / norm

    assert not any(has_rows(clipped, x, row))

    def kept(a: Any) -> Any:
        largest = a.max(axis=1)
        return a - largest[:, None], largest

    assert not any(has_rows(kept, x))


def test_effects_alone_move_nothing() -> None:
    def shown(a: Any) -> Any:
        jax.debug.callback(lambda _: None, a.sum())
        return jax.nn.softmax(a)

    assert totals(shown, x)[0] >= totals(jax.nn.softmax, x)[0]


def test_rows_are_priced_by_their_share() -> None:
    cluster = Cluster.preset("h200")
    quick = replace(cluster, device=replace(cluster.device, row_share=1.0))
    assert cluster.device.row_share < 1.0

    def ratio(function: Callable[..., Any]) -> float:
        jaxpr = flatten(jax.make_jaxpr(function)(x)).jaxpr
        rules = populate(jaxpr)

        def seconds(cluster: Cluster) -> float:
            pricing = Pricing(cluster, (1,), traffic=MemoryTraffic(jaxpr))
            return sum(pricing.compute(eqn, rules[eqn]) for eqn in jaxpr.eqns)

        return seconds(quick) / seconds(cluster)

    assert ratio(lambda a: jnp.tanh(a)) == 1.0
    assert 0.7 < ratio(jax.nn.softmax) < 0.8


def test_stacks_are_filled_and_copied() -> None:
    """Products write arrays of their own, and read such; elementwise kernels do it in place."""
    stack = jax.ShapeDtypeStruct((5, N, N), jnp.float32)

    def moved(body: Callable[..., Any]) -> tuple[int, int]:
        def loop(a: Any, weights: Any) -> Any:
            return jax.lax.scan(body, a, weights)

        trip = moving(loop, x, stack)
        return sum(t.bytes for t in trip), sum(t.stack_bytes for t in trip)

    def product(c: Any, w: Any) -> Any:
        return c, c @ c

    def elementwise(c: Any, w: Any) -> Any:
        return c, jnp.tanh(c)

    assert moved(product) == (2 * MATRIX, 3 * MATRIX)  # reads one operand twice
    assert moved(elementwise) == (2 * MATRIX, MATRIX)
    assert moved(lambda c, w: (c @ w, None)) == ((3 + 2) * MATRIX, 0)
    assert moved(lambda c, w: (c + w, None)) == (3 * MATRIX, 0)
    # A slice is copied once, however many products read it, and through barriers.
    assert moved(lambda c, w: ((c @ w) @ w, None)) == ((3 + 3 + 2) * MATRIX, 0)
    passed = moved(lambda c, w: (c @ jax.lax.optimization_barrier(w), None))
    assert passed == ((3 + 2) * MATRIX, 0)
    # What is stacked twice is filled twice.
    assert moved(lambda c, w: (c, 2 * (jnp.tanh(c),))) == (2 * MATRIX, 2 * MATRIX)


def test_what_is_computed_again_is_not_stacked() -> None:
    def loop(a: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c, jnp.tanh(c)), a, length=5)

    jaxpr = flatten(jax.make_jaxpr(loop)(x)).jaxpr
    (tanh,) = (eqn for eqn in walk(jaxpr) if eqn.primitive.name == "tanh")
    pricing = Pricing(Cluster.preset("h100"), (1,), traffic=MemoryTraffic(jaxpr))
    rule = populate(jaxpr)[tanh]
    again = pricing.compute(tanh, rule, stacking=False)
    assert pricing.compute(tanh, rule) == pytest.approx(1.5 * again)


def test_tpus_add_no_narrow_numbers_one_by_one() -> None:
    def add(a: Any, b: Any, i: Any) -> Any:
        return a.at[i].add(b, mode="promise_in_bounds")

    whole, part = (jax.ShapeDtypeStruct((n, N), jnp.bfloat16) for n in (N, 64))
    jaxpr = flatten(jax.make_jaxpr(add)(whole, part, jax.ShapeDtypeStruct((64,), "int32"))).jaxpr
    (scatter,) = (eqn for eqn in walk(jaxpr) if eqn.primitive.name == "scatter-add")

    def moved(device: str) -> float:
        cluster = Cluster.preset(device)
        pricing = Pricing(cluster, (1,), traffic=MemoryTraffic(jaxpr))
        seconds = pricing.compute(scatter, populate(jaxpr)[scatter])
        return seconds * cluster.device.memory_bandwidth / part.size

    assert moved("tpu-v5e") == pytest.approx(6, rel=0.01)
    assert moved("h100") == pytest.approx(32, rel=0.01)


def test_several_results_of_one_operation_are_no_rows() -> None:
    def placed(a: Any) -> Any:
        largest, twice = jax.device_put((a.max(-1), a * 2.0))
        return twice - largest[:, None]

    assert 2 * MATRIX <= totals(placed, x)[0] <= 4 * MATRIX


def test_tpus_fill_no_stacks() -> None:
    def loop(a: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c, jnp.tanh(c)), a, length=5)

    jaxpr = flatten(jax.make_jaxpr(loop)(x)).jaxpr
    (tanh,) = (eqn for eqn in walk(jaxpr) if eqn.primitive.name == "tanh")
    traffic = MemoryTraffic(jaxpr)

    def moved(device: str) -> float:
        cluster = Cluster.preset(device)
        seconds = Pricing(cluster, (1,), traffic=traffic).compute(tanh, populate(jaxpr)[tanh])
        return seconds * cluster.device.memory_bandwidth

    assert moved("tpu-v5e") == pytest.approx(2 * MATRIX)
    assert moved("h100") == pytest.approx(3 * MATRIX)


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
