"""Counts of floating-point operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.passes.primitives.flops import flops, total_flops
from autopar.passes.primitives.populate import populate

from .equations import conv, f32, ints
from .slices import trace


def count(function: Callable[..., Any], *arguments: Any) -> int:
    """The operations of a function's last equation."""
    jaxpr = trace(function, *arguments)
    eqn = jaxpr.eqns[-1]
    return flops(eqn, populate(jaxpr)[eqn])


def total(function: Callable[..., Any], *arguments: Any) -> int:
    jaxpr = trace(function, *arguments)
    return total_flops(jaxpr, populate(jaxpr))


def test_a_contraction_multiplies_and_adds_in_every_iteration() -> None:
    assert count(jnp.matmul, f32(4, 8), f32(8, 16)) == 2 * 4 * 8 * 16
    batched = count(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), f32(3, 4, 8), f32(3, 8, 2))
    assert batched == 2 * 3 * 4 * 8 * 2


def test_every_row_of_a_grouped_product_meets_one_matrix() -> None:
    sizes = np.array([3, 0, 6, 1], np.int32)
    assert count(lax.ragged_dot, f32(12, 4), f32(4, 4, 8), sizes) == 2 * 12 * 4 * 8


def test_a_convolution_counts_its_taps() -> None:
    x = f32(2, 6, 6, 4)
    assert count(conv, x, f32(3, 3, 4, 8)) == 2 * (2 * 6 * 6 * 8) * (3 * 3 * 4)
    grouped = count(lambda x, k: conv(x, k, feature_group_count=2), x, f32(3, 3, 2, 8))
    assert grouped == 2 * (2 * 6 * 6 * 8) * (3 * 3 * 2)
    own = total(jax.vmap(conv), f32(5, 2, 6, 6, 4), f32(5, 3, 3, 4, 8))
    assert own == 5 * 2 * (2 * 6 * 6 * 8) * (3 * 3 * 4)
    strided = count(lambda x, k: conv(x, k, strides=(2, 2)), x, f32(3, 3, 4, 8))
    assert strided == 2 * (2 * 3 * 3 * 8) * (3 * 3 * 4)


def test_the_gradients_of_filters_take_as_many() -> None:
    """With groups of features (one for each example) or of batches (one for each channel)."""
    x = f32(5, 2, 6, 6, 4)
    for groups in (1, 2, 4):
        kernel = f32(3, 3, 4 // groups, 8)

        def convolve(x: Any, k: Any, groups: int = groups) -> Any:
            return conv(x, k, feature_group_count=groups)

        def gradient(x: Any, k: Any) -> Any:
            (made,) = jax.linear_transpose(lambda k: convolve(x, k), k)(jnp.ones((2, 6, 6, 8)))
            return made

        forward = 5 * total(convolve, x[0], kernel)
        assert total(jax.vmap(gradient, (0, None)), x, kernel) == forward


def test_xla_counts_contractions_alike() -> None:
    for function, arguments in (
        (jnp.matmul, (f32(4, 8), f32(8, 16))),
        (lambda x, k: conv(x, k, padding="VALID"), (f32(2, 6, 6, 4), f32(3, 3, 4, 8))),
    ):
        analysis: Any = jax.jit(function).lower(*arguments).compile().cost_analysis()
        assert total(function, *arguments) == int(analysis["flops"])


def test_elements() -> None:
    x = f32(4, 8)
    assert count(lax.tanh, x) == 32
    assert count(lambda x: jnp.sum(x, 1), x) == 32
    assert count(lambda x: lax.cumsum(x, 1), x) == 32
    assert count(lambda x: x.T, x) == 0
    assert count(lambda x: x.reshape(32), x) == 0
    assert count(lambda x: lax.sort(x), x) == 32 * 3
    pool = ((1, 2), (1, 2), "VALID")
    assert count(lambda x: lax.reduce_window(x, 0.0, lax.add, *pool), x) == 2 * 16
    assert count(lambda x, i: x.at[i].add(1.0, mode="drop"), x, ints(3)) == 3 * 8
    # With its vectors, and an inverse of a triangle applied to as many columns.
    assert count(lambda x: lax.linalg.qr(x, full_matrices=False), f32(2, 6, 6)) == 2 * 8 * 6**3 / 3
    assert count(lax.linalg.lu, f32(6, 6)) == 2 * 6**3 / 3
    assert count(lax.linalg.eigh, f32(6, 6)) == 9 * 6**3
    solve = lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True)  # noqa: E731
    assert count(solve, f32(6, 6), f32(6, 2)) == 6 * 6 * 2


def test_a_scan_counts_its_trips_and_a_cond_its_dearest_branch() -> None:
    def step(carry: Any, _: Any) -> Any:
        return jnp.tanh(carry), None

    x = f32(8)
    assert total(lambda x: lax.scan(step, x, None, length=5)[0], x) == 5 * 8
    chosen = total(
        lambda p, x: lax.cond(p, lambda x: jnp.cumsum(jnp.tanh(x)), lambda x: x, x),
        np.bool_(True),
        f32(2048),
    )
    index = total(lambda p: lax.convert_element_type(p, np.int32), np.bool_(True))
    assert chosen - index == 2 * 2048
    body = total(lambda x: lax.while_loop(lambda c: c[0] < 0, lambda c: jnp.tanh(c), x), x)
    assert body == 8 + 1
