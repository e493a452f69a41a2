"""What a stage receives: every tile once, its replicas made and priced on the stage."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.passes.graph.graph import Graph
from autopar.passes.microbatch import analyze, split
from autopar.passes.pieces.opened import _arriving
from autopar.passes.planner.planned_stage import PlaceInPipeline
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_labels import label_batch
from autopar.passes.planner.stage_shardings import MeshSearch
from autopar.passes.primitives.populate import populate
from autopar.passes.schedules.flight import ONE_IN_FLIGHT
from autopar.passes.sharding.layout import Layout, without_replicas
from autopar.passes.sharding.spmd_program import ShardedValue
from autopar.passes.sharding.tiny_leaves import tiny_bytes
from autopar.passes.slicing.slice_stages import slice_stages
from autopar.passes.trace.trace import trace

WHOLE, ROWS, COLUMNS = Layout(((), ())), Layout(((0,), ())), Layout(((), (0,)))


def test_axes_that_cut_nothing_cut_the_first_dimension_that_they_divide() -> None:
    assert without_replicas((8, 6), WHOLE, (4,)) == ROWS
    assert without_replicas((6, 8), WHOLE, (4,)) == COLUMNS
    assert without_replicas((6, 6), WHOLE, (4,)) == WHOLE
    assert without_replicas((8, 8), COLUMNS, (4, 2)) == Layout(((1,), (0,)))
    assert without_replicas((8, 8), WHOLE, (1,)) == WHOLE


@pytest.mark.parametrize(
    ("planned", "sent", "arriving"),
    [
        (WHOLE, COLUMNS, COLUMNS),  # the sender's: only a gather is left
        (ROWS, COLUMNS, ROWS),  # ours: the sender's would need an all-to-all
        (WHOLE, WHOLE, ROWS),
    ],
)
def test_tiles_arrive_as_they_are_needed(planned: Layout, sent: Layout, arriving: Layout) -> None:
    atom = jax.make_jaxpr(lambda x: x)(jnp.ones((8, 8))).jaxpr.invars[0]
    assert _arriving(ShardedValue(atom, planned), sent, (4,)) == arriving


def _graph() -> Graph:
    """A large leaf, and a matrix that is a three-hundredth of it."""

    def step(state: Any, x: jax.Array) -> Any:
        return {k: v + x.sum() for k, v in state.items()}, x.sum()

    shape = jax.ShapeDtypeStruct
    state = {"large": shape((2**15, 4096), jnp.float32), "small": shape((256, 400), jnp.float32)}
    return trace(step, (state, shape((8, 4), jnp.float32))).graph


def test_a_matrix_is_tiny_by_what_a_device_has_of_the_state() -> None:
    graph, small = _graph(), 256 * 400 * 4
    assert small < tiny_bytes(graph, 1) and small < tiny_bytes(graph, 8)
    assert small >= tiny_bytes(graph, 64)


def test_replicas_of_what_is_received_have_their_price() -> None:
    """For every microbatch the gather from tiles; a tile has none."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(state: Any) -> jax.Array:
            return jnp.mean(jnp.tanh(jnp.tanh(x @ state[0]) @ state[1]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return [w - 0.1 * g for w, g in zip(state, gradients, strict=True)], value

    count, width = 4, 64
    shape = jax.ShapeDtypeStruct
    weights = [shape((width, width), jnp.float32)] * 2
    graph = trace(step, (weights, shape((128, width), jnp.float32))).graph
    split_step = split(graph, analyze(graph, populate(graph.jaxpr), count))
    stages = slice_stages(split_step, populate(split_step.graph.jaxpr), 2)
    stage = label_batch(stages)[1]
    one = SplitStep(stage.step, populate(stage.graph.jaxpr))
    cluster = Cluster.preset("dgx-h100", devices_per_node=4)
    place = PlaceInPipeline(stage, ONE_IN_FLIGHT)
    search = MeshSearch.of(one, (4,), Options(), cluster, None, place)
    received = [x for x in search.built.nodes if x.label.endswith("slice") and any(x.seconds)]
    assert received
    for node in received:
        for layout, seconds in zip(node.layouts, node.seconds, strict=True):
            gather = search.pricing.reshard(ROWS, layout, (128 // count, width), 4)
            cut = any(layout.dims)
            assert seconds == (0.0 if cut else pytest.approx(count * gather))
            assert cut or seconds > 0
