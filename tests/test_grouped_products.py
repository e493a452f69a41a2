"""Grouped products in tiles of rows are those of `jax.lax.ragged_dot_general`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import JaxprEqn
from plain_jit import equals_plain_jit

from autopar.passes.primitives.group_kernels import KernelTiles, suits_kernel
from autopar.passes.primitives.group_tiles import product_by_parts, product_in_tiles
from autopar.passes.primitives.group_tiling import (
    LOOPS,
    GroupedMeans,
    has_parts,
    tile_rows,
    tiling_of,
)
from autopar.passes.sharding.compiler_rules import rules_of

SIZES = np.array(
    [
        [10, 10, 10, 20],
        [0, 0, 50, 0],
        [50, 0, 0, 0],
        [0, 0, 0, 50],
        [1, 2, 3, 4],  # rows that are in no group
        [0, 0, 0, 0],
        [13, 0, 37, 0],
        [30, 30, 30, 30],  # more rows than there are
        [7, 8, 9, 26],
    ],
    np.int32,
)
OF_PARTS = SIZES.reshape(3, 3, 4)
OF_MANY_PARTS = np.stack([OF_PARTS, OF_PARTS[:, ::-1]], 2)
TILES = (1, 3, 8, 50, 120, None)


def array(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), dtype)


def numbers(
    contracted: Any, rows: int, groups: Sequence[int], batch: Any = ((), ())
) -> lax.RaggedDotDimensionNumbers:
    return lax.RaggedDotDimensionNumbers((contracted, batch), [rows], groups)


ROWS = numbers(((1,), (1,)), 0, [0])
SUMS = numbers(((0,), (0,)), 0, [])
HALF = jnp.bfloat16
CASES: dict[str, tuple[Any, jax.Array, jax.Array, np.ndarray, dict[str, Any]]] = {
    "rows": (ROWS, array(50, 6), array(4, 6, 5), SIZES, {}),
    "back to rows": (numbers(((1,), (2,)), 0, [0]), array(50, 5), array(4, 6, 5), SIZES, {}),
    "sums": (SUMS, array(50, 6), array(50, 5), SIZES, {}),
    "groups last": (numbers(((0,), (1,)), 1, [2]), array(6, 50), array(5, 6, 4), SIZES, {}),
    "a batch": (
        numbers(((2,), (2,)), 1, [0], ((0,), (1,))),
        *(array(3, 50, 6), array(4, 3, 6, 5), SIZES, {}),
    ),
    "sums of a batch": (
        numbers(((1,), (1,)), 1, [], ((0,), (0,))),
        *(array(3, 50, 6), array(3, 50, 5), SIZES, {}),
    ),
    "short sums": (SUMS, array(50, 6, dtype=HALF), array(50, 5, dtype=HALF), SIZES, {}),
    "wide results": (
        *(ROWS, array(50, 6, dtype=HALF), array(4, 6, 5, dtype=HALF), SIZES),
        {"preferred_element_type": np.float32},
    ),
    "parts": (numbers(((2,), (1,)), 1, [0]), array(3, 50, 6), array(4, 6, 5), OF_PARTS, {}),
    "sums of parts": (
        numbers(((0, 1), (0, 1)), 1, []),
        *(array(3, 50, 6), array(3, 50, 5), OF_PARTS, {}),
    ),
    "many parts": (
        numbers(((3,), (1,)), 2, [0]),
        *(array(3, 2, 50, 6), array(4, 6, 5), OF_MANY_PARTS, {}),
    ),
    "parts around": (
        numbers(((1,), (1,)), 2, [0]),
        *(array(3, 6, 50, 2), array(4, 6, 5), OF_PARTS, {}),
    ),
    "sums of parts and more": (
        numbers(((0, 2, 1), (2, 0, 3)), 2, []),
        *(array(3, 2, 50, 6), array(50, 5, 3, 2), OF_PARTS, {}),
    ),
}


def product_of(
    case: str, dtype: Any = None
) -> tuple[Callable[..., Any], JaxprEqn, jax.Array, jax.Array, np.ndarray]:
    dimensions, left, right, sizes, params = CASES[case]
    if dtype is not None:
        left, right = left.astype(dtype), right.astype(dtype)

    def product(left: Any, right: Any, sizes: Any) -> Any:
        return lax.ragged_dot_general(left, right, sizes, dimensions, **params)

    (eqn,) = jax.make_jaxpr(product)(left, right, sizes[0]).jaxpr.eqns
    return product, eqn, left, right, sizes


@pytest.mark.parametrize("case", CASES)
def test_tiles_make_up_the_product(case: str) -> None:
    product, eqn, left, right, all_sizes = product_of(case)
    assert tiling_of(eqn, LOOPS) is not None
    error = 2e-2 if left.dtype == HALF else 1e-5
    for tile in TILES:
        in_tiles = jax.jit(lambda *xs, tile=tile: product_in_tiles(eqn, xs, tile=tile))
        for sizes in all_sizes:
            made, wanted = in_tiles(left, right, sizes), product(left, right, sizes)
            assert made.dtype == wanted.dtype
            np.testing.assert_allclose(made, wanted, rtol=error, atol=error)


SMALL_TILES = GroupedMeans(tiles=KernelTiles(16, 16, 16, 4, 3, 2, 0.5), interpret=True)
UNUSUAL = {"groups last", "a batch", "sums of a batch", "parts around", "sums of parts and more"}


@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_make_up_the_product(case: str, wide: bool) -> None:
    """Run as programs for CPUs, with products in which tiles, groups and sizes do not meet."""
    with jax.enable_x64(wide):
        kernels_make_up(case)


def kernels_make_up(case: str) -> None:
    product, eqn, left, right, all_sizes = product_of(case, jnp.bfloat16)
    assert suits_kernel(eqn) == (case not in UNUSUAL)
    if case in UNUSUAL:
        return
    by_kernel = jax.jit(lambda *xs: product_in_tiles(eqn, xs, SMALL_TILES))
    for sizes in all_sizes:
        made, wanted = by_kernel(left, right, sizes), product(left, right, sizes)
        assert made.dtype == wanted.dtype
        made, wanted = (np.asarray(x, np.float32) for x in (made, wanted))
        np.testing.assert_allclose(made, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_kernels_take_matrices_as_they_lie(order: tuple[int, int, int]) -> None:
    for case in ("rows", "back to rows", "sums", "parts", "sums of parts", "many parts"):
        product, eqn, left, right, all_sizes = product_of(case, jnp.bfloat16)
        operands = (left, right, all_sizes[0])
        made = product_in_tiles(eqn, operands, SMALL_TILES, order)
        made, wanted = (np.asarray(x, np.float32) for x in (made, product(*operands)))
        np.testing.assert_allclose(made, wanted, rtol=2e-2, atol=2e-2)


def test_kernels_read_no_row_of_other_groups() -> None:
    for case, part in (("sums", False), ("rows", True), ("parts", False), ("sums of parts", False)):
        product, eqn, left, right, all_sizes = product_of(case, jnp.bfloat16)
        sizes = np.zeros_like(all_sizes[0])
        sizes[..., :2] = 5, 6
        spoilt = left.at[..., 18:, :].set(jnp.nan)
        if part:
            right, sizes = right[:2], sizes[:2]
        made = product_in_tiles(eqn, (spoilt, right, sizes), SMALL_TILES)
        wanted = product(left, right, sizes)
        np.testing.assert_allclose(
            np.asarray(made, np.float32), np.asarray(wanted, np.float32), rtol=2e-2, atol=2e-2
        )


def test_which_products_have_kernels() -> None:
    """Of short floats, on NVIDIA's GPUs with tensor cores that Triton knows."""
    _, eqn, *_ = product_of("rows", jnp.bfloat16)
    _, wide, *_ = product_of("rows")
    kinds = {"H100 SXM5 80GB": True, "NVIDIA A100": True, "V100": False, "MI300X": False}
    for kind, is_known in {**kinds, "cpu": False, "a GPU": False}.items():
        means = rules_of(kind).grouped
        assert (means.tiles is not None) == is_known, kind
        tiling, of_wide = tiling_of(eqn, means), tiling_of(wide, means)
        loop, loop_of_wide = tiling_of(eqn, LOOPS), tiling_of(wide, LOOPS)
        assert (tiling != loop) == is_known and of_wide == loop_of_wide, kind
    assert rules_of("TPU v5e").grouped.has_kernel


