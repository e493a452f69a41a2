"""What a gather takes out of a widened array is widened after it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharding.steps import graph_of, shaped

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.passes.graph.casts_after import with_casts_after
from autopar.passes.graph.graph import check
from autopar.passes.planner.compiler import compile_graph
from autopar.passes.trace.trace import trace

ROWS, WIDTH, CLASSES = 16, 8, 32


def losses(weights: Any, x: Any, mode: str | None = None, fill: Any = None) -> Any:
    logits = (x.astype(jnp.bfloat16) @ weights.astype(jnp.bfloat16)).astype(jnp.float32)
    labels = (jnp.arange(ROWS) * 3 % (CLASSES + 4))[:, None]  # some are out of bounds
    own = jnp.take_along_axis(logits, labels, axis=1, mode=mode, fill_value=fill)
    return jnp.log(jnp.exp(logits).sum(1)) - own[:, 0]


def arguments() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    weights, x = random.normal(size=(WIDTH, CLASSES)), random.normal(size=(ROWS, WIDTH))
    return jnp.asarray(weights, jnp.float32), jnp.asarray(x, jnp.float32)


def gathered(graph: Any) -> list[Any]:
    return [e.invars[0].aval.dtype for e in graph.jaxpr.eqns if e.primitive.name == "gather"]


@pytest.mark.parametrize("mode", [None, "clip", "promise_in_bounds"])
def test_the_numbers_are_the_same(mode: str | None) -> None:
    graph = trace(lambda w, x: losses(w, x, mode), arguments(), batch_argnums=(1,)).graph
    changed = with_casts_after(graph)
    check(changed)
    assert set(gathered(graph)) == {jnp.dtype(jnp.float32)}
    assert jnp.dtype(jnp.bfloat16) in gathered(changed)
    values = [*graph.constants, *jax.tree.leaves(arguments())]
    inputs = values[len(graph.constants) :] + values[: len(graph.constants)]
    (wanted,), (found,) = (jax.core.eval_jaxpr(x.jaxpr, [], *inputs) for x in (graph, changed))
    np.testing.assert_array_equal(found, wanted)


def test_a_number_of_ones_own_outside_stays() -> None:
    graph = trace(lambda w, x: losses(w, x, "fill", 0.1), arguments(), batch_argnums=(1,)).graph
    assert jnp.dtype(jnp.bfloat16) not in gathered(with_casts_after(graph))


@pytest.mark.parametrize(("cluster", "is_done"), [("tpu-v5e", True), ("h100", False)])
def test_it_is_done_for_tpus(cluster: str, is_done: bool) -> None:
    shapes = shaped(WIDTH, CLASSES), shaped(ROWS, WIDTH)
    graph = graph_of(lambda w, x: (w, losses(w, x)), *shapes, batch_argnums=(1,))
    made = compile_graph(
        graph, Options(microbatches=1), Cluster.preset(cluster, devices_per_node=8)
    )
    assert (jnp.dtype(jnp.bfloat16) in gathered(made.graph)) == is_done
