"""Pins: patterns, layouts of inputs and outputs, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.base.errors import PinError
from autopar.passes.graph.graph import Graph
from autopar.passes.sharding.layout import Layout
from autopar.passes.sharding.pins import matches_path, resolve_pins, simple_path
from sharding.algebra import check_program
from sharding.steps import (
    arrays,
    compiled,
    graph_of,
    linear_shapes,
    linear_step,
    momentum_shapes,
    momentum_step,
    shaped,
    sharded,
)


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Inputs: two weights [8,32] and [32,8], two velocities alike, x and y of the batch."""
    return graph_of(momentum_step, *momentum_shapes())


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
        ("state['layers'][0]['down']", "*['down']", True),
        ("state['embed']", "*['down']", False),  # ends with one of these letters
        ("params", "params", True),
        ("params_extra", "params", False),
    ],
)
def test_patterns(path: str, pattern: str, expected: bool) -> None:
    assert matches_path(path, pattern) == expected


def test_simple_paths() -> None:
    assert simple_path("state.params['Dense_0'][3]") == "state/params/Dense_0/3"


def resolve(graph: Graph, *pins: Any) -> dict[int, Layout]:
    return dict(resolve_pins(graph, pins, (4, 2), ("x", "y")).inputs)


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
        ([("kernel", ())], "matches no input and no output"),
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


def with_prediction(weights: Any, batch: Any) -> Any:
    """A step that returns what is no state: a loss, and a value for every example."""
    made = batch @ weights
    return weights - batch.T @ made, {"loss": (made**2).sum(), "made": made}


@pytest.mark.parametrize("options", [{}, {"method": "data"}, {"microbatches": 4}])
def test_outputs_are_pinned(options: Any) -> None:
    weights, batch = arrays((linear_shapes()[0][0], linear_shapes()[1][0]))
    pins = {"*made": (None, "x"), "*loss": ()}
    step = autopar.compile(with_prediction, weights, batch, pins=pins, **options)
    assert [t.spec for t in step.plan.outputs[1:]] == [(), ((), ("x",))]
    wanted = with_prediction(weights, batch)
    found = step(weights, batch)
    assert found[1]["made"].sharding.spec == PartitionSpec(None, "x")
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found[1]["made"], wanted[1]["made"], rtol=1e-5, atol=1e-5)


def test_a_pin_of_what_replaces_an_input_is_one_of_the_input() -> None:
    graph = graph_of(linear_step, *linear_shapes())
    found = resolve_pins(graph, [(graph.outputs[0].path, (("x",),))], (8,), ("x",))
    assert (found.inputs, found.outputs) == ({0: Layout(((0,), ()))}, {})


def test_meshes_that_a_pin_does_not_divide_are_not_tried() -> None:
    """Twelve rows on eight devices: four or two of them along the first axis will do."""

    def step(w: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - gradient, jnp.sum(x)

    shapes = shaped(12, 64), shaped(64, 12)
    plan = autopar.plan(step, *shapes, cluster="1x8 h100", pins={"w": PartitionSpec("x")})
    assert plan.stages[0].logical_mesh[0] in (2, 4)
    assert plan.inputs[0].spec == (("x",), ())
    with pytest.raises(PinError, match="divide"):
        autopar.plan(step, *shapes, cluster="1x8 h100", pins={"w": PartitionSpec(("x", "y"))})
