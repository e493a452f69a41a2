"""The largest and smallest over devices: NaN, infinities and signs as on one device."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from autopar.runtime.all_reduce import all_reduce

FLOATS = ["float64", "float32", "bfloat16", "float16"]
TINY = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]


def values(dtype: Any) -> Any:
    """One column per kind of numbers, a row for each device."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(8, 12)) * 10.0 ** np.arange(-6, 6)
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(np.abs(numbers) % 200).astype(dtype)
    nan, inf = np.nan, np.inf
    special = np.zeros((8, 6))
    special[3] = nan, -nan, inf, -inf, -0.0, nan
    special[5] = inf, -1, -inf, 1, 0, nan
    special[:, 5] = nan
    if jnp.finfo(dtype).bits < 16:  # what has no infinity would make NaN of it
        numbers, special = (
            np.clip(numbers, -200, 200),
            np.nan_to_num(special, nan=nan, posinf=9, neginf=-9),
        )
    return jnp.asarray(np.concatenate([numbers, -numbers, special], 1)).astype(dtype)


@pytest.mark.parametrize("monoid", ["max", "min"])
@pytest.mark.parametrize("name", [*FLOATS, *TINY, "int32", "uint8", "bool"])
def test_extremes_over_devices(name: str, monoid: str) -> None:
    with jax.enable_x64(True) if name == "float64" else contextlib.nullcontext():
        x = values(jnp.dtype(name))
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        run = jax.shard_map(
            lambda x: all_reduce(x[0], ("x",), monoid), mesh=mesh, in_specs=P("x"), out_specs=P()
        )
        got, wide = jax.jit(run)(x), x.astype("float64" if name == "float64" else "float32")
        expected = (jnp.max if monoid == "max" else jnp.min)(wide, axis=0)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(got).astype("float64"), expected)


@pytest.mark.parametrize("monoid", ["and", "or"])
@pytest.mark.parametrize("name", ["int32", "uint8", "bool"])
def test_bits_over_devices(name: str, monoid: str) -> None:
    """Of numbers, bit by bit: neither of two numbers need be the result."""
    x = np.random.default_rng(1).integers(0, 200, (8, 5)).astype(name)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    got = jax.jit(
        jax.shard_map(
            lambda x: all_reduce(x[0], ("x", "y"), monoid),
            mesh=mesh,
            in_specs=P(("x", "y")),
            out_specs=P(),
            check_vma=False,
        )
    )(x)
    expected = (np.bitwise_and if monoid == "and" else np.bitwise_or).reduce(x, axis=0)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, expected)
