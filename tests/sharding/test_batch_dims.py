"""Which dimensions hold the batch, and which state leaves meet it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.passes import microbatch
from autopar.passes.graph.graph import Graph, walk
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding.batch_dims import batch_dims, parameters, repeated_dims
from sharding.steps import graph_of, momentum_shapes, momentum_step, shaped


def dims_of(graph: Graph, *names: str) -> list[tuple[str, tuple[int, ...], list[int]]]:
    """(primitive, shape, batch dimensions) of every result of the named primitives."""
    dims = batch_dims(graph, populate(graph.jaxpr))
    return [
        (eqn.primitive.name, var.aval.shape, sorted(dims.get(var, ())))
        for eqn in walk(graph.jaxpr)
        if eqn.primitive.name in names
        for var in eqn.outvars
    ]


def test_forward_backward_and_update() -> None:
    graph = graph_of(momentum_step, *momentum_shapes())
    assert dims_of(graph, "dot_general", "transpose") == [
        ("dot_general", (16, 32), [0]),
        ("dot_general", (16, 8), [0]),
        ("dot_general", (8, 32), []),  # the batch is summed
        ("transpose", (32, 8), []),
        ("dot_general", (16, 32), [0]),
        ("dot_general", (32, 8), []),
        ("transpose", (8, 32), []),
    ]
    assert dims_of(graph, "sub")[-2:] == [("sub", (8, 32), []), ("sub", (32, 8), [])]


def test_the_batch_moves_and_merges() -> None:
    def step(w: Any, x: Any) -> Any:
        moved = jnp.transpose(x, (1, 0, 2))  # [4, 16, 8]
        merged = x.reshape(64, 8)  # batch outermost
        hidden = moved.reshape(64, 8)  # batch inside
        return w + (moved * 2).sum() + (merged * 3).sum() + (hidden * 4).sum()

    graph = graph_of(step, shaped(8, 8), shaped(16, 4, 8))
    assert dims_of(graph, "transpose", "reshape", "reduce_sum") == [
        ("transpose", (4, 16, 8), [1]),
        ("reshape", (64, 8), [0]),
        ("reshape", (64, 8), [0]),
        ("reduce_sum", (), []),
        ("reduce_sum", (), []),
        ("reduce_sum", (), []),
    ]


def test_the_batch_is_taken_apart_and_put_together() -> None:
    """What else a dimension holds is no batch when it stands alone again."""

    def step(w: Any, x: Any) -> Any:
        tokens = x.reshape(64, 8).reshape(16, 4, 8)
        views = (jnp.transpose(x, (1, 0, 2)).reshape(64, 8) * 2).reshape(4, 16, 8)
        parts = x.reshape(2, 8, 4, 8)
        heads = (parts * 2).reshape(2, 8, 32).reshape(16, 32)
        return w + tokens.sum() + views.sum() + heads.sum()

    graph = graph_of(step, shaped(8, 8), shaped(16, 4, 8))
    assert dims_of(graph, "reshape") == [
        ("reshape", (64, 8), [0]),
        ("reshape", (16, 4, 8), [0]),
        ("reshape", (64, 8), [0]),
        ("reshape", (4, 16, 8), [1]),
        ("reshape", (2, 8, 4, 8), [0, 1]),
        ("reshape", (2, 8, 32), [0, 1]),
        ("reshape", (16, 32), [0]),
    ]


def mean_square(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def by_scan(w: Any, x: Any) -> Any:
    """Gradients accumulated by hand, part by part."""
    parts = x.reshape(4, -1, x.shape[-1])
    zero = jnp.zeros_like(w)
    total, _ = jax.lax.scan(lambda sums, x: (sums + jax.grad(mean_square)(w, x), None), zero, parts)
    return w - total / 4


def by_number(w: Any, x: Any) -> Any:
    rows = x.shape[0] // 4

    def body(i: Any, sums: Any) -> Any:
        return sums + jax.grad(mean_square)(w, jax.lax.dynamic_slice_in_dim(x, rows * i, rows))

    return w - jax.lax.fori_loop(0, 4, body, jnp.zeros_like(w)) / 4


def by_views(w: Any, x: Any) -> Any:
    views = jnp.stack([x, x + 1, x + 2])
    return w - jax.grad(mean_square)(w, views.reshape(-1, x.shape[-1]))


def by_halves(w: Any, x: Any) -> Any:
    half = x.shape[0] // 2
    return w - jax.grad(mean_square)(w, x[:half]) - jax.grad(mean_square)(w, x[half:])


@pytest.mark.parametrize("step", [by_scan, by_number, by_views, by_halves])
def test_data_parallelism_cuts_the_batch_wherever_it_is(step: Any) -> None:
    """Each device computes an eighth of the products."""
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (1024, 64)))
    options: dict[str, Any] = {"cluster": "1x8 h100", "microbatches": 1, "batch_argnums": 1}
    plan = autopar.plan(step, w, x, method="data", **options)
    chosen = {x.node: x.choice for x in plan.stages[0].strategies if "dot_general" in x.node}
    assert chosen and all("x" in choice for choice in chosen.values()), chosen


def test_through_scans_and_branches() -> None:
    def step(w: Any, x: Any) -> Any:
        def body(carry: Any, now: Any) -> Any:  # over time: the batch is now's first dimension
            carry = jnp.tanh(carry + now)
            return carry, carry * 2

        last, every = jax.lax.scan(body, jnp.zeros((16, 8)), jnp.moveaxis(x, 1, 0))
        chosen = jax.lax.cond(w[0, 0] > 0, lambda a: a, lambda a: a @ w, last)
        return w + chosen.T @ chosen + every.sum()

    graph = graph_of(step, shaped(8, 8), shaped(16, 4, 8))
    assert dims_of(graph, "scan", "tanh", "cond") == [
        ("scan", (16, 8), [0]),
        ("scan", (4, 16, 8), [1]),
        ("tanh", (16, 8), [0]),
        ("cond", (16, 8), [0]),
    ]


def test_after_a_split_into_microbatches() -> None:
    graph = graph_of(momentum_step, *momentum_shapes())
    rules = populate(graph.jaxpr)
    split = microbatch.split(graph, microbatch.analyze(graph, rules, 2)).graph
    assert dims_of(split, "dot_general", "scan") == [
        ("scan", (32, 8), []),
        ("scan", (8, 32), []),
        ("dot_general", (8, 32), [0]),
        ("dot_general", (8, 8), [0]),
        ("dot_general", (8, 32), []),
        ("dot_general", (8, 32), [0]),
        ("dot_general", (32, 8), []),
    ]


def test_parameters_are_what_meets_the_batch() -> None:
    def paths(graph: Graph) -> list[str]:
        dims = batch_dims(graph, populate(graph.jaxpr))
        return [graph.inputs[i].path for i in sorted(parameters(graph, dims))]

    graph = graph_of(momentum_step, *momentum_shapes())
    assert paths(graph) == ["state[0]['in']", "state[0]['out']"]
    split = microbatch.split(graph, microbatch.analyze(graph, populate(graph.jaxpr), 2)).graph
    assert paths(split) == ["state[0]['in']", "state[0]['out']"]

    def averaged(state: Any, x: Any) -> Any:
        weights, average, scale = state
        gradient = jax.grad(lambda w: jnp.sum((x @ (w * scale)) ** 2))(weights)
        weights = weights - gradient
        return weights, 0.9 * average + 0.1 * weights, scale

    state = (shaped(8, 8), shaped(8, 8), shaped(8))
    assert paths(graph_of(averaged, state, shaped(16, 8))) == ["state[0]", "state[2]"]


@pytest.mark.parametrize("step", [by_scan, by_number, by_views, by_halves])
@pytest.mark.parametrize("method", ["data", "zero2", "shard"])
def test_results_are_those_of_plain_jit(step: Any, method: str) -> None:
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=shape).astype(np.float32) for shape in ((16, 16), (64, 16)))
    run = autopar.parallelize(step, method=method, batch_argnums=1, donate_argnums=())
    np.testing.assert_allclose(run(w, x), jax.jit(step)(w, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["data", "zero1", "zero3", "shard"])
def test_slices_that_begin_outside_are_moved_inside(method: str) -> None:
    """XLA forgets that where a device takes its part of a slice."""

    def step(start: Any, w: Any, x: Any) -> Any:
        return jax.lax.dynamic_slice_in_dim(x, start, 8) @ w

    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=shape).astype(np.float32) for shape in ((16, 16), (32, 16)))
    run = autopar.parallelize(step, method=method, batch_argnums=2, donate_argnums=())
    for start, first in ((3, 3), (27, 24), (-2, 24), (-40, 0)):
        found = run(np.int32(start), w, x)
        np.testing.assert_allclose(found, x[first : first + 8] @ w, rtol=1e-4, atol=1e-5)


def test_parts_that_devices_do_not_divide_are_as_whole_values() -> None:
    """Of four rows on eight devices, each has its part of the weights' products."""

    def step(w: Any, x: Any) -> Any:
        parts = x.reshape(-1, 4, x.shape[-1])

        def add(sums: Any, x: Any) -> Any:
            return sums + jax.grad(mean_square)(w, x), None

        return w - jax.lax.scan(add, jnp.zeros_like(w), parts)[0]

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 4096), (384, 4096)))
    options: dict[str, Any] = {"cluster": "1x8 h100", "microbatches": 1, "batch_argnums": 1}
    plan = autopar.plan(step, w, x, method="zero3", **options)
    chosen = {x.node: x.choice for x in plan.stages[0].strategies if "dot_general" in x.node}
    assert chosen and all("x" in choice for choice in chosen.values()), chosen


