"""Layouts: shapes of parts, enumeration, text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.passes.sharding.layout import (
    Layout,
    all_layouts,
    cuts_product,
    describe,
    divides,
    local_shape,
    replicated,
    without_partial,
)
from sharding.algebra import layouts


def test_a_dimension_is_cut_by_several_axes() -> None:
    layout = Layout(((0, 1), (), (2,)), ((3, "sum"),))
    mesh = (4, 2, 3, 5)
    assert local_shape((16, 7, 9), layout, mesh) == (2, 7, 3)
    assert cuts_product(layout, mesh) == 24
    assert layout.used == {0, 1, 2, 3}
    assert divides((16, 7, 9), layout, mesh) and not divides((12, 7, 9), layout, mesh)
    assert describe(layout, "wxyz") == "[wx|-|y] +sum(z)"


def test_replicated_and_completed() -> None:
    assert replicated(2).is_replicated and not replicated(2).used
    unreduced = Layout(((), ()), ((0, "max"),))
    assert not unreduced.is_replicated
    assert without_partial(unreduced) == replicated(2)
    assert describe(replicated(0), "x") == "[]"


@settings(deadline=None)
@given(data=st.data(), mesh=st.sampled_from([(8,), (4, 2), (2, 1, 2)]))
def test_every_layout_is_enumerated_once(data: st.DataObject, mesh: tuple[int, ...]) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 8, 16]), max_size=3)))
    every = all_layouts(shape, mesh, partial=True)
    assert len(set(every)) == len(every) and every[0] == replicated(len(shape))
    assert all(divides(shape, layout, mesh) for layout in every)
    assert set(all_layouts(shape, mesh)) == {x for x in every if not x.partial}
    drawn = data.draw(layouts(shape, mesh))
    if all(mesh[axis] > 1 for axis in drawn.used):
        assert drawn in every


@pytest.mark.parametrize(
    ("shape", "mesh", "count"),
    [((8, 8), (8,), 3), ((8, 8), (4, 2), 9), ((8, 3), (8,), 2), ((4, 4), (4, 2), 7), ((), (8,), 1)],
)
def test_number_of_layouts(shape: tuple[int, ...], mesh: tuple[int, ...], count: int) -> None:
    assert len(all_layouts(shape, mesh)) == count
