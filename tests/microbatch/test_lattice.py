"""The algebra of states and of places in dimensions that merge several loops."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.passes.microbatch import batch_states as lattice
from autopar.passes.microbatch.batch_states import BatchState, Occurrences, join, keeps_zero, locate
from autopar.passes.primitives.factor_rule import Factor, FactorRule

STATES = [
    lattice.whole(zero=True),
    lattice.whole(),
    lattice.split((0, 2)),
    lattice.split((1, 2)),
    lattice.partial("sum"),
    lattice.partial("max"),
    lattice.late(),
]


def rank(state: BatchState) -> int:
    order = {"whole": 1 - state.zero, "split": 2, "partial": 2, "late": 3}
    return order[state.kind]


@pytest.mark.parametrize(("one", "other"), list(itertools.product(STATES, STATES)), ids=str)
def test_join_climbs(one: BatchState, other: BatchState) -> None:
    """It is symmetric, gives back equal states, and never goes down: so fixpoints end."""
    joined = join(one, other)
    assert (joined.kind, joined.form) == (join(other, one).kind, join(other, one).form)
    assert rank(joined) >= max(rank(one), rank(other))
    assert join(joined, one) == joined
    if one == other:
        assert joined == one


def test_join_of_different_forms_is_late() -> None:
    assert join(lattice.split((0, 2)), lattice.split((1, 2))).kind == "late"
    assert join(lattice.split((0, 2)), lattice.partial("sum")).kind == "late"
    assert join(lattice.partial("max"), lattice.partial("sum")).kind == "late"
    assert join(lattice.whole(), lattice.partial("sum")).kind == "partial"


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    parts=st.integers(2, 4),
    data=st.data(),
)
def test_locate_finds_the_one_factor(sizes: list[int], parts: int, data: st.DataObject) -> None:
    """Cutting a factor is cutting the merged dimension at the place that its outer ones give."""
    number = data.draw(st.integers(0, len(sizes) - 1))
    inner_major = data.draw(st.integers(1, 3))
    rest = data.draw(st.integers(1, 3))
    sizes[number] = inner_major * parts * rest
    outer = int(np.prod(sizes[:number]))
    major = outer * inner_major
    assert locate(tuple(range(len(sizes))), sizes, major, parts) == (number, inner_major)
    # The elements agree: rows of the factor, and rows of the merged dimension.
    whole = np.arange(np.prod(sizes)).reshape(sizes)
    viewed = whole.reshape(*sizes[:number], inner_major, parts, rest, *sizes[number + 1 :])
    merged = whole.reshape(major, parts, -1)
    for index in range(parts):
        of_factor = np.take(viewed, index, axis=number + 1)
        np.testing.assert_array_equal(of_factor.ravel(), merged[:, index].ravel())


def test_a_cut_across_two_factors_has_no_place() -> None:
    # [4 * 2] seen as [2, 4, 1]: the 4 parts are half of the outer and all of the inner factor.
    assert locate((0, 1), (4, 2), 2, 4) is None
    assert locate((0, 1), (4, 2), 4, 2) == (1, 1)
    assert locate((0, 1), (4, 2), 1, 4) == (0, 1)


def test_occurrences() -> None:
    rule = FactorRule(
        (Factor(8, "pass"), Factor(3, "pass"), Factor(5, "sum")),
        (((0, 1), (2,)), ((2,), ())),
        (((0,), (1,)), ((0,), (0,))),
    )
    found = Occurrences(rule)
    assert found.factor(rule.operands[0], (0, 2), 4) == (0, 2)
    assert found.places(found.operands, 1, 1) == [(0, 8), None]
    assert found.places(found.results, 0, 2) is None
    assert found.places(found.operands, 2, 1) == [(1, 1), (0, 1)]


def test_zeros() -> None:
    zero, other = lattice.whole(zero=True), lattice.whole()

    def first(function: Callable[..., Any], *args: Any) -> Any:
        return jax.make_jaxpr(function)(*args).eqns[0]

    assert keeps_zero(first(jnp.negative, 1.0), [zero])
    assert keeps_zero(first(lambda x, y: x + y, 1.0, 1.0), [zero, zero])
    assert not keeps_zero(first(lambda x, y: x + y, 1.0, 1.0), [zero, other])
    assert not keeps_zero(first(lambda x, y: x * y, 1.0, 1.0), [zero, other])  # 0 * inf
    assert not keeps_zero(first(jnp.exp, 1.0), [zero])
    select = first(lambda p, x, y: jax.lax.select(p, x, y), True, 1.0, 1.0)
    assert keeps_zero(select, [other, zero, zero])
