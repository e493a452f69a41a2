"""Graphs: inlining, name stacks and lines, dead code, checks and fingerprints."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr

from autopar.passes.graph.fingerprint import fingerprint
from autopar.passes.graph.graph import (
    Graph,
    Input,
    Output,
    check,
    flatten,
    from_closed_jaxpr,
    inner_jaxprs,
    used_vars,
    user_source,
    walk,
)

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def graph_of(function: Callable[..., Any], *args: Any) -> Graph:
    closed = jax.make_jaxpr(function)(*args)
    inputs = [Input(f"args[{i}]", "other") for i in range(len(closed.in_avals))]
    outputs = [Output(f"result[{i}]") for i in range(len(closed.out_avals))]
    graph = from_closed_jaxpr(closed, inputs, outputs)
    check(graph)
    return graph


def names(graph: Graph) -> list[str]:
    return [eqn.primitive.name for eqn in walk(graph.jaxpr)]


def evaluate(graph: Graph, *args: Any) -> list[Any]:
    closed = jex_core.ClosedJaxpr(graph.jaxpr, ())
    found: list[Any] = jex_core.jaxpr_as_fun(closed)(*args, *graph.constants)
    return found


# Inlining


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -1, 1),))


def test_calls_are_inlined_and_the_numbers_stay() -> None:
    @jax.jit
    def twice(x: Any) -> Any:
        return jnp.tanh(x) * 2

    def loss(x: Any) -> Any:
        y = jax.nn.relu(twice(twice(x)))  # a custom_jvp in a jit, and one jit called twice
        y = jax.checkpoint(lambda z: jnp.exp(jnp.cos(z)))(y)
        return jnp.sum(clipped(y))

    graph = graph_of(jax.value_and_grad(loss), X)
    called = {"jit", "pjit", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}
    assert not called & set(names(graph))
    assert names(graph).count("tanh") == 2
    assert "optimization_barrier" in names(graph)  # what is rematerialized stays so
    expected = jax.value_and_grad(loss)(X)
    for found, wanted in zip(evaluate(graph, X), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_what_a_barrier_passes_to_nobody_is_dead() -> None:
    def step(x: Any) -> Any:
        return jax.lax.optimization_barrier((x + 1, jnp.sin(x)))[0]

    assert names(graph_of(step, X)) == ["add", "optimization_barrier"]


def test_bodies_of_control_flow_are_flat_too() -> None:
    def step(x: Any) -> Any:
        def body(carry: Any, now: Any) -> Any:
            carry = jax.lax.switch(
                jnp.int32(now[0]), [jax.jit(jnp.sin), jax.nn.relu, jnp.cos], carry + now
            )
            return carry, ()

        carry, _ = jax.lax.scan(body, jnp.zeros(4), x)
        return jax.lax.while_loop(lambda c: jax.jit(jnp.sum)(c) < 10, lambda c: c + 1, carry)

    graph = graph_of(step, X)
    outer = [eqn.primitive.name for eqn in graph.jaxpr.eqns]
    assert "scan" in outer and "while" in outer and "cond" not in outer
    assert "cond" in names(graph) and not {"jit", "pjit", "custom_jvp_call"} & set(names(graph))
    (scan,) = (eqn for eqn in graph.jaxpr.eqns if eqn.primitive.name == "scan")
    assert len(inner_jaxprs(scan)) == 1
    np.testing.assert_allclose(evaluate(graph, X)[0], step(X), rtol=1e-6)


def test_a_branch_that_nothing_else_can_take_is_inlined() -> None:
    def step(x: Any) -> Any:
        both = jax.lax.platform_dependent(x[0], cpu=jnp.sin, default=jnp.cos)
        return jnp.diagonal(x) * jax.lax.cond(True, jnp.exp, jnp.log, jnp.abs(x[0, :3])), both

    found = names(graph_of(step, X))
    assert found.count("platform_index") == found.count("cond") == 1
    assert "exp" in found and "log" not in found
    np.testing.assert_allclose(evaluate(graph_of(step, X), X)[0], step(X)[0], rtol=1e-6)


def test_a_reshape_in_another_order_is_a_transpose_and_a_reshape() -> None:
    def step(x: Any) -> Any:
        turned = jax.lax.reshape(x, (12,), dimensions=(1, 0))
        return turned, jax.lax.reshape(x, (2, 6), dimensions=(0, 1))

    graph = graph_of(step, X)
    assert names(graph) == ["transpose", "reshape", "reshape"]
    for found, wanted in zip(evaluate(graph, X), step(X), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_linear_solve_is_what_it_computes() -> None:
    def inverse_norm(x: Any) -> Any:
        matrix = x @ x.T + jnp.eye(3)
        return jnp.linalg.solve(matrix, x).sum() + jnp.linalg.slogdet(matrix)[1]

    graph = graph_of(jax.grad(inverse_norm), X)
    assert "custom_linear_solve" not in names(graph) and "triangular_solve" in names(graph)
    np.testing.assert_allclose(evaluate(graph, X)[0], jax.grad(inverse_norm)(X), rtol=1e-4)


def test_arrays_that_inner_functions_close_over_are_constants_once() -> None:
    """JAX keeps them in the inner equations, at any depth."""
    table, other = jnp.asarray(X + 1), X - 1
    inner = jax.jit(lambda x: jnp.sin(x) * table)

    def step(x: Any) -> Any:
        x, _ = jax.lax.scan(lambda c, _: (inner(c) + other, None), inner(x), None, length=2)
        x = jax.lax.cond(x.sum() > 0, lambda x: jnp.sort(x - other), inner, x)
        x = jax.lax.while_loop(
            lambda x: jnp.sum(inner(x)) < -99, lambda x: jax.jit(lambda x: x * other)(inner(x)), x
        )
        x = jax.checkpoint(lambda x: inner(x) * other)(x)
        return jax.jit(lambda x: inner(x).sum())(x)

    for function in (step, jax.grad(lambda x: inner(jax.checkpoint(inner)(x)).sum())):
        graph = graph_of(function, X)
        assert len(graph.constants) == len({id(value) for value in graph.constants}) <= 2
        assert not any(body.constvars for eqn in walk(graph.jaxpr) for body in inner_jaxprs(eqn))
        np.testing.assert_allclose(evaluate(graph, X)[0], function(X), rtol=1e-5)


def test_a_key_that_an_inner_function_closes_over() -> None:
    key = jax.random.key(3)
    noisy = jax.jit(lambda x: x + jax.random.normal(key, x.shape))
    graph = graph_of(noisy, X)
    np.testing.assert_allclose(evaluate(graph, X)[0], noisy(X), rtol=1e-6)


def test_an_outputs_may_be_an_input_a_literal_or_shared() -> None:
    identity = jax.jit(lambda x: (x, 1.0, x))
    graph = graph_of(lambda x: identity(x), X)
    assert not graph.jaxpr.eqns
    assert [np.shape(value) for value in evaluate(graph, X)] == [(3, 4), (), (3, 4)]


def test_flattening_twice_changes_nothing() -> None:
    graph = graph_of(jax.grad(lambda x: jnp.sum(jax.nn.gelu(x))), X)
    again = flatten(ClosedJaxpr(graph.jaxpr, ()))
    assert fingerprint(again.jaxpr) == fingerprint(graph.jaxpr)


def test_closed_over_arrays_are_inputs_and_unused_ones_are_not() -> None:
    used, unused = jnp.asarray(X), jnp.asarray(X + 1)

    def step(x: Any, never_read: Any) -> Any:
        del never_read
        jnp.sin(unused)
        return x + used

    graph = graph_of(step, X, X)
    assert [label.role for label in graph.inputs] == ["other", "other", "constant"]
    assert not graph.jaxpr.constvars
    np.testing.assert_array_equal(graph.constants[0], used)
    np.testing.assert_array_equal(evaluate(graph, X, X)[0], X + X)


# Where equations come from


def test_name_stacks_of_callers_come_first() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        with jax.named_scope("inner"):
            return jnp.sin(x)

    def step(x: Any) -> Any:
        with jax.named_scope("first"):
            x = inner(x)
        with jax.named_scope("second"):  # the jit's program is traced once and found again
            return inner(x)

    stacks = [
        str(eqn.source_info.name_stack)
        for eqn in graph_of(step, X).jaxpr.eqns
        if eqn.primitive.name == "sin"
    ]
    assert len(stacks) == 2
    assert stacks[0].startswith("first") and stacks[1].startswith("second")
    assert all(stack.endswith("inner") for stack in stacks)


def test_lines_are_the_users() -> None:
    def step(x: Any) -> Any:
        return jax.nn.softmax(x)  # this line

    lines = {user_source(eqn) for eqn in graph_of(step, X).jaxpr.eqns}
    line = step.__code__.co_firstlineno + 1
    (source,) = lines
    assert source.startswith(f"{__file__}:{line} (") and "step" in source


# Dead code


def test_dead_code_goes_and_effects_stay() -> None:
    def step(x: Any) -> Any:
        jnp.sin(x)
        jax.debug.print("sum {}", jnp.cos(x).sum())

        def body(carry: Any, now: Any) -> Any:
            jnp.tan(now)
            jax.debug.print("now {}", now[0])
            return carry, ()

        jax.lax.scan(body, 0.0, x)
        return x * 2

    found = names(graph_of(step, X))
    assert "sin" not in found and "tan" not in found
    assert "cos" in found and "scan" in found
    assert sum("debug" in name for name in found) == 2


def test_used_variables() -> None:
    graph = graph_of(lambda x, y: (x + 1, 2.0), X, X)
    x, y = graph.jaxpr.invars
    assert x in used_vars(graph.jaxpr) and y not in used_vars(graph.jaxpr)


def test_labels_must_fit() -> None:
    graph = graph_of(lambda x: x + 1, X)
    check(
        dataclasses.replace(
            graph, inputs=(Input("x", "state", alias=0),), outputs=(Output("y", 0),)
        )
    )
    with pytest.raises(AssertionError):
        check(dataclasses.replace(graph, inputs=(Input("x", "state", alias=0),)))
    with pytest.raises(AssertionError):
        check(dataclasses.replace(graph, outputs=()))
    with pytest.raises(AssertionError):
        check(dataclasses.replace(graph, inputs=(Input("x", "constant"),)))


def test_text_names_inputs_and_what_they_become() -> None:
    graph = graph_of(lambda x: x + 1, X)
    labels = (Input("params", "state", alias=0, donated=True),)
    text = str(dataclasses.replace(graph, inputs=labels, outputs=(Output("result", 0),)))
    assert text.splitlines()[:2] == [
        "graph of 1 equations",
        "  state    params: float32[3,4] -> result donated",
    ]


# Fingerprints


def scanned(scale: float = 2.0, length: int = 3, reverse: bool = False) -> str:
    def step(x: Any) -> Any:
        def body(carry: Any, now: Any) -> Any:
            return jnp.tanh(carry * scale + now), now.sum()

        return jax.lax.scan(body, jnp.zeros(4), x[:length], reverse=reverse)

    return fingerprint(graph_of(step, X).jaxpr)


def test_a_fingerprint_is_the_programs_content() -> None:
    assert scanned() == scanned()
    other = {scanned(2.5), scanned(length=2), scanned(reverse=True)}
    assert len(other | {scanned()}) == 4


@pytest.mark.parametrize(
    "changed",
    [
        lambda x, y: x - y,  # another operation
        lambda x, y: y + x,  # other operands
        lambda x, y: (x + y, x),  # other results
        lambda x, y: x + y + 0.5,  # one more equation
        lambda x, y: (x + y).astype(jnp.bfloat16),
    ],
)
def test_what_changes_a_fingerprint(changed: Callable[..., Any]) -> None:
    before = fingerprint(graph_of(lambda x, y: x + y, X, X).jaxpr)
    assert fingerprint(graph_of(changed, X, X).jaxpr) != before
    assert fingerprint(graph_of(lambda x, y: x + y, X[:2], X[:2]).jaxpr) != before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x * 2.0, lambda x: x * 2.5),  # a literal
        (lambda x: x.sum(0), lambda x: x.sum(1)),  # a param
        (lambda x: x[jnp.array([0, 1])], lambda x: x[jnp.array([0, 1, 2])]),
        (lambda x: x.reshape(4, 3), lambda x: x.reshape(2, 6)),
    ],
)
def test_literals_and_params_count(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    assert fingerprint(graph_of(one, X).jaxpr) != fingerprint(graph_of(other, X).jaxpr)


def test_names_and_lines_do_not_count() -> None:
    def first(x: Any) -> Any:
        with jax.named_scope("first"):
            return jnp.sin(x) + 1

    def second(weights: Any) -> Any:
        moved = jnp.sin(weights)
        return moved + 1

    assert fingerprint(graph_of(first, X).jaxpr) == fingerprint(graph_of(second, X).jaxpr)


def training_fingerprint() -> str:
    """Of a gradient with control flow, a convolution, random bits and a custom rule."""

    def loss(x: Any) -> Any:
        x = x + jax.random.normal(jax.random.key(0), x.shape)
        x = jax.lax.conv(x[None, None], jnp.ones((1, 1, 2, 2)), (1, 1), "SAME")[0, 0]
        x = jax.lax.cond(x[0, 0] > 0, jax.nn.relu, clipped, x)
        return jnp.sum(jax.vmap(lambda row: jax.nn.logsumexp(row))(x))

    return fingerprint(graph_of(jax.value_and_grad(loss), X).jaxpr)


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    here = training_fingerprint()
    assert here == training_fingerprint()
    other = subprocess.run(
        [sys.executable, "-c", "import test_graph; print(test_graph.training_fingerprint())"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == here


@pytest.mark.parametrize("positive", [True, False])
def test_numbers_that_a_cond_is_given_are_inside_its_branches(positive: bool) -> None:
    def outer(x: Any) -> Any:
        def inner(y: Any, scale: Any) -> Any:
            def added(scale: Any) -> Any:
                return scale + y

            return jax.lax.switch(jnp.int32(y[0] > 0), [lambda s: y * s, added, added], scale)

        return jax.lax.cond(x[0] > 0, inner, lambda y, scale: y - scale, x, 0.5), jax.lax.cond(
            x[0] > 0, lambda s: s, lambda s: 2 * s, 0.25
        )

    x = np.linspace(0.5, 1, 4, dtype=np.float32) * (1 if positive else -1)
    closed = flatten(jax.make_jaxpr(outer)(x))
    conds = [eqn for eqn in walk(closed.jaxpr) if eqn.primitive.name == "cond"]
    assert len(conds) >= 2
    assert not any(isinstance(v, jex_core.Literal) for eqn in conds for v in eqn.invars)
    found = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x)
    for value, expected in zip(found, outer(x), strict=True):
        np.testing.assert_array_equal(value, expected)