@pytest.mark.parametrize("case", ["parts", "many parts", "parts around"])
def test_a_kernel_computes_part_by_part(case: str) -> None:
    product, eqn, left, right, all_sizes = product_of(case)
    assert has_parts(eqn) and tiling_of(eqn, GroupedMeans(has_kernel=True)) is None
    by_parts = jax.jit(lambda *xs: product_by_parts(eqn, xs))
    for sizes in all_sizes:
        np.testing.assert_allclose(
            by_parts(left, right, sizes), product(left, right, sizes), rtol=1e-5, atol=1e-5
        )


def test_rows_of_other_groups_cost_nothing_and_spoil_nothing() -> None:
    """What is in no group may be anything; rows of groups that are elsewhere are not visited."""
    _, eqn, left, right, _ = product_of("sums")
    some = jnp.asarray([5, 6, 0, 7], jnp.int32)
    left, right = left.at[18:].set(jnp.nan), right.at[18:].set(jnp.inf)
    made = product_in_tiles(eqn, (left, right, some), tile=8)
    assert np.isfinite(made).all()
    _, eqn, left, right, _ = product_of("rows")
    made = product_in_tiles(eqn, (left.at[18:].set(jnp.nan), right[:2], some[:2]), tile=8)
    np.testing.assert_allclose(made[:5], left[:5] @ right[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(made[11:], 0)


def test_at_most_twice_the_operations() -> None:
    for rows, groups in [(16384, 8), (49152, 64), (131072, 8), (65536, 128)]:
        left, right = (jax.ShapeDtypeStruct(s, HALF) for s in ((rows, 64), (groups, 64, 32)))
        sizes = jax.ShapeDtypeStruct((groups,), np.int32)
        (eqn,) = jax.make_jaxpr(lax.ragged_dot)(left, right, sizes).eqns
        tiling = tiling_of(eqn, LOOPS)
        assert tiling is not None
        assert tiling.rows == tile_rows(rows, groups, sums_rows=False)
        assert 1 < tiling.repeats <= 2 and tiling.held_bytes < left.size * 2


@pytest.mark.parametrize(
    "options",
    [
        {"method": "data"},
        {"logical_mesh": (2, 4), "pins": {"*in": (None, None, "y")}},
        {"microbatches": 2, "stages": 2},
    ],
    ids=str,
)
def test_parts_with_groups_of_their_own_are_cut(options: dict[str, Any]) -> None:
    dimensions = CASES["parts"][0]
    router = array(6, 4)

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            choice = jnp.argmax(x @ router, axis=-1)
            order = jnp.argsort(choice, axis=-1)
            sizes = jnp.sum(choice[..., None] == jnp.arange(4), axis=1, dtype=jnp.int32)
            rows = jnp.take_along_axis(x, order[..., None], axis=1)
            made = lax.ragged_dot_general(rows, weights["in"], sizes, dimensions)
            again = lax.ragged_dot_general(jnp.tanh(made), weights["out"], sizes, dimensions)
            return jnp.mean(again**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    weights = {"in": array(4, 6, 8), "out": array(4, 8, 6)}
    compiled = equals_plain_jit(step, weights, array(8, 50, 6), **options)
    if options.get("method") == "data":  # gradients alone
        (stage,) = compiled.plan.stages
        assert {c.kind for c in stage.collectives} == {"all-reduce"}, compiled.plan
