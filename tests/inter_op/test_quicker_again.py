"""With how many microbatches computing again is looked at."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from inter_op.chained_layers import step

import autopar
from autopar.base.options import Options
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.mesh_choice import plan_mesh
from autopar.passes.planner.quicker_again import QuickerAgain
from autopar.passes.trace.trace import trace

CLUSTER = autopar.Cluster.preset("p3.16xlarge", nodes=1, devices_per_node=1)
ROWS, WIDTH, LAYERS = 512, 64, 6


@pytest.mark.parametrize(("room", "looked_at"), [(0.01, [1]), (0.3, [1, 4]), (2.0, [1, 2])])
def test_what_cannot_keep_its_rows_is_told_by_fewer_microbatches(
    room: float, looked_at: list[int]
) -> None:
    """The room is a part of what passes between layers of the whole batch; twice that fits."""
    shapes = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * LAYERS
    graph = trace(step, (shapes, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"))).graph
    passing = (LAYERS - 1) * ROWS * WIDTH * 4
    limit = LAYERS * WIDTH * WIDTH * 4 + int(room * passing)
    options = Options(memory_limit=limit)
    search = LayoutSearch.of(graph, options, CLUSTER, lambda message: None)
    asked = list[int]()

    def split(count: int, one_loop: bool) -> Any:
        asked.append(count)
        return search.split(count, one_loop)

    again = QuickerAgain(
        graph, split, options, CLUSTER, lambda message: None, lambda found: None, [], [(1,)]
    )
    again.look_at([1, 2, 4])
    assert asked == looked_at


def of_layers(state: Any, x: jax.Array) -> Any:
    """Gradient descent with momentum; tanh of GELU inside of each residual layer."""

    def loss(params: Any) -> jax.Array:
        y = x
        for w in params:
            y = y + jnp.tanh(jax.nn.gelu(y @ w["up"])) @ w["down"]
        return jnp.mean(y**2)

    params, momenta = state
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, jax.grad(loss)(params))
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momenta), momenta


def searched(limit: int, made: list[Any]) -> QuickerAgain:
    """Of two layers on eight devices, which send each other little at great latency."""
    up, down = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((32, 128), (128, 32)))
    params = [{"up": up, "down": down}] * 2
    rows = jax.ShapeDtypeStruct((2048, 32), "float32")
    graph = trace(of_layers, ((params, params), rows)).graph
    options, cluster = Options(memory_limit=limit), autopar.Cluster.named("8 cpu")
    search = LayoutSearch.of(graph, options, cluster, lambda message: None)
    more: tuple[Any, Any] = (lambda message: None, lambda found: None)
    meshes = [(8,), (4, 2)]
    return QuickerAgain(graph, search.split, options, cluster, *more, made, meshes)


def test_quick_plans_that_need_far_too_much_are_no_reason_not_to_look() -> None:
    """They hold the whole state on each device, which plans chosen for their bytes do not."""
    limit = 200 << 10
    made = list[Any]()
    again = searched(limit, made)
    steps = again._steps(16)
    assert steps is not None
    quickest = plan_mesh(steps[len(steps) - 1], (8,), Options(), again.cluster)
    assert quickest.peak.bytes > 1.6 * limit
    again.look_at([16])
    assert {step.planned[0].mesh for step in made} <= {(8,), (4, 2)} and made
    assert all(step.fits and max(step.peak_bytes) <= limit for step in made)
    assert again.seconds == min(step.step_seconds for step in made) < math.inf


def test_the_first_axis_divides_the_rows_of_a_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = list[tuple[int, tuple[int, ...]]]()

    def look(self: QuickerAgain, steps: Any, mesh: tuple[int, ...], free: Any = None) -> None:
        looked_at.append((steps.split.num_microbatches, mesh))

    monkeypatch.setattr(QuickerAgain, "look", look)
    searched(2**20, []).look_at([256, 512])
    assert looked_at == [(256, (8,)), (512, (4, 2))]


@pytest.mark.parametrize(
    ("operations", "looked_at"), [((), []), ((("tanh", 2),), [(4, (4, 2)), (2, (4, 2))])]
)
def test_fewer_microbatches_are_looked_at_where_values_are_computed_again(
    operations: tuple[Any, ...], looked_at: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as they are quicker: with four they are, with two not."""
    found = list[tuple[int, tuple[int, ...]]]()

    def step(seconds: float, count: int) -> Any:
        split = SimpleNamespace(
            num_microbatches=count,
            recomputation=SimpleNamespace(operations=operations, weights=0),
        )
        planned = [SimpleNamespace(mesh=(4, 2))]
        known = {"step_seconds": seconds, "fits": True, "is_pipeline": False}
        return SimpleNamespace(split=split, planned=planned, **known)

    def look(self: QuickerAgain, steps: Any, mesh: tuple[int, ...], free: Any = None) -> None:
        count = steps.split.num_microbatches
        found.append((count, mesh))
        self.made.extend([step(2.0, count)] if count == 4 else [])

    monkeypatch.setattr(QuickerAgain, "look", look)
    searched(2**20, [step(3.0, 8)]).look_below([1, 2, 4, 8, 16], lambda count: {})
    assert found == looked_at


@pytest.mark.parametrize(
    ("expected", "looked_at"),
    [
        ({2: {(4, 2): 2.0, (8,): 1.0}, 4: {(4, 2): 2.5}}, [(2, (4, 2))]),  # its own mesh
        ({2: {(8,): 2.0}, 4: {(8,): 1.5}}, [(4, (8,))]),  # the quickest
        ({4: {(4, 2): 2.95}}, []),  # hardly quicker
        ({16: {(4, 2): 1.0}}, []),  # not fewer
    ],
)
def test_fewer_microbatches_are_looked_at_where_layers_expect_them_to_be_quicker(
    expected: Any, looked_at: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though what fits so far computes nothing again."""
    found = list[tuple[int, tuple[int, ...]]]()

    def look(self: QuickerAgain, steps: Any, mesh: tuple[int, ...], free: Any = None) -> None:
        found.append((steps.split.num_microbatches, mesh))

    monkeypatch.setattr(QuickerAgain, "look", look)
    split = SimpleNamespace(num_microbatches=8, recomputation=None)
    planned = [SimpleNamespace(mesh=(4, 2))]
    known = {"step_seconds": 3.0, "fits": True, "is_pipeline": False}
    again = searched(2**20, [SimpleNamespace(split=split, planned=planned, **known)])
    again.look_below([1, 2, 4, 8, 16], lambda count: expected.get(count, {}))
    assert found == looked_at
