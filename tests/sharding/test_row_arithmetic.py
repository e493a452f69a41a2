"""Functions of row numbers are evaluated by NumPy as XLA computes them."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_array_equal

from autopar.passes.experts.row_arithmetic import evaluated


def computed(function: Any, *operands: np.ndarray) -> Any:
    """A function of one equation, of operands with four rows."""
    (eqn,) = jax.make_jaxpr(function)(*operands).jaxpr.eqns
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return evaluated(eqn, operands, 1, 4)


def test_numbers_that_a_dtype_does_not_have_are_infinite() -> None:
    """As masks in float16 are."""
    mask = np.array([0, -1e9, 1e9, 1], np.float32)
    found = computed(lambda x: x.astype(jnp.float16), mask)
    assert_array_equal(found, np.array([0, -np.inf, np.inf, 1], np.float16))
    assert found.dtype == np.float16


def test_cases_are_selected_by_booleans_and_by_numbers() -> None:
    cases = [np.arange(4, dtype=np.int32) + 10 * case for case in range(3)]
    which = np.array([True, False, True, False])
    assert_array_equal(computed(jax.lax.select_n, which, *cases[:2]), [10, 1, 12, 3])
    numbers = np.array([2, 0, 1, 0], np.int32)
    assert_array_equal(computed(jax.lax.select_n, numbers, *cases), [20, 1, 12, 3])
