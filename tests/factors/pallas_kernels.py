"""Pallas kernels of the kinds that models bring, interpreted on the CPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

kernel_call = functools.partial(pl.pallas_call, interpret=True)


def like(x: jax.Array) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def rows(x: jax.Array, scale: jax.Array, block: int = 2) -> jax.Array:
    """Each row by its norm, times a scale."""

    def kernel(x_ref: Any, scale_ref: Any, out_ref: Any) -> None:
        x = x_ref[...]
        out_ref[...] = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * scale_ref[...]

    spec = pl.BlockSpec((None, block, x.shape[2]), lambda i, j: (i, j, 0))
    return kernel_call(
        kernel,
        out_shape=like(x),
        grid=(x.shape[0], x.shape[1] // block),
        in_specs=[spec, pl.BlockSpec((1, x.shape[2]), lambda i, j: (0, 0))],
        out_specs=spec,
    )(x, scale[None])


def merged_rows(x: jax.Array) -> jax.Array:
    """Batch and heads in one dimension of the array, and two axes of the grid."""
    heads = 2

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.sin(x_ref[...])

    spec = pl.BlockSpec((1, x.shape[1]), lambda i, j: (i * heads + j, 0))
    return kernel_call(
        kernel,
        out_shape=like(x),
        grid=(x.shape[0] // heads, heads),
        in_specs=[spec],
        out_specs=spec,
    )(x)


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """A blocked product, which adds up in scratch memory along the innermost axis."""

    def kernel(x_ref: Any, y_ref: Any, out_ref: Any, sum_ref: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] += x_ref[...] @ y_ref[...]

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _() -> None:
            out_ref[...] = sum_ref[...]

    (m, k), n = x.shape, y.shape[1]
    return kernel_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(m // 2, n // 2, k // 2),
        in_specs=[
            pl.BlockSpec((2, 2), lambda i, j, k: (i, k)),
            pl.BlockSpec((2, 2), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((2, 2), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((2, 2), x.dtype)],
    )(x, y)


def elementwise(
    index_map: Callable[..., Any],
    out_map: Callable[..., Any] | None = None,
    body: Callable[[Any], Any] = jnp.sin,
    scratch: bool = False,
    grid: tuple[int, ...] = (4,),
) -> Callable[[jax.Array], jax.Array]:
    """A kernel on single rows of an array [4, 4]."""

    def kernel(x_ref: Any, out_ref: Any, *_: Any) -> None:
        out_ref[...] = body(x_ref[...])

    def call(x: jax.Array) -> jax.Array:
        return kernel_call(
            kernel,
            out_shape=like(x),
            grid=grid,
            in_specs=[pl.BlockSpec((1, 4), index_map)],
            out_specs=pl.BlockSpec((1, 4), out_map or index_map),
            scratch_shapes=[pltpu.VMEM((1, 4), x.dtype)] if scratch else [],
        )(x)

    return call


def running_sum(begins: Any, value: Any, out_ref: Any, sum_ref: Any) -> None:
    """The body of a kernel that adds values in its scratch memory, until a sum begins anew."""

    @pl.when(begins)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    sum_ref[...] += value
    out_ref[...] = sum_ref[...]


def carried(x: jax.Array) -> jax.Array:
    """Scratch memory that is filled in the first round and read in the second."""

    def kernel(x_ref: Any, out_ref: Any, sum_ref: Any) -> None:
        running_sum(pl.program_id(0) == 0, x_ref[...], out_ref, sum_ref)

    spec = pl.BlockSpec((None, 1, 4), lambda i, j: (i, j, 0))
    return kernel_call(
        kernel,
        out_shape=like(x),
        grid=(2, 4),
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes=[pltpu.VMEM((1, 4), x.dtype)],
    )(x)


def restarted(x: jax.Array) -> jax.Array:
    """Sums over rows that begin anew where an operand says so."""

    def kernel(x_ref: Any, begins_ref: Any, out_ref: Any, sum_ref: Any) -> None:
        running_sum(begins_ref[0, 0] > 0, x_ref[...], out_ref, sum_ref)

    spec = pl.BlockSpec((1, 4), lambda i: (i, 0))
    return kernel_call(
        kernel,
        out_shape=like(x),
        grid=(4,),
        in_specs=[spec, pl.BlockSpec((1, 1), lambda i: (i, 0))],
        out_specs=spec,
        scratch_shapes=[pltpu.VMEM((1, 4), x.dtype)],
    )(x, jnp.asarray([[1], [0], [0], [1]]))


def overwriting(x: jax.Array) -> jax.Array:
    """Sums over rows that are kept in an operand."""

    def kernel(x_ref: Any, sum_ref: Any, out_ref: Any) -> None:
        sum_ref[...] += x_ref[...]
        out_ref[...] = sum_ref[...]

    spec = pl.BlockSpec((1, 4), lambda i: (i, 0))
    return kernel_call(
        kernel,
        out_shape=like(x),
        grid=(4,),
        in_specs=[spec, pl.BlockSpec((1, 4), lambda i: (0, 0))],
        out_specs=spec,
    )(x, jnp.zeros((1, 4), x.dtype))


def in_place(blocked: bool) -> Callable[[jax.Array], jax.Array]:
    """Rows written over their operand, of which every place reads its own block, or all."""

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] += jnp.sin(x_ref[:1])

    spec, whole = pl.BlockSpec((1, 4), lambda i: (i, 0)), pl.BlockSpec((4, 4), lambda i: (0, 0))

    def call(x: jax.Array) -> jax.Array:
        return kernel_call(
            kernel,
            out_shape=like(x),
            grid=(4,),
            in_specs=[spec if blocked else whole],
            out_specs=spec,
            input_output_aliases={0: 0},
        )(x)

    return call


def refilled(x: jax.Array) -> jax.Array:
    """Scratch memory that is filled anew for each sum over the innermost axis."""

    def kernel(x_ref: Any, out_ref: Any, sum_ref: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] += x_ref[...] * (1.0 + pl.program_id(0))
        out_ref[...] = sum_ref[...]

    return kernel_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape[:2], x.dtype),
        grid=(x.shape[0], x.shape[1], x.shape[2]),
        in_specs=[pl.BlockSpec((1, 1, None), lambda i, j, k: (i, j, k))],
        out_specs=pl.BlockSpec((1, 1), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((1, 1), x.dtype)],
    )(x)


# Attention: queries [batch, heads, length, size], fewer heads of keys and values.


def _scores(q: Any, k: Any, first: Any) -> Any:
    scores = q @ k.T / math.sqrt(q.shape[-1])
    after = lax.broadcasted_iota(jnp.int32, scores.shape, 1) > (
        first + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    )
    return jnp.where(after, -1e9, scores)


def _call(kernel: Any, results: Any, blocks: int, q: Any, *others: Any) -> Any:
    batch, heads, length, _ = q.shape
    group = heads // others[0].shape[1]

    def spec(x: Any, blocked: bool = False) -> pl.BlockSpec:
        is_shared = x.shape[1] != heads
        rows = length // blocks if blocked else x.shape[2]
        return pl.BlockSpec(
            (None, None, rows, x.shape[3]),
            lambda b, h, i: (b, h // group if is_shared else h, i if blocked else 0, 0),
        )

    return kernel_call(
        kernel,
        out_shape=results,
        grid=(batch, heads, blocks),
        in_specs=[spec(q, blocks > 1), *map(spec, others)],
        out_specs=[spec(result, blocks > 1) for result in results],
        name=kernel.__name__,
    )(q, *others)


@jax.custom_vjp
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention, its queries in two blocks."""

    def forward(q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any) -> None:
        first = pl.program_id(2) * q_ref.shape[0]
        out_ref[...] = jax.nn.softmax(_scores(q_ref[...], k_ref[...], first)) @ v_ref[...]

    (out,) = _call(forward, [like(q)], 2, q, k, v)
    return out


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    return attention(q, k, v), (q, k, v)


def _backward(saved: Any, gradient: jax.Array) -> Any:
    q, k, v = saved

    def backward(q_ref: Any, k_ref: Any, v_ref: Any, g_ref: Any, *out_refs: Any) -> None:
        def whole(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.softmax(_scores(q, k, 0)) @ v

        _, pullback = jax.vjp(whole, q_ref[...], k_ref[...], v_ref[...])
        for ref, value in zip(out_refs, pullback(g_ref[...]), strict=True):
            ref[...] = value

    dq, dk, dv = _call(backward, [like(q)] * 3, 1, q, k, v, gradient)
    shape = (*k.shape[:2], -1, *k.shape[2:])
    return dq, dk.reshape(shape).sum(2), dv.reshape(shape).sum(2)


attention.defvjp(_forward, _backward)