def attended(queries: Any, x: Any, w: Any) -> Any:
    """Queries that see each other, then an example's rows."""
    for keys, heads in ((queries, w["own"]), (x, w["other"])):
        q, k, v = queries @ heads[0], keys @ heads[1], keys @ heads[2]
        shares = jax.nn.softmax(jnp.einsum("bnd,bmd->bnm", q, k) / q.shape[-1] ** 0.5)
        queries = queries + shares @ v
    return queries


def by_layer(h: Any, x: Any, layers: Any) -> Any:
    for number in range(2):
        h = attended(h, x, jax.tree.map(lambda w, n=number: w[n], layers))
    return h


def in_one_scan(h: Any, x: Any, layers: Any) -> Any:
    return jax.lax.scan(lambda h, w: (attended(h, x, w), None), h, layers)[0]


def scanned_before(h: Any, x: Any, layers: Any) -> Any:
    """Queries that see only each other in a scan, and then meet the batch."""
    return jax.lax.scan(lambda h, w: (attended(h, h, w), None), h, layers)[0] * x


def in_a_branch(h: Any, x: Any, layers: Any) -> Any:
    first = jax.tree.map(lambda w: w[0], layers)
    is_small = layers["own"][0, 0, 0, 0] < 1e6
    return jax.lax.cond(is_small, lambda h: attended(h, h, first), lambda h: h + 1, h) * x


