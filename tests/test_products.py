"""Products of arrays as products of matrices: the same sums, and nothing is transposed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from autopar.passes.primitives.products import as_matrices, multiply


@st.composite
def products(draw: Any) -> tuple[Any, Any, Any]:
    """Shapes and dimension numbers, mostly such that dimensions are side by side."""
    size = st.sampled_from([0, 1, 2, 3, 5]) if draw(st.integers(0, 9)) == 0 else st.integers(1, 4)
    groups = {name: draw(st.lists(size, max_size=2)) for name in "bclr"}

    def side(free: str) -> Any:
        labels = [(name, i) for name in "bc" for i in range(len(groups[name]))]
        own = [(free, i) for i in range(len(groups[free]))]
        if draw(st.integers(0, 3)) == 0:
            order = draw(st.permutations([*labels, *own]))
        else:
            batch = [x for x in labels if x[0] == "b"]
            contracted = [x for x in labels if x[0] == "c"]
            order = [*batch, *draw(st.sampled_from([[*own, *contracted], [*contracted, *own]]))]
        shape = [groups[name][i] for name, i in order]
        places = {label: place for place, label in enumerate(order)}
        dims = [[places[x] for x in labels if x[0] == name] for name in "cb"]
        return shape, *dims

    (left, left_c, left_b), (right, right_c, right_b) = side("l"), side("r")
    return tuple(left), tuple(right), ((left_c, right_c), (left_b, right_b))


@given(products(), st.sampled_from(["float32", "bfloat16", "int8", "complex64"]))
@settings(max_examples=60, deadline=None)
def test_equals_the_product_of_arrays(product: tuple[Any, Any, Any], dtype: str) -> None:
    left_shape, right_shape, numbers = product
    rng = np.random.default_rng(0)
    left, right = (
        rng.integers(-3, 4, shape).astype(jnp.dtype(dtype)) for shape in (left_shape, right_shape)
    )
    wide = jnp.int32 if dtype == "int8" else None
    params = {
        "dimension_numbers": numbers,
        "precision": None,
        "preferred_element_type": wide,
        "out_sharding": None,
    }

    def bind(left: Any, right: Any, dimension_numbers: Any, **others: Any) -> Any:
        others.pop("out_sharding")
        return lax.dot_general(left, right, dimension_numbers, **others)

    found = jax.jit(lambda x, y: multiply(bind, (x, y), params))(left, right)
    expected = jax.jit(lambda x, y: bind(x, y, **params))(left, right)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(found, expected)  # small integers: exact in any order


@pytest.mark.parametrize(
    ("left", "right", "numbers"),
    [
        ((4, 8, 16), (16, 2, 8), (((2,), (0,)), ((), ()))),  # in XLA's order
        ((8, 16), (4, 16), (((1,), (1,)), ((), ()))),  # matrices
        ((4, 16), (16, 3), (((1,), (0,)), ((), ()))),
        ((4, 8, 16), (2, 16, 8), (((1, 2), (2, 1)), ((), ()))),  # in different orders
        ((4, 8, 4), (4, 4, 8), (((0, 2), (0, 1)), ((), ()))),  # not side by side
        ((8, 2, 16), (2, 16, 8), (((2,), (1,)), ((1,), (0,)))),  # the batch is not in front
        ((4, 8, 16), (4, 8), (((0, 1), (0, 1)), ((), ()))),  # a matrix and a vector
        ((4, 0, 16), (4, 0, 8), (((0, 1), (0, 1)), ((), ()))),  # nothing to add up
    ],
)
def test_what_stays_as_it_is(left: Any, right: Any, numbers: Any) -> None:
    assert as_matrices(left, right, numbers) is None


def test_the_dimensions_of_the_matrices() -> None:
    gradient = (((0, 1), (0, 1)), ((), ()))  # btd,bthk->dhk
    assert as_matrices((4, 8, 16), (4, 8, 2, 3), gradient) == (
        (32, 16),
        (32, 6),
        (((0,), (0,)), ((), ())),
        (16, 2, 3),
    )
    through = (((3, 2), (3, 2)), ((0,), (0,)))  # gthk,gdhk->gtd
    assert as_matrices((7, 4, 2, 3), (7, 5, 2, 3), through) == (
        (7, 4, 6),
        (7, 5, 6),
        (((2,), (2,)), ((0,), (0,))),
        (7, 4, 5),
    )


def test_elements_that_share_a_byte_stay_as_they_are() -> None:
    """XLA (0.10.2 on CPUs) does not compile their products as matrices."""
    left, right = jnp.ones((2, 3, 4), jnp.int4), jnp.ones((5, 3, 4), jnp.int4)
    params = {
        "dimension_numbers": (((1, 2), (1, 2)), ((), ())),
        "preferred_element_type": jnp.int32,
    }
    assert as_matrices(left.shape, right.shape, params["dimension_numbers"]) is not None
    found = jax.jit(lambda x, y: multiply(lax.dot_general, (x, y), params))(left, right)
    np.testing.assert_array_equal(found, np.full((2, 5), 12))


@pytest.mark.parametrize(
    ("left", "right", "numbers"),
    [
        ((4, 8, 2, 32), (16, 2, 32), (((2, 3), (1, 2)), ((), ()))),  # bthk,dhk->btd
        ((4, 8, 16), (4, 8, 2, 32), (((0, 1), (0, 1)), ((), ()))),  # btd,bthk->dhk
    ],
)
def test_xla_transposes_neither_weights_nor_activations(
    left: Any, right: Any, numbers: Any
) -> None:
    params = {"dimension_numbers": numbers}
    operands = jnp.ones(left), jnp.ones(right)
    text = {
        name: str(jax.jit(product).lower(*operands).compile().as_text())
        for name, product in (
            ("arrays", lambda x, y: lax.dot_general(x, y, **params)),
            ("matrices", lambda x, y: multiply(lax.dot_general, (x, y), params)),
        )
    }
    assert " transpose(" in text["arrays"]  # else this module is not needed any more
    assert " transpose(" not in text["matrices"]
