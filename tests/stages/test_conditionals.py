"""Conditionals taken apart compute the same; results that share work stay together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from autopar.passes.graph.graph import Graph
from autopar.passes.graph.microbatched import in_phases
from autopar.passes.slicing.conditionals import split_conditionals
from autopar.passes.trace.trace import trace


def conditionals(graph: Graph) -> list[Any]:
    """The conditionals of a graph."""
    return [eqn for eqn in graph.jaxpr.eqns if eqn.primitive.name == "cond"]


def test_independent_results_become_conditionals_of_their_own() -> None:
    """`a` and `b` share a product; `c` and the counter are independent."""

    def step(state: Any, flag: jax.Array) -> Any:
        a, b, c, count = state

        def update() -> Any:
            product = a @ b
            return a + product, b - product, c * 2.0, count + 1

        return jax.lax.cond(flag > 0, update, lambda: state)

    square = jnp.arange(9.0).reshape(3, 3)
    state = (square, square.T, square + 1, jnp.int32(4))
    for flag in (jnp.int32(0), jnp.int32(1)):
        graph = trace(step, (state, flag), batch_argnums=()).graph
        split = split_conditionals(in_phases(graph)).graph
        assert len(conditionals(graph)) == 1
        assert sorted(len(eqn.outvars) for eqn in conditionals(split)) == [1, 1, 2]
        jex_core.check_jaxpr(split.jaxpr)
        leaves = [*state, flag]
        for one, other in zip(run(graph, leaves), run(split, leaves), strict=True):
            np.testing.assert_array_equal(one, other)


def run(graph: Graph, leaves: list[Any]) -> list[Any]:
    """The graph's outputs."""
    function = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(graph.jaxpr, ()))
    return list(function(*leaves, *graph.constants))
