"""Strategies: what cutting a factor asks of operands and leaves in results."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.passes.primitives.factor_rule import Factor, FactorRule
from autopar.passes.sharding.layout import Layout, cuts_product, divides, replicated
from autopar.passes.sharding.strategies import (
    LINEAR,
    REPLICATE,
    Shape,
    choices,
    completed,
    follow,
    produce,
    shape_of,
    strategy,
)

# [i,k] x [k,j] -> [i,j], linear in either operand alone.
MATMUL = shape_of(
    FactorRule(
        (Factor(8, "pass"), Factor(16, "pass"), Factor(4, "sum")),
        (((0,), (2,)), ((2,), (1,))),
        (((0,), (1,)),),
    ),
    (frozenset({0}), frozenset({1})),
)
# [i,j] + [i,j] -> [i,j], jointly linear.
ADD = shape_of(
    FactorRule((Factor(8, "pass"), Factor(6, "pass")), (((0,), (1,)),) * 2, (((0,), (1,)),)),
    (frozenset({0, 1}),),
)
# [i,j] -> [ij]: only the outer loop of a merged dimension can be cut.
MERGE = shape_of(
    FactorRule((Factor(8, "pass"), Factor(6, "pass")), (((0,), (1,)),), (((0, 1),),)),
    (frozenset({0}),),
)
SHAPES = {"matmul": MATMUL, "add": ADD, "merge": MERGE}
ROWS, COLUMNS, SUMMED = 0, 1, 2  # factors of the matrix product


def sizes(shape: Shape, value: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    found = []
    for dim in value:
        product = 1
        for factor in dim:
            product *= shape.rule.factors[factor].size
        found.append(product)
    return tuple(found)


def test_cutting_a_kept_factor_cuts_the_result() -> None:
    made = strategy(MATMUL, (ROWS, COLUMNS), (4, 2))
    assert made.operands == (Layout(((0,), ())), Layout(((), (1,))))
    assert made.results == (Layout(((0,), (1,))),)
    assert made.division == 8 and not made.completed


def test_cutting_a_summed_factor_leaves_partial_sums() -> None:
    made = strategy(MATMUL, (SUMMED,), (4,))
    assert made.operands == (Layout(((), (0,))), Layout(((0,), ())))
    assert made.results == (Layout(((), ()), ((0, "sum"),)),)
    assert made.division == 4


def test_a_linear_equation_takes_a_partial_operand() -> None:
    made = strategy(MATMUL, (LINEAR - 1,), (4,))
    partial = Layout(((), ()), ((0, "sum"),))
    assert made.operands == (replicated(2), partial)
    assert made.results == (partial,)
    assert made.division == 1  # every device computes as much as without
    assert strategy(ADD, (LINEAR,), (4,)).operands == (partial, partial)


def test_partial_results_are_completed_whole_or_scattered() -> None:
    variants = completed(strategy(MATMUL, (SUMMED,), (4,)), (8, 16), (4,), True)
    assert [v.results[0] for v in variants] == [
        replicated(2),
        Layout(((0,), ())),
        Layout(((), (0,))),
    ]
    assert all(v.completed and v.left == (Layout(((), ()), ((0, "sum"),)),) for v in variants)
    whole_only = completed(strategy(MATMUL, (SUMMED,), (4,)), (8, 16), (4,), False)
    assert [v.results[0] for v in whole_only] == [replicated(2)]
    # Nothing is scattered along what does not divide.
    assert len(completed(strategy(MATMUL, (SUMMED,), (4,)), (9, 2), (4,), True)) == 1


def test_only_outermost_factors_that_divide_are_cut() -> None:
    assert MERGE.cuttable == (True, False)
    assert MERGE.rule.outermost(MERGE.rule.results[0][0]) == 0
    assert choices(MERGE, (4,), linear=False) == [(REPLICATE,), (ROWS,)]
    assert choices(MERGE, (3,), linear=False) == [(REPLICATE,)]
    assert choices(MATMUL, (8,), linear=True) == [
        (REPLICATE,),
        (ROWS,),
        (COLUMNS,),
        (LINEAR,),
        (LINEAR - 1,),
    ]
    assert choices(MATMUL, (1,), linear=True) == [(REPLICATE,)]
    # Two axes may cut one factor only as far as it divides.
    assert (COLUMNS, COLUMNS) in choices(MATMUL, (4, 2), linear=False)
    assert (SUMMED, SUMMED) not in choices(MATMUL, (4, 2), linear=False)


def test_factors_that_must_stay_whole_are_never_cut() -> None:
    rule = FactorRule(
        (Factor(8, "replicated"), Factor(1, "pass")), (((0,), (1,)),), (((0,), (1,)),)
    )
    assert choices(shape_of(rule, ()), (2,), linear=True) == [(REPLICATE,)]


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_choice_divides_and_is_found_again(name: str, data: st.DataObject) -> None:
    shape, mesh = SHAPES[name], data.draw(st.sampled_from([(8,), (4, 2), (2, 2, 2)]))
    choice = data.draw(st.sampled_from(choices(shape, mesh, linear=True)))
    made = strategy(shape, choice, mesh)
    rule = shape.rule
    for value, layout in zip(
        (*rule.operands, *rule.results), (*made.operands, *made.results), strict=True
    ):
        assert divides(sizes(shape, value), layout, mesh)
        assert list(layout.partial) == sorted(layout.partial)
    assert made.division == cuts_product(made.results[0], mesh) * (
        strategy(shape, tuple(c if c == SUMMED else REPLICATE for c in choice), mesh).division
        if name == "matmul"
        else 1
    )
    # An operand's or a result's layout alone leads to a strategy that has it.
    for position, layout in enumerate(made.operands):
        again = strategy(shape, follow(shape, position, layout, mesh), mesh)
        assert again.operands[position] == layout
    if not made.results[0].partial:
        again = strategy(shape, produce(shape, 0, made.results[0], mesh), mesh)
        assert again.results == made.results
