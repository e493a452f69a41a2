"""A step in phases: what runs once, the loop, and what its body's variables are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal
from microbatch.helpers import analyzed, check_phases, run

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import check
from autopar.passes.graph.microbatched import LoopPhase, Microbatched, Task, WholePhase, in_phases
from autopar.passes.microbatch import split

ROWS, COUNT = 16, 4
ARGUMENTS = (
    {"w": np.full((4, 4), 0.1, np.float32), "rate": np.float32(0.5)},
    np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4) / 64,
)


def train(params: Any, x: Any) -> Any:
    """Something before the loop, a sum, a maximum and rows in it, and an update after it."""
    rate = jnp.exp(params["rate"])

    def loss_fn(w: Any) -> Any:
        rows = jnp.mean(jnp.tanh(x @ (w * rate)) ** 2, axis=1)
        return jnp.mean(rows), rows

    (loss, rows), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params["w"])
    return params["w"] - rate * gradient, loss, jnp.max(rows), rows


def step_in_phases(count: int = COUNT) -> Microbatched:
    return split(*analyzed(train, ARGUMENTS, count))


def loop_of(step: Microbatched) -> LoopPhase:
    assert step.loop is not None
    return step.loop


def test_prologue_loop_and_epilogue() -> None:
    step = step_in_phases()
    check_phases(step)
    assert [type(phase) for phase in step.phases] == [WholePhase, LoopPhase, WholePhase]
    assert "exp" in [eqn.primitive.name for eqn in step.prologue]
    assert "dot_general" in [eqn.primitive.name for eqn in loop_of(step).body.eqns]
    assert "sub" in [eqn.primitive.name for eqn in step.epilogue]
    outside = [eqn.primitive.name for eqn in (*step.prologue, *step.epilogue)]
    assert "dot_general" not in outside and "scan" not in outside


def test_when_inputs_are_read_and_outputs_are_there() -> None:
    """Of what is kept, moments are read only after the loop; a scale does not change in a step."""

    def step(state: Any, x: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            return jnp.mean(jnp.tanh(x @ (w * state["scale"])) ** 2)

        gradient = jax.grad(loss_fn)(state["w"])
        moment = 0.9 * state["moment"] + gradient
        return state["scale"], moment, state["w"] - moment

    state = {"moment": np.zeros((4, 4), np.float32), "scale": np.float32(0.5)}
    state["w"] = ARGUMENTS[0]["w"]
    split_step = split(*analyzed(step, (state, ARGUMENTS[1]), COUNT))
    early = {
        str(info.path): split_step.is_read_early(number)
        for number, info in enumerate(split_step.graph.inputs)
    }
    assert [early[name] for name in early if "moment" in name] == [False]
    assert [early[name] for name in early if "moment" not in name] == [True] * 3
    assert [split_step.is_made_late(number) for number in range(3)] == [False, True, True]
    whole = split(*analyzed(step, (state, ARGUMENTS[1]), 1))
    assert all(whole.is_read_early(number) for number in range(4))
    assert not any(whole.is_made_late(number) for number in range(3))


def test_gradients_are_added_up_as_soon_as_they_are_there() -> None:
    """The last layer's before the products of the first: no two of them wait for the loop's end."""

    def deep(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return jnp.mean(y)

        return [w - g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]

    arguments = [np.eye(4, dtype=np.float32)] * 3, np.ones((ROWS, 4), np.float32)
    body = loop_of(split(*analyzed(deep, arguments, COUNT))).body
    made = {var: number for number, eqn in enumerate(body.eqns) for var in eqn.outvars}
    products = [n for n, eqn in enumerate(body.eqns) if eqn.primitive.name == "dot_general"]
    sums = sorted(made[var] for var in body.outvars if var in made)
    assert len(sums) == 3 and len(products) == 8
    assert [sum(product < total for product in products) for total in sums] == [4, 6, 8]


def test_what_the_body_reads_carries_and_leaves() -> None:
    step = step_in_phases()
    loop = loop_of(step)
    state, batch = step.graph.jaxpr.invars[:2], step.graph.jaxpr.invars[2]
    made_before = {v for eqn in step.prologue for v in eqn.outvars}
    for outer in loop.consts.values():
        assert outer in made_before or outer in state
    number, rows = loop.slices  # of the microbatch, and its rows
    assert (number.aval.shape, rows.aval.shape) == ((), (ROWS // COUNT, 4))
    assert made_before.issuperset(loop.slices.values())
    assert batch in {v for eqn in step.prologue for v in eqn.invars if not isinstance(v, Literal)}
    # The gradient and the loss are added up, the maximum is kept, and rows are collected.
    combined = [
        [loop.body.eqns[i].primitive.name for i in item.combine] for item in loop.accumulators
    ]
    assert sorted(combined) == [["add"], ["add"], ["max"]]
    assert {item.total.aval.shape for item in loop.accumulators} == {(4, 4), ()}
    ((one, stack),) = loop.stacks
    assert (one.aval.shape, stack.aval.shape) == ((ROWS // COUNT,), (COUNT, ROWS // COUNT))


def test_what_is_not_split_is_one_whole_phase() -> None:
    graph, analysis = analyzed(train, ARGUMENTS, 1)
    for step in (split(graph, analysis), in_phases(graph)):
        check_phases(step)
        assert step.graph is graph
        assert step.phases == (WholePhase(tuple(graph.jaxpr.eqns)),)
        assert step.loop is None


def test_a_scan_of_the_users_is_no_loop_over_microbatches() -> None:
    def scanned(w: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack([w] * COUNT))
        return jnp.sum(x)

    whole = split(*analyzed(scanned, (ARGUMENTS[0]["w"], ARGUMENTS[1]), 1))
    assert whole.loop is None
    assert "scan" in [eqn.primitive.name for eqn in whole.prologue]
    inner = loop_of(split(*analyzed(scanned, (ARGUMENTS[0]["w"], ARGUMENTS[1]), COUNT)))
    assert "scan" in [eqn.primitive.name for eqn in inner.body.eqns]


def test_a_loop_that_is_not_in_the_program_is_left_out() -> None:
    step = step_in_phases()
    other = loop_of(step_in_phases(2))
    assert in_phases(step.graph, [other]).loop is None
    assert in_phases(step.graph, [other, loop_of(step)]).loop is loop_of(step)


def test_with_another_scan() -> None:
    """The loop is the new one, with its tasks; nothing else changes, the old program neither."""
    step = step_in_phases()
    old = loop_of(step)
    tasks: tuple[Task, ...] = tuple("F" for _ in old.body.eqns)
    step = in_phases(step.graph, [LoopPhase(old.scan, tasks)])
    body = jax_compat.replace_jaxpr(old.body, eqns=list(old.body.eqns))
    closed = old.scan.params["jaxpr"].replace(jaxpr=body)
    scan = old.scan.replace(params={**old.scan.params, "jaxpr": closed})
    new = step.with_scan(scan)
    check(new.graph)
    check_phases(new)
    assert loop_of(new) == LoopPhase(scan, tasks)
    assert (new.prologue, new.epilogue) == (step.prologue, step.epilogue)
    assert loop_of(step).scan is old.scan
    for one, other in zip(run(step.graph, ARGUMENTS), run(new.graph, ARGUMENTS), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("count", [1, COUNT])
def test_with_other_equations_outside_of_the_loop(count: int) -> None:
    step = step_in_phases(count)
    eqns = [
        eqn if step.loop is not None and eqn is step.loop.scan else eqn.replace(params=eqn.params)
        for eqn in step.graph.jaxpr.eqns
    ]
    new = step.with_eqns(eqns)
    check(new.graph)
    check_phases(new)
    assert new.loop == step.loop
    assert not set(map(id, new.prologue)) & set(map(id, step.prologue))
    assert list(map(id, new.graph.jaxpr.eqns)) == list(map(id, eqns))
