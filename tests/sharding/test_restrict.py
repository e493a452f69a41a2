"""What each method may choose from, and pins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.base.errors import BatchArgumentError, PinError
from autopar.passes.graph.graph import Graph
from autopar.passes.sharding.layout import Layout, all_layouts, replicated
from autopar.passes.sharding.restrict import (
    check_batch,
    largest_dim_cut,
    matches_path,
    resolve_pins,
    simple_path,
)
from autopar.passes.sharding.spmd_program import Block, Compute, Loop
from sharding.algebra import check_program
from sharding.steps import (
    Passes,
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
        ("zero1", [WHOLE, WHOLE], [COLUMNS, ROWS]),
        ("zero2", [WHOLE, WHOLE], [COLUMNS, ROWS]),
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


# Pins


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [
        ("state.params['Dense_0']['kernel']", "Dense_0/kernel", True),
        ("state.params['Dense_0']['kernel']", "kernel", True),
        ("state.params['Dense_0']['kernel']", "*kernel*", True),
        ("state.params['Dense_0']['kernel']", "state.params['Dense_0']['kernel']", True),
        ("state[0]['w']", "state[0]['w']", True),
        ("state[0]['w']", "state[1]['w']", False),
        ("state[2]['w']", "state/[12]/w", True),
        ("state.params['Dense_0']['kernel']", "params/*/bias", False),
        ("state[0]['w']", "state/0/w", True),
        ("state[10]['w']", "state/1/w", False),
        ("params", "params", True),
        ("params_extra", "params", False),
    ],
)
def test_patterns(path: str, pattern: str, expected: bool) -> None:
    assert matches_path(path, pattern) == expected


def test_simple_paths() -> None:
    assert simple_path("state.params['Dense_0'][3]") == "state/params/Dense_0/3"


def resolve(graph: Graph, *pins: Any) -> dict[int, Layout]:
    return resolve_pins(graph, pins, (4, 2), ("x", "y"))


def test_pins_give_layouts(graph: Graph) -> None:
    found = resolve(graph, ("state/0/in", ((), ("y",))), ("*/out", (("y", "x"),)))
    assert found == {
        0: Layout(((), (1,))),
        1: Layout(((0, 1), ())),  # axes cut in ascending order, trailing dimensions stay whole
        3: Layout(((0, 1), ())),
    }
    same = (("state/0/in", ((), ("y",))), ("*/0/in", ((), ("y",))))
    assert resolve(graph, *same) == {0: Layout(((), (1,)))}


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ([("kernel", ())], "matches no input"),
        ([("*/in", (("z",),))], "names the mesh axis 'z'"),
        ([("*/in", ((), (), ("x",)))], "has 3 dimensions, the tensor has 2"),
        ([("batch/0", ((), ("x", "y"))), ("batch/*", (("x",),))], "two shardings"),
    ],
)
def test_pins_that_cannot_be_met(graph: Graph, pins: Any, message: str) -> None:
    with pytest.raises(PinError, match=message):
        resolve(graph, *pins)


def test_a_pin_that_does_not_divide() -> None:
    graph = graph_of(momentum_step, *momentum_shapes(hidden=36))
    with pytest.raises(PinError, match="does not divide") as caught:
        resolve(graph, ("*/0/in", ((), ("x", "y"))))
    assert "(8, 36)" in str(caught.value) and caught.value.where == "state[0]['in']"


def test_a_plan_keeps_its_pins(graph: Graph) -> None:
    pins = {"state/0/in": ("y", "x"), "state/0/out": (None, None), "state/1/*": ("x",)}
    made = compiled(graph, method="shard", microbatches=1, logical_mesh=(4, 2), pins=pins)
    check_program(sharded(made))
    assert [t.spec for t in made.plan.inputs[:4]] == [
        (("y",), ("x",)),
        ((), ()),
        (("x",), ()),
        (("x",), ()),
    ]
    assert [t.spec for t in made.plan.outputs[:4]] == [t.spec for t in made.plan.inputs[:4]]
