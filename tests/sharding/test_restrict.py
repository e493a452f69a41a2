"""What each method may choose from."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.cluster import Cluster, Link
from autopar.base.errors import BatchArgumentError, OptionError
from autopar.passes.graph.graph import Graph
from autopar.passes.sharding.layout import Layout, all_layouts, replicated
from autopar.passes.sharding.restrict import check_batch, largest_dim_cut
from autopar.passes.sharding.spmd_program import Block, Compute, Loop
from sharding.steps import (
    Passes,
    arrays,
    compiled,
    graph_of,
    momentum_shapes,
    momentum_step,
    shaped,
    sharded,
)

WHOLE, ROWS, COLUMNS = replicated(2), Layout(((0,), ())), Layout(((), (0,)))


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Inputs: two weights [8,32] and [32,8], two velocities alike, x and y of the batch."""
    return graph_of(momentum_step, *momentum_shapes())


@pytest.mark.parametrize(
    ("method", "weights", "velocities"),
    [
        ("data", [WHOLE, WHOLE], [WHOLE, WHOLE]),
        ("zero1", [WHOLE, WHOLE], [ROWS, ROWS]),
        ("zero2", [WHOLE, WHOLE], [ROWS, ROWS]),
        ("zero3", [COLUMNS, ROWS], [COLUMNS, ROWS]),
    ],
)
def test_textbook_methods_store_the_state_in_one_way(
    graph: Graph, method: str, weights: list[Layout], velocities: list[Layout]
) -> None:
    allowed = Passes(graph, (8,), method).restriction
    found = [allowed.input_layouts(i, (8,)) for i in range(6)]
    assert found == [(layout,) for layout in (*weights, *velocities, ROWS, ROWS)]
    assert allowed.reduce_scatter == (method != "zero1")


def test_rows_of_matrices_are_cut_where_they_can_be() -> None:
    """What is gathered along rows lies as it is stored; of stacks, the largest dimension is cut."""
    state = shaped(16, 32), shaped(9, 32), shaped(2, 16, 32), shaped(64)
    moments = jax.tree.map(lambda x: x, state)

    def step(state: Any, x: Any) -> Any:
        weights, moments = state

        def loss(weights: Any) -> Any:
            a, b, c, d = weights
            return jnp.sum(x @ (a @ b.T)) + jnp.sum(x @ c[0]) + jnp.sum(d)

        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)(weights))
        return (jax.tree.map(lambda w, m: w - m, weights, moments), moments), 0.0

    graph = graph_of(step, (state, moments), shaped(16, 16))
    allowed = Passes(graph, (8,), "zero1").restriction
    found = [allowed.input_layouts(i, (8,)) for i in range(4, 8)]
    cuts = ((0,), ()), ((), (0,)), ((), (), (0,)), ((0,),)
    assert found == [(Layout(dims),) for dims in cuts]
    other = dataclasses.replace(allowed, adds_slices=False)
    assert other.input_layouts(4, (8,)) == (COLUMNS,)


