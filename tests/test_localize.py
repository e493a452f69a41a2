"""Slices computed by `bind_local` make up the whole, for every primitive and every factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factors import equations
from factors.slices import (
    Way,
    check_slices,
    check_whole,
    evaluate,
    host_take,
    rule_cuts,
    trace,
    ways_to_cut,
    ways_with_one_pair,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from autopar.passes.graph.primitives import CONTROL_FLOW
from autopar.passes.primitives.cuts import DimCut, NotLocalError, local_shape, positions, take
from autopar.passes.primitives.factor_rule import FactorRule
from autopar.passes.primitives.local_random import counters
from autopar.passes.primitives.localize import bind_local
from autopar.passes.primitives.populate import populate

EQUATIONS = equations.all_equations()


@pytest.mark.parametrize("name", EQUATIONS)
def test_slices_make_up_the_whole(name: str) -> None:
    check_equations(name, ways_with_one_pair)


@pytest.mark.full
@pytest.mark.parametrize("name", EQUATIONS)
def test_slices_along_any_two_factors_make_up_the_whole(name: str) -> None:
    check_equations(name, ways_to_cut)


def check_equations(name: str, ways_of: Callable[[FactorRule], list[Way]]) -> None:
    function, arguments = EQUATIONS[name]
    jaxpr = trace(function, *arguments)
    assert not any(eqn.primitive.name in CONTROL_FLOW for eqn in jaxpr.eqns)
    rules = populate(jaxpr)
    leaves = jax.tree.leaves(arguments)
    evaluated = evaluate(jaxpr, leaves)
    for eqn, _, _ in evaluated:
        check_whole(eqn, rules[eqn])
    check_slices(evaluated, rules, ways_of)


def equation(function: Callable[..., Any], *arguments: Any) -> JaxprEqn:
    """The last equation of a function."""
    return trace(function, *arguments).eqns[-1]


def test_a_merged_dimension_can_be_cut_on_any_of_its_loops() -> None:
    x = jnp.arange(4 * 6 * 3.0).reshape(4, 6, 3)
    eqn = equation(lambda x: x.reshape(24, 3), x)
    for dim, major in ((0, 1), (1, 4)):
        for index in range(2):
            cuts = tuple(DimCut(2, index) if d == dim else None for d in range(3))
            result_cuts = (DimCut(2, index, major), None)
            (result,) = bind_local(eqn, [take(x, cuts)], [cuts], [result_cuts])
            expected = np.split(np.asarray(x), 2, axis=dim)[index].reshape(-1, 3)
            np.testing.assert_array_equal(result, expected)


def test_strided_microbatches_of_a_batch_are_rows_of_one_remainder() -> None:
    x = jnp.arange(12)
    np.testing.assert_array_equal(take(x, (DimCut(3, 1, major=4),)), x[1::3])
    np.testing.assert_array_equal(take(x, (DimCut(3, jnp.int32(1), major=4),)), x[1::3])


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 1)
)
@settings(max_examples=25, deadline=None)
def test_take_and_positions_agree_with_numpy(
    major: int, parts: int, rest: int, index: int, dim: int
) -> None:
    size = major * parts * rest
    cut = DimCut(parts, index % parts, major)
    shape = (2, size) if dim else (size, 2)
    x = np.arange(2 * size).reshape(shape)
    cuts = (None, cut) if dim else (cut, None)
    expected = host_take(x, cuts)
    taken, places = jax.jit(lambda x: (take(x, cuts), positions(size, cut)))(x)
    np.testing.assert_array_equal(taken, expected)
    assert local_shape(shape, cuts) == expected.shape
    np.testing.assert_array_equal(
        places, host_take(np.arange(size, dtype=np.int32), (cut,)), strict=True
    )


def test_two_factors_of_one_dimension_are_refused() -> None:
    x = jnp.ones((4, 6))
    eqn = equation(lambda x: x.reshape(24), x)
    (rule,) = populate(trace(lambda x: x.reshape(24), x)).values()
    assert eqn.primitive.name == "reshape"
    with pytest.raises(NotLocalError, match="cut together"):
        rule_cuts(rule, {0: DimCut(2, 0), 1: DimCut(2, 0)})


@pytest.mark.parametrize(
    ("function", "operand_cuts", "result_cuts"),
    [
        (lambda x: lax.cumsum(x, axis=0), (DimCut(2, 0), None), (DimCut(2, 0), None)),
        (lambda x: lax.rev(x, (0,)), (DimCut(2, 0), None), (DimCut(2, 0), None)),
        (lambda x: jnp.argmax(x, 0), (DimCut(2, 0), None), (None,)),
        (lambda x: lax.sort(x, dimension=0), (DimCut(2, 0), None), (DimCut(2, 0), None)),
        (lambda x: x[1:], (DimCut(2, 0), None), (DimCut(2, 0), None)),
        (lambda x: x[::2], (DimCut(2, 0), None), (DimCut(2, 0), None)),
        (lambda x: x.reshape(4, 8), (DimCut(2, 0), None), (None, DimCut(2, 0))),
        (lambda x: x.T, (DimCut(2, 0), None), (DimCut(2, 0), None)),
        (lambda x: x[:4], (DimCut(2, 0), None), (None, None)),
        (lambda x: lax.concatenate([x, x[:4]], 0), (DimCut(2, 0), None), (DimCut(2, 0, 3), None)),
        (lambda x: x + 1, (DimCut(3, 0), None), (DimCut(3, 0), None)),
    ],
)
def test_what_slices_do_not_determine_is_refused(
    function: Callable[..., Any], operand_cuts: Any, result_cuts: Any
) -> None:
    x = jnp.arange(32.0).reshape(8, 4)
    eqn = equation(function, x)
    operands, cuts = [], []
    for var in eqn.invars:
        full = isinstance(var, Literal) or var.aval.shape != x.shape
        cuts.append((None,) * var.aval.ndim if full else operand_cuts)
        value = var.val if isinstance(var, Literal) else jnp.ones(var.aval.shape, var.aval.dtype)
        if operand_cuts[0].parts != 3:
            value = take(value, cuts[-1])
        operands.append(value)
    with pytest.raises(NotLocalError):
        bind_local(eqn, operands, cuts, [result_cuts] * len(eqn.outvars))


def bits(key: Any, shape: tuple[int, ...], width: int) -> JaxprEqn:
    return equation(lambda k: jax.random.bits(k, shape, f"uint{width}"), key)


@pytest.mark.parametrize("width", [8, 16, 32, 64])
@pytest.mark.parametrize("partitionable", [True, False])
def test_random_bits_are_those_of_the_whole_draw(width: int, partitionable: bool) -> None:
    with jax.enable_x64(width == 64), jax.threefry_partitionable(partitionable):
        key = jax.random.key(7)
        eqn = bits(key, (4, 6, 2), width)
        expected = np.asarray(jax.random.bits(key, (4, 6, 2), f"uint{width}"))
        local = jax.jit(
            lambda i: bind_local(eqn, [key], [()], [(DimCut(2, i), DimCut(3, i % 3, 2), None)])
        )
    # The program's own setting counts, not that of the moment.
    with jax.enable_x64(width == 64):
        for index in range(2):
            cuts = (DimCut(2, index), DimCut(3, index % 3, 2), None)
            (found,) = local(jnp.int32(index))
            np.testing.assert_array_equal(found, host_take(expected, cuts), strict=True)


def test_threefry_slices_compute_no_more_than_themselves() -> None:
    key = jax.random.key(7)
    eqn = bits(key, (64, 64), 32)
    jaxpr = jax.make_jaxpr(lambda i: bind_local(eqn, [key], [()], [(DimCut(8, i), None)]))(
        jnp.int32(0)
    )
    sizes = [var.aval.size for eqn in jaxpr.eqns for var in eqn.outvars]
    assert max(sizes) <= 64 * 64 // 8


def test_counters_beyond_32_bits_carry() -> None:
    shape, cuts = (3, 2**16, 2**17), (None, DimCut(2**13, 2**13 - 1), DimCut(2**15, 7, 2))
    high, low = jax.jit(lambda: counters(shape, cuts))()
    local = np.array(local_shape(shape, cuts))
    places = [
        host_take(np.arange(size, dtype=np.uint64), (cut,)) if cut else np.arange(size)
        for size, cut in zip(shape, cuts, strict=True)
    ]
    grid = np.meshgrid(*places, indexing="ij")
    expected = np.ravel_multi_index([g.astype(np.int64) for g in grid], shape)
    assert (np.array(expected.shape) == local).all()
    found = np.asarray(high, np.uint64) << np.uint64(32) | np.asarray(low, np.uint64)
    np.testing.assert_array_equal(found, expected.astype(np.uint64))
    assert found.max() > 2**32


def test_bind_local_works_inside_shard_map() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.arange(32.0).reshape(8, 4)
    iota = equation(lambda: lax.broadcasted_iota(np.int32, (8, 4), 0))
    draw = bits(jax.random.key(1), (8, 4), 32)
    total = equation(lambda x: jnp.sum(x, 0), x)

    def local(x: Any) -> Any:
        cut = DimCut(4, jax.lax.axis_index("x"))
        (places,) = bind_local(iota, [], [], [(cut, None)])
        (drawn,) = bind_local(draw, [jax.random.key(1)], [()], [(cut, None)])
        (partial,) = bind_local(total, [x], [(cut, None)], [(None,)])
        return places, drawn, lax.psum(partial, "x")

    specs = jax.sharding.PartitionSpec
    places, drawn, summed = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=specs("x"),
            out_specs=(specs("x"), specs("x"), specs()),
            check_vma=False,
        )
    )(x)
    np.testing.assert_array_equal(places, np.arange(8)[:, None] + np.zeros((1, 4)))
    np.testing.assert_array_equal(drawn, jax.random.bits(jax.random.key(1), (8, 4)))
    np.testing.assert_array_equal(summed, x.sum(0))


def test_an_update_in_another_part_leaves_what_a_slice_has() -> None:
    """XLA reads a slice of a slice at the sum of their starts, and clamps that alone."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jnp.arange(1.0, 21.0).reshape(2, 10)

    def put(x: Any, place: Any) -> Any:
        numbers = lax.ScatterDimensionNumbers((0, 1), (), (1,))
        return lax.scatter(x, place[None], x[:, :1] + 1, numbers, unique_indices=True, mode="clip")

    scatter = equation(put, whole, jnp.array(0))

    def local(x: Any, first: Any) -> Any:
        cut = DimCut(2, jax.lax.axis_index("x"))

        def body(carry: Any) -> Any:
            x, place = carry
            part = lax.dynamic_slice_in_dim(x, cut.index * 5, 5, 1)
            (part,) = bind_local(
                scatter,
                [part, place[None], x[:, :1] + 1],
                [(None, cut), (None,), (None, None)],
                [(None, cut)],
            )
            return lax.all_gather(part, "x", axis=1, tiled=True), place + 2

        return lax.while_loop(lambda carry: carry[1] < 9, body, (x, first))[0]

    specs = jax.sharding.PartitionSpec()
    shared = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    expected = whole
    for place in range(0, 9, 2):
        expected = put(expected, jnp.array(place))
    np.testing.assert_array_equal(jax.jit(shared)(whole, jnp.array(0)), expected)