def normed_over_rows(h: Any, x: Any, layers: Any) -> Any:
    """To divide its rows costs more than to compute them whole: that is a choice."""
    for w in layers["own"].reshape(-1, *layers["own"].shape[2:]):
        h = h @ w
        h = jax.nn.relu((h - h.mean((0, 1))) * jax.lax.rsqrt(h.var((0, 1)) + 1e-5))
    return h * x


WAYS = [by_layer, in_one_scan, scanned_before, in_a_branch, normed_over_rows]


def queries_step(way: Any) -> Any:
    """Learned queries, the same for every example."""

    def step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            queries = jnp.tile(params["queries"][None], (len(x), 1, 1))
            return jnp.mean(jnp.square(way(queries, x, params["layers"])))

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), loss

    return step


def queries_shapes(count: int, queries: int, width: int) -> Any:
    layers = dict.fromkeys(("own", "other"), shaped(2, 3, width, width))
    return {"queries": shaped(queries, width), "layers": layers}, shaped(count, queries, width)


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_are_repeated_for_the_batch_are_its_rows(way: Any) -> None:
    """`method="data"` computed whole what learned queries are before they meet an example."""
    options: dict[str, Any] = {"cluster": "2x8 h100", "microbatches": 1, "stages": 1}
    asked = queries_step(way), *queries_shapes(64, 256, 512)
    found, wanted = (
        autopar.plan(*asked, method=method, batch_argnums=1, **options).estimates.step_seconds
        for method in ("data", "zero1")
    )
    assert found <= 1.05 * wanted


@pytest.mark.parametrize("way", WAYS)
def test_repeated_rows_are_those_of_plain_jit(way: Any) -> None:
    rng, shapes = np.random.default_rng(0), queries_shapes(16, 4, 8)
    args = jax.tree.map(lambda s: 0.3 * rng.normal(size=s.shape).astype(s.dtype), shapes)
    step = queries_step(way)
    run = autopar.parallelize(step, method="data", batch_argnums=1, donate_argnums=())
    found, wanted = run(*args), jax.jit(step)(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_rows_are_looked_for_where_values_meet_the_batch() -> None:
    def step(w: Any, queries: Any, x: Any) -> Any:
        tiled = jnp.tile(queries[None], (16, 1, 1)) @ w  # [16, 4, 16]
        unread = jnp.tanh(w @ w)  # as wide as the batch is long
        return (tiled * x).sum() + unread.sum(), w - 1

    graph = graph_of(step, shaped(16, 16), shaped(4, 16), shaped(16, 4, 16))
    rules = populate(graph.jaxpr)
    known, looked_back = batch_dims(graph, rules), repeated_dims(graph, rules)
    made = {
        (eqn.primitive.name, var.aval.shape): (known.get(var), looked_back.get(var))
        for eqn in walk(graph.jaxpr)
        for var in eqn.outvars
        if eqn.primitive.name in ("dot_general", "tanh", "sub")
    }
    assert made == {
        ("dot_general", (16, 4, 16)): (None, frozenset({0})),
        ("dot_general", (16, 16)): (None, None),
        ("tanh", (16, 16)): (None, None),
        ("sub", (16, 16)): (None, None),
    }
    assert all(looked_back.get(v) == known.get(v) for v in graph.jaxpr.invars)