@pytest.mark.parametrize("mesh", [(2, 4), (4, 1), (1, 4), (2, 2, 2)])
@pytest.mark.parametrize("method", ["data", "zero2", "zero3", "hsdp"])
def test_textbook_methods_cut_the_batch_along_all_axes(
    graph: Graph, method: str, mesh: tuple[int, ...]
) -> None:
    every = tuple(axis for axis, size in enumerate(mesh) if size > 1)
    inside = tuple(axis for axis in every if axis == len(mesh) - 1)
    allowed = Passes(graph, mesh, method).restriction
    (weight,), (x,) = (allowed.input_layouts(i, mesh) for i in (0, 4))
    stored = {"data": (), "zero2": (), "zero3": every, "hsdp": inside}[method]
    assert (weight, x) == (Layout(((), stored)), Layout((every, ())))


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("method", "mesh"), [("data", (4, 1)), ("zero2", (2, 4)), ("zero3", (4, 2)), ("hsdp", (2, 4))]
)
def test_textbook_methods_on_meshes_of_two_axes(
    method: str, mesh: tuple[int, ...], microbatches: int
) -> None:
    state, batch = arrays(momentum_shapes())
    step = autopar.compile(
        momentum_step, state, batch, method=method, logical_mesh=mesh, microbatches=microbatches
    )
    for found, wanted in zip(
        jax.tree.leaves(step(state, batch)),
        jax.tree.leaves(jax.jit(momentum_step)(state, batch)),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "mesh", "axes"),
    [("zero2", (8,), ("x",)), ("zero3", (8,), ("x",)), ("hsdp", (2, 4), ("y",))],
)
def test_sums_of_microbatches_may_be_slices(
    method: str, mesh: tuple[int, ...], axes: tuple[str, ...]
) -> None:
    """Reduce-scattered in each of them, inside of nodes, and the numbers are the same."""
    state, batch = arrays(momentum_shapes(batch=64, features=128, hidden=512))
    options: dict[str, Any] = {"method": method, "logical_mesh": mesh, "microbatches": 4}
    step = autopar.compile(momentum_step, state, batch, donate_argnums=(), **options)
    (stage,) = step.plan.stages
    scattered = [c for c in stage.collectives if c.kind == "reduce-scatter" and c.times == 4]
    assert scattered and {c.axes for c in scattered} == {axes}
    for found, wanted in zip(
        jax.tree.leaves(step(state, batch)),
        jax.tree.leaves(jax.jit(momentum_step)(state, batch)),
        strict=True,
    ):
        most = float(np.abs(wanted).max())
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5 * most)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_an_accumulator_is_a_sum_or_its_slices(graph: Graph, dtype: Any) -> None:
    (var,) = jax.make_jaxpr(lambda x: x)(jnp.zeros((8, 32), dtype)).jaxpr.invars
    mesh, is_float = (2, 4), dtype == jnp.float32
    found = {}
    for method in ("data", "zero2", "hsdp"):
        allowed = Passes(graph, mesh, method).restriction
        layouts = all_layouts((8, 32), mesh, partial=is_float)
        found[method] = set(allowed.accumulator_layouts(var, layouts))
    if not is_float:
        assert all(layouts == set(all_layouts((8, 32), mesh)) for layouts in found.values())
        return
    sums = tuple((axis, "sum") for axis in range(2))
    once = Layout(((), ()), sums)
    assert found["data"] == {once}
    assert found["hsdp"] == {once, Layout(((1,), ()), sums[:1]), Layout(((), (1,)), sums[:1])}
    assert found["hsdp"] < found["zero2"] and Layout(((0,), (1,))) in found["zero2"]


TWO_NODES = Cluster.preset("dgx-h100", nodes=2)


