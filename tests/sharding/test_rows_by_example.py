"""Mixtures without capacities, as people write them: rows are sorted for each example alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import eval_jaxpr
from plain_jit import equals_plain_jit

import autopar
from autopar.passes.experts.by_example import by_example
from autopar.passes.graph.graph import Graph, Input, flatten, from_closed_jaxpr, walk
from sharding.row_forms import (
    EXAMPLES,
    EXPERTS,
    FORMS,
    SHAPES,
    TOKENS,
    WIDTH,
    Weights,
    across_examples,
    back_by_rank,
    back_by_set,
    backwards,
    by_choice_first,
    by_position,
    by_remainders,
    into_fewer_places,
    into_more_places,
    loss_of,
    of_compared_keys,
    of_neighbours,
    of_no_bounds,
    of_other_counts,
    of_present_experts,
    of_reversed_tokens,
    of_unknown_keys,
    some_rows,
    some_weights,
    step_of,
    with_capacity,
    with_counts_of_sorted,
    with_inverse_by_scatter,
    with_sorted_order,
    with_sorted_promise,
    with_sorted_tokens,
    with_token_numbers,
)


def graph_of(loss: Any) -> Graph:
    arguments = some_weights(), some_rows()
    closed = flatten(jax.make_jaxpr(step_of(loss))(*arguments))
    inputs = [*[Input(name, "state") for name in sorted(SHAPES)], Input("x", "batch", 0)]
    return from_closed_jaxpr(closed, inputs, ())


def ranks_of_sizes(graph: Graph) -> set[int]:
    return {
        len(eqn.invars[2].aval.shape)
        for eqn in walk(graph.jaxpr)
        if eqn.primitive.name == "ragged_dot_general"
    }


@pytest.mark.parametrize("layers", ["one", "unrolled", "remat", "loop"])
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_sorted_for_each_example(form: str, layers: str) -> None:
    graph = graph_of(loss_of(FORMS[form], layers))
    made = by_example(graph)
    assert ranks_of_sizes(graph) == {1} and ranks_of_sizes(made) == {2}
    values = [*jax.tree.leaves((some_weights(), some_rows())), *graph.constants]
    before, after = (
        jax.jit(lambda *xs, jaxpr=jaxpr: eval_jaxpr(jaxpr, (), *xs))(*values)
        for jaxpr in (graph.jaxpr, made.jaxpr)
    )
    for one, other in zip(after, before, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "layers", "options"),
    [
        ("back_by_set", "remat", {"method": "data"}),
        ("back_by_set", "unrolled", {"microbatches": 4, "stages": 2}),
        ("back_by_rank", "remat", {"microbatches": 2, "method": "zero3"}),
        ("back_by_sums", "one", {"microbatches": 2, "logical_mesh": (2, 2)}),
        ("with_biases", "unrolled", {"microbatches": 1, "method": "zero2"}),
        ("with_padding", "remat", {"microbatches": 1, "logical_mesh": (4, 2)}),
    ],
)
def test_they_have_microbatches_and_devices(
    form: str, layers: str, options: dict[str, Any]
) -> None:
    step = step_of(loss_of(FORMS[form], layers))
    compiled = equals_plain_jit(step, some_weights(), some_rows(), **options)
    if options.get("method") == "data":  # gradients alone
        (stage,) = compiled.plan.stages
        assert {c.kind for c in stage.collectives} == {"all-reduce"}, compiled.plan


@pytest.mark.parametrize(
    "form",
    [
        by_position,
        with_capacity,
        of_other_counts,
        of_unknown_keys,
        across_examples,
        of_neighbours,
        backwards,
        by_remainders,
        by_choice_first,
        of_present_experts,
        of_reversed_tokens,
        of_compared_keys,
        of_no_bounds,
    ],
)
def test_what_is_not_proven_stays(form: Any) -> None:
    graph = graph_of(loss_of(form))
    made = by_example(graph)
    assert made.jaxpr is graph.jaxpr
    assert not any(sort.by_example for sort in made.row_sorts)


@pytest.mark.parametrize("form", [with_capacity, across_examples, of_compared_keys])
def test_what_stays_equals_the_plain_step(form: Any) -> None:
    equals_plain_jit(step_of(loss_of(form)), some_weights(), some_rows(), microbatches=1)


def test_one_mixture_of_two_can_be() -> None:
    def loss(weights: Weights, x: Any) -> Any:
        first = loss_of(back_by_set)(weights, x)
        return first + loss_of(with_capacity)(weights, 2 * x)

    assert ranks_of_sizes(by_example(graph_of(loss))) == {1, 2}


def test_what_stays_is_refused_in_microbatches_of_a_loop() -> None:
    step = step_of(loss_of(with_capacity, "remat"))
    with pytest.raises(autopar.errors.InexactMicrobatchError, match="scan") as refused:
        autopar.compile(step, some_weights(), some_rows(), microbatches=2)
    assert "the counts of the keys" in " ".join(str(refused.value).split())


@pytest.mark.parametrize("stages", [1, 2])
def test_plans_say_which_rows_are_sorted_for_each_example(stages: int) -> None:
    loss = loss_of(back_by_rank, "unrolled")
    plan = autopar.plan(step_of(loss), some_weights(), some_rows(), stages=stages, microbatches=2)
    assert {(sort.by_example, sort.reason) for sort in plan.row_sorts} == {(True, "")}
    assert all("(back_by_rank)" in sort.source for sort in plan.row_sorts)
    assert "sorted for each example" in str(plan)
    assert autopar.Plan.from_json(plan.to_json()) == plan


def test_plans_say_why_rows_are_sorted_over_the_whole_batch() -> None:
    step = step_of(loss_of(of_neighbours))
    plan = autopar.plan(step, some_weights(), some_rows(), method="data")
    (sort,) = plan.row_sorts
    assert not sort.by_example
    assert "cumsum" in sort.reason
    assert "(of_neighbours)" in sort.where


@pytest.mark.parametrize("form", [into_fewer_places, into_more_places])
def test_what_is_put_into_other_numbers_of_places(form: Any) -> None:
    equals_plain_jit(step_of(loss_of(form)), some_weights(), some_rows(), microbatches=1)


@pytest.mark.parametrize(
    "form",
    [
        with_counts_of_sorted,
        with_inverse_by_scatter,
        with_sorted_order,
        with_sorted_promise,
        with_token_numbers,
        with_sorted_tokens,
    ],
)
def test_more_forms_are_sorted_for_each_example(form: Any) -> None:
    made = by_example(graph_of(loss_of(form)))
    assert 2 in ranks_of_sizes(made)
    moves = [e for e in walk(made.jaxpr) if "indices_are_sorted" in e.params]
    assert moves and not any(e.params["indices_are_sorted"] for e in moves)
    for count in (1, 4):
        equals_plain_jit(step_of(loss_of(form)), some_weights(), some_rows(), microbatches=count)


def test_other_equations_are_no_hindrance(capsys: pytest.CaptureFixture[str]) -> None:
    """One without results; numbers that are computed of each other many times."""

    def loss(weights: Weights, x: Any) -> Any:
        jax.debug.print("mean {}", x.mean())
        return loss_of(back_by_set)(weights, x)

    def with_numbers(weights: Weights, x: Any) -> Any:
        number = jnp.arange(EXAMPLES * TOKENS)
        for _ in range(40):
            number = (number * number + number) % 101
        return loss(weights, x) + number.sum() * 1e-9

    assert ranks_of_sizes(by_example(graph_of(with_numbers))) == {2}
    equals_plain_jit(step_of(loss), some_weights(), some_rows(), microbatches=1)


def test_single_tokens_are_sorted_in_larger_parts() -> None:
    tokens = 2**15

    def loss(weights: Weights, x: Any) -> Any:
        return jnp.mean(back_by_set(weights, x) ** 2)

    arguments = jax.eval_shape(some_weights), jax.ShapeDtypeStruct((tokens, WIDTH), np.float32)
    closed = flatten(jax.make_jaxpr(step_of(loss))(*arguments))
    inputs = [*[Input(name, "state") for name in sorted(SHAPES)], Input("x", "batch", 0)]
    made = by_example(from_closed_jaxpr(closed, inputs, ()))
    sizes = {e.invars[2].aval.shape for e in walk(made.jaxpr) if "ragged" in e.primitive.name}
    assert sizes == {(4096, EXPERTS)}
