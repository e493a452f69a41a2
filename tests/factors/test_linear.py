"""What `linear_operands` says holds numerically: f(x + y) = f(x) + f(y) in each set."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.passes.primitives.linearity import linear_operands
from autopar.passes.primitives.populate import populate

from . import equations
from .slices import host, is_key, random_value, trace, whole_results

EQUATIONS = equations.shapes() | equations.contractions() | equations.reductions()
EQUATIONS |= equations.indexing() | {
    name: case
    for name, case in equations.elementwise().items()
    if not name.startswith(("unary", "int"))
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_linear_in_each_set(name: str) -> None:
    function, arguments = EQUATIONS[name]
    rng = np.random.default_rng(1)
    for eqn in trace(function, *arguments).eqns:
        operands = [random_value(var.aval, rng) for var in eqn.invars]
        for positions in linear_operands(eqn):
            others = [random_value(var.aval, rng) for var in eqn.invars]
            ones, twos, sums = list(operands), list(operands), list(operands)
            for i in positions:
                twos[i] = others[i]
                sums[i] = _add(ones[i], others[i])
            one, two, total = (whole_results(eqn, values) for values in (ones, twos, sums))
            for a, b, c in zip(one, two, total, strict=True):
                if not is_key(c):
                    narrow = any(v.aval.dtype == jnp.bfloat16 for v in (*eqn.invars, *eqn.outvars))
                    _check(_add(a, b), c, 6e-2 if narrow else 1e-4, str(eqn))


def _add(a: Any, b: Any) -> Any:
    if is_key(a) or a.dtype == bool:
        return a  # what is not a number is not summed, and stays as it is
    return a + b


def _check(actual: Any, expected: Any, tolerance: float, message: str) -> None:
    actual, expected = host(actual), host(expected)
    if jnp.issubdtype(expected.dtype, jnp.bool_):
        return
    if jnp.issubdtype(expected.dtype, jnp.integer):
        np.testing.assert_array_equal(actual, expected, err_msg=message)
        return
    if expected.dtype == jnp.bfloat16:
        actual, expected = actual.astype(np.float32), expected.astype(np.float32)
    scale = float(np.max(np.abs(expected[np.isfinite(expected)]), initial=1.0))
    np.testing.assert_allclose(
        actual, expected, rtol=tolerance, atol=tolerance * scale, err_msg=message
    )


def sets(function: Any, *arguments: Any) -> list[set[int]]:
    eqn = trace(function, *arguments).eqns[-1]
    return [set(positions) for positions in linear_operands(eqn)]


def test_sets_of_common_equations() -> None:
    x, i = jnp.ones((4, 8)), jnp.zeros((4, 1), np.int32)
    assert sets(lax.add, x, x) == [{0, 1}]
    assert sets(lax.sub, x, x) == [{0, 1}]
    assert sets(lax.mul, x, x) == [{0}, {1}]
    assert sets(lax.div, x, x) == [{0}]
    assert sets(lambda a, b: lax.dot(a, b), x, x.T) == [{0}, {1}]
    assert sets(lax.select_n, x > 0, x, x) == [{1, 2}]
    assert sets(lambda a: lax.reduce_sum(a, (0,)), x) == [{0}]
    assert sets(lambda a, b: lax.concatenate([a, b], 0), x, x) == [{0, 1}]
    assert sets(lambda a, b: lax.pad(a, b, ((1, 0, 0), (0, 0, 0))), x, jnp.float32(0)) == [{0, 1}]
    assert sets(lambda a, u: lax.dynamic_update_slice(a, u, (0, 0)), x, x) == [{0, 1}]
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    assert sets(lambda a, u: lax.scatter_add(a, i, u, numbers), x, x) == [{0, 2}]
    assert sets(lambda a, u: lax.scatter(a, i, u, numbers), x, x) == []


def test_only_widening_casts_are_linear() -> None:
    single, half = jnp.ones(4, np.float32), jnp.ones(4, jnp.bfloat16)
    assert sets(lambda x: lax.convert_element_type(x, np.float32), half) == [{0}]
    assert sets(lambda x: lax.convert_element_type(x, jnp.bfloat16), single) == []
    assert sets(lambda x: lax.convert_element_type(x, np.float16), half) == []
    assert sets(lambda x: lax.convert_element_type(x, np.int32), single) == []
    assert sets(lambda x: lax.convert_element_type(x, np.float32), jnp.ones(4, int)) == []


def test_casts_that_round_are_linear_up_to_rounding() -> None:
    def rounding(old: Any, new: Any) -> bool:
        convert = lambda x: lax.convert_element_type(x, new)  # noqa: E731
        (eqn,) = trace(convert, jax.ShapeDtypeStruct((4,), old)).eqns
        return linear_operands(eqn, rounding=True) == (frozenset({0}),)

    assert rounding(np.float32, jnp.bfloat16)
    assert rounding(np.float32, np.float16)
    assert rounding(np.float16, jnp.bfloat16)
    assert not rounding(np.float32, np.int32)
    assert not rounding(np.int32, np.float32)  # sums of integers wrap
    assert not rounding(np.int32, jnp.bfloat16)


def test_a_gather_that_fills_with_a_number_is_not_linear() -> None:
    x, i = jnp.ones(4), jnp.array([9])
    assert sets(lambda x: x.at[i].get(mode="fill"), x) == [{0}]  # with NaN
    assert sets(lambda x: x.at[i].get(mode="fill", fill_value=0), x) == [{0}]
    assert sets(lambda x: x.at[i].get(mode="fill", fill_value=1), x) == []
    assert sets(lambda x: x.at[i].get(mode="fill"), x.astype(int)) == []
    assert sets(lambda x: x.at[i].get(mode="clip"), x.astype(int)) == [{0}]


def test_nonlinear_equations_have_no_set() -> None:
    x = jnp.ones((4, 8))
    for function in (lax.exp, lax.tanh, lax.abs, lax.sign, lax.floor, lax.rsqrt):
        assert sets(function, x) == []
    assert sets(lax.max, x, x) == []
    assert sets(lambda a: lax.reduce_max(a, (0,)), x) == []
    assert sets(lax.div, jnp.ones(4, int), jnp.ones(4, int)) == []
    assert sets(lambda a: lax.sort(a), x) == []


def test_booleans_are_no_sums() -> None:
    assert sets(lambda x: x.reshape(2, 8), jnp.ones((4, 4), bool)) == []
    assert sets(lambda x: x.reshape(2, 8), jnp.ones((4, 4), np.float32)) == [{0}]


def test_sums_are_not_kept_in_floats_of_eight_bits() -> None:
    tiny, single = jnp.ones((4, 4), jnp.float8_e4m3fn), jnp.ones((4, 4), np.float32)
    assert sets(lambda x: lax.convert_element_type(x, np.float32), tiny) == []
    assert sets(lambda x: lax.convert_element_type(x, jnp.float8_e5m2), single) == []
    assert sets(lambda x, y: x + y, tiny, tiny) == []
    product = lambda x, y: lax.dot(x, y, preferred_element_type=np.float32)  # noqa: E731
    assert sets(product, tiny, tiny) == []
    assert str(populate(trace(product, tiny, tiny))) == "dot_general: " + CONTRACTED
    whole = trace(lambda x, y: lax.dot(x, y), tiny, tiny)
    assert str(populate(whole)) == "dot_general: " + CONTRACTED.replace("reduction", "replicated")


CONTRACTED = "([i,k],[k,j])->([i,j]) reduction={k}"