def test_hybrid_sharding_reduces_inside_nodes_and_then_across() -> None:
    shapes = momentum_shapes(batch=2**15, features=4096, hidden=2**14)
    plan = autopar.plan(momentum_step, *shapes, cluster=TWO_NODES, method="hsdp", microbatches=1)
    (stage,) = plan.stages
    assert stage.logical_mesh == (2, 8)
    found = Counter((c.kind, c.axes, c.bytes) for c in stage.collectives)
    size = 4 * 4096 * 2**14
    assert found == {
        ("all-gather", ("y",), size): 2,
        ("reduce-scatter", ("y",), size): 2,
        ("all-reduce", ("x",), size // 8): 2,
    }


def test_hybrid_sharding_is_in_the_search_space() -> None:
    """With the state stored so, the search gives the same collectives; without, nothing slower."""
    slow = dataclasses.replace(TWO_NODES, inter_node=Link(1e9, 1e-5))
    shapes = momentum_shapes(batch=2**18, features=8192, hidden=2**15)

    def planned(method: str, mesh: tuple[int, ...], pins: Any = ()) -> autopar.Plan:
        return autopar.plan(
            momentum_step, *shapes, cluster=slow, method=method, logical_mesh=mesh, microbatches=1,
            memory_limit="9GiB", pins=pins,
        )  # fmt: skip

    by_hand, found = planned("hsdp", (2, 8)), planned("shard", (2, 8))
    stored = planned("shard", (2, 8), {"*in": (None, "y"), "*out": ("y",), "batch*": (("x", "y"),)})
    assert [stage.collectives for stage in stored.stages] == [
        stage.collectives for stage in by_hand.stages
    ]
    plans = (found, by_hand, planned("zero3", (16,)))
    seconds = [plan.estimates.step_seconds for plan in plans]
    assert seconds == sorted(seconds)


def test_hybrid_sharding_has_two_axes(graph: Graph) -> None:
    with pytest.raises(OptionError, match="not possible with method='hsdp'") as caught:
        compiled(graph, method="hsdp", logical_mesh=(8,))
    assert "logical_mesh=(1, 8)" in str(caught.value)


def test_shard_may_store_everything_in_every_way(graph: Graph) -> None:
    allowed = Passes(graph, (4, 2), "shard").restriction
    assert allowed.input_layouts(0, (4, 2)) == all_layouts((8, 32), (4, 2))
    assert allowed.input_layouts(4, (4, 2)) == all_layouts((16, 8), (4, 2))


def test_tiny_state_keys_and_scalars_stay_replicated() -> None:
    def step(state: Any, x: Any) -> Any:
        weights, bias, key, count = state
        noise = jax.random.normal(key, (8,))
        return (weights - x.T @ x, bias + noise, jax.random.fold_in(key, 1), count + 1)

    key = jax.eval_shape(lambda: jax.random.key(0))
    graph = graph_of(step, (shaped(1024, 1024), shaped(8), key, shaped()), shaped(16, 1024))
    allowed = Passes(graph, (8,), "shard").restriction
    layouts = [allowed.input_layouts(i, (8,)) for i in range(4)]
    assert layouts == [
        all_layouts((1024, 1024), (8,)),
        (replicated(1),),
        (replicated(0),),
        (replicated(0),),
    ]


def test_matrices_of_many_layers_are_not_tiny() -> None:
    """Each is a small share of the state, and all of them together are most of it."""

    def step(layers: Any, x: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf - 1, layers), jnp.sum(x)

    layers = [(shaped(32, 32), shaped(4)) for _ in range(1100)]
    allowed = Passes(graph_of(step, layers, shaped(16, 32)), (8,), "shard").restriction
    assert allowed.input_layouts(0, (8,)) == all_layouts((32, 32), (8,))
    assert allowed.input_layouts(1, (8,)) == (replicated(1),)  # all biases are 4 of 1028 parts


@pytest.mark.parametrize("microbatches", [1, 4])
def test_data_parallel_devices_draw_only_their_rows_of_dropout(microbatches: int) -> None:
    def step(state: Any, x: Any) -> Any:
        def loss_fn(weights: Any) -> Any:
            kept = jax.random.bernoulli(state["key"], 0.8, x.shape)
            return jnp.mean(jnp.where(kept, x, 0) @ weights)

        grads = jax.grad(loss_fn)(state["weights"])
        return {"weights": state["weights"] - grads, "key": jax.random.fold_in(state["key"], 1)}

    state = {"weights": shaped(256, 4), "key": jax.eval_shape(jax.random.key, 0)}
    graph = graph_of(step, state, shaped(1024, 256))
    made = compiled(graph, method="data", microbatches=microbatches)

    def selects(block: Block) -> Iterator[Compute]:
        for instruction in block.instructions:
            if isinstance(instruction, Loop):
                yield from selects(instruction.body)
            elif isinstance(instruction, Compute) and instruction.eqn.primitive.name == "lt":
                yield instruction

    drawn = [x.results[0] for x in selects(sharded(made).block) if x.eqn.outvars[0].aval.ndim == 2]
    assert drawn
    assert all(version.layout.dims[0] for version in drawn)


def test_the_largest_dimension_that_divides_is_cut() -> None:
    assert largest_dim_cut((8, 32), (8,)) == COLUMNS
    assert largest_dim_cut((32, 32), (8,)) == ROWS
    assert largest_dim_cut((8, 33), (8,)) == ROWS
    assert largest_dim_cut((7, 33), (8,)) == WHOLE
    assert largest_dim_cut((), (8,)) == replicated(0)


def test_a_batch_that_the_devices_cannot_share(graph: Graph) -> None:
    check_batch(graph, "data", (8,), 2)
    check_batch(graph, "shard", (8,), 4)  # other layouts do not need it
    with pytest.raises(BatchArgumentError, match="16 examples in 4 microbatches") as caught:
        check_batch(graph, "zero2", (8,), 4)
    assert "a multiple of 32" in str(caught.value)


def deep_step(weights: Any, x: Any) -> Any:
    """Many small layers under one scan."""

    def loss_fn(weights: Any) -> Any:
        def layer(y: Any, w: Any) -> Any:
            return y + jnp.einsum(
                "bhk,hkd->bd", jnp.einsum("bd,dhk->bhk", y, w["in"]), w["out"]
            ), None

        y, _ = jax.lax.scan(jax.checkpoint(layer), x, weights["layers"])
        return jnp.mean(jnp.square(y @ weights["head"]))

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def test_a_stack_of_many_small_layers_is_cut_in_its_loop() -> None:
    """A layer is less than a thousandth of the state, all of them together most of it."""
    layers, width = 1200, 32768
    weights = {
        "layers": {"in": shaped(layers, width, 2, 2), "out": shaped(layers, 2, 2, width)},
        "head": shaped(width, 8),
    }
    x = shaped(8, width)
    graph = graph_of(deep_step, weights, x)
    stacks = [
        node
        for node in Passes(graph, (8,), "shard").build().nodes
        if node.label.startswith("scan") and node.label.endswith((" slice", " stack"))
    ]
    matrices = [node for node in stacks if len(node.layouts[0].dims) == 3]
    assert matrices
    for node in matrices:
        assert any(any(layout.dims) for layout in node.layouts), node.label
    # Whole, they would take 1.2 GB of a device.
    asked = {"method": "shard", "microbatches": 1, "memory_limit": "800MiB"}
    made = autopar.plan(deep_step, weights, x, cluster=Cluster.preset("dgx-h100"), **asked)
    assert made.estimates.peak_bytes_per_device <= 800 * 2**20


def test_what_is_cast_of_a_leaf_is_as_tiny_as_the_leaf() -> None:
    """A leaf is a little more than a thousandth of the state, and in bfloat16 a little less."""

    def step(state: Any, x: Any) -> Any:
        def loss_fn(state: Any) -> Any:
            narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), state)
            found, _ = jax.lax.scan(
                lambda h, w: (h + w, None), x @ narrow["head"], narrow["biases"]
            )
            return jnp.sum(found.astype(jnp.float32)) + jnp.sum(state["body"])

        gradient = jax.grad(loss_fn)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient)

    state = {"body": shaped(900, 64, 8), "head": shaped(64, 8), "biases": shaped(64, 8)}
    graph = graph_of(step, state, shaped(8, 64, dtype=jnp.bfloat16))
    allowed = Passes(graph, (8,), "shard").restriction
    assert 64 * 8 * 2 < allowed.tiny_bytes < 64 * 8 * 4
    heads = [
        var
        for eqn in graph.jaxpr.eqns
        for var in eqn.outvars
        if (var.aval.dtype, var.aval.shape) == (jnp.bfloat16, (64, 8))
    ]
    assert heads
    for var in heads:
        layouts = allowed.boundary_layouts(var, (8,), False)
        assert any(any(layout.dims) for layout in layouts)
