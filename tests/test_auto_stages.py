"""`stages="auto"` on a cluster of several nodes, run on this machine's devices."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.errors import MemoryLimitError
from autopar.base.options import Options
from autopar.passes.planner import compiler, layout_search, one_mesh, stage_pricing, unit_costs
from autopar.passes.planner.automatic_stages import AutomaticStages
from autopar.passes.planner.compiler import compile_graph
from autopar.passes.planner.known_costs import PricedStages
from autopar.passes.planner.more_microbatches import worth_trying
from autopar.passes.planner.unit_costs import UnitCosts
from autopar.passes.trace.trace import trace

pytestmark = pytest.mark.usefixtures("solved_once")

DEPTH, WIDTH, ROWS = 4, 512, 64
BATCH = np.random.default_rng(1).normal(size=(2, ROWS, WIDTH)).astype(np.float32)


def init() -> Any:
    """Parameters, drawn on the host: XLA takes seconds for so many."""
    w = np.random.default_rng(0).normal(size=(DEPTH, 2, WIDTH, WIDTH)) / WIDTH**0.5
    return {"layers": jnp.asarray(w, jnp.float32), "head": jnp.eye(WIDTH)}


def init_apart() -> Any:
    """The same with one leaf per layer."""
    params = init()
    return {**params, "layers": list(params["layers"])}


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return x + jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]), None


def train_step(params: Any, x: Any, y: Any) -> Any:
    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        if isinstance(params["layers"], list):
            for w in params["layers"]:
                x, _ = layer(x, w)
        else:
            x, _ = jax.lax.scan(layer, x, params["layers"])
        return jnp.mean((x @ params["head"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def cluster(nodes: int = 2) -> autopar.Cluster:
    """This machine's devices as nodes that a slow link joins: stages send the least over it."""
    local = autopar.Cluster.local()
    slow = dataclasses.replace(local.inter_node, bandwidth=1e8)
    return dataclasses.replace(local, num_nodes=nodes, devices_per_node=8 // nodes, inter_node=slow)


@pytest.mark.parametrize("make", [init, init_apart])
def test_the_chosen_stages_compute_the_same(make: Any) -> None:
    state, expected = make(), make()
    options: dict[str, Any] = {"cluster": cluster(), "microbatches": 8, "method": "data"}
    step = autopar.compile(train_step, state, *BATCH, stages="auto", **options)
    plan = step.plan
    assert plan.pipeline is not None
    assert sum({s.mesh: s.num_devices for s in plan.stages}.values()) == 8
    assert {bool(c.note) for c in plan.candidates} == {True, False}, "one mesh was considered too"
    assert plan.estimates.step_seconds == min(c.step_seconds or 0 for c in plan.candidates)
    plain = jax.jit(train_step)
    for _ in range(3):
        state, loss = step(state, *BATCH)
        expected, expected_loss = plain(expected, *BATCH)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("no_remedies")
def test_stages_are_chosen_anew_for_memory() -> None:
    """With less memory there are other stages; then nothing."""
    arguments = (train_step, init_apart(), *BATCH)
    options: dict[str, Any] = {"cluster": cluster(4), "stages": "auto", "microbatches": 8}
    free = autopar.plan(*arguments, **options)
    most = max(stage.peak_bytes_per_device for stage in free.stages)
    plan = autopar.plan(*arguments, **options, memory_limit=most * 19 // 20)
    assert max(stage.peak_bytes_per_device for stage in plan.stages) <= most * 19 // 20
    assert plan.pipeline.boundaries != free.pipeline.boundaries
    with pytest.raises(MemoryLimitError, match="No plan keeps within"):
        autopar.plan(*arguments, **options, method="zero2", memory_limit=most // 4)


def tied_step(params: Any, tokens: Any) -> Any:
    """Two layers between a large table and its transpose, which the last stage gets once a step."""

    def loss_fn(params: Any) -> jax.Array:
        x = params["table"][tokens]
        for w in params["layers"]:
            x, _ = layer(x, w)
        return jnp.mean(jnp.square(x @ params["table"].T))

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def test_what_is_received_once_a_step_may_be_cut() -> None:
    """The table, of 2 MiB, is nowhere whole where memory is short."""
    layers = [w / 8 for w in init()["layers"][:2, :, :64, :64]]
    params = {"table": jax.random.normal(jax.random.key(1), (8192, 64)) / 8, "layers": layers}
    tokens = np.random.default_rng(2).integers(0, 8192, 8)
    options: dict[str, Any] = {"stages": 2, "microbatches": 4, "schedule": "1f1b"}
    step = autopar.compile(tied_step, params, tokens, memory_limit="3.5MiB", **options)
    (table,) = [x for x in step.plan.inputs if "table" in x.path]
    assert table.bytes_per_device < 8192 * 64 * 4
    expected = jax.jit(tied_step)(params, tokens)
    for one, other in zip(
        jax.tree.leaves(step(params, tokens)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_one_mesh_of_a_long_program_is_bounded_by_its_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where its layers alone take longer than a pipeline, it is not planned."""
    monkeypatch.setattr(layout_search, "LONG_PROGRAM", 1)
    state, kinds = init_apart(), []
    batch = [jax.ShapeDtypeStruct((16 * len(x), *x.shape[1:]), x.dtype) for x in BATCH]
    options: dict[str, Any] = {"method": "data", "microbatches": 4}
    for margin in (1.02, 2):
        monkeypatch.setattr(one_mesh, "MARGIN", margin)
        plan = autopar.plan(train_step, state, *batch, cluster=cluster(), stages="auto", **options)
        kinds.append({bool(c.note) for c in plan.candidates})
    assert kinds == [{True}, {True, False}]


@pytest.mark.parametrize("method", ["data", "auto"])
def test_what_fits_one_node_easily_by_its_method_needs_no_stages(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long program's stages are priced where its method leaves a choice, or memory is short."""
    monkeypatch.setattr(layout_search, "LONG_PROGRAM", 1)
    priced, real = list[int](), stage_pricing.price_stages

    def noted(split: Any, *asked: Any) -> Any:
        priced.append(split.num_microbatches)
        return real(split, *asked)

    monkeypatch.setattr("autopar.passes.planner.automatic_stages.price_stages", noted)
    state, one = init_apart(), autopar.Cluster.preset("dgx-h100")
    batch = [jax.ShapeDtypeStruct((8 * len(x), *x.shape[1:]), x.dtype) for x in BATCH]
    plan = autopar.plan(train_step, state, *batch, cluster=one, method=method)
    assert plan.num_microbatches == len(plan.stages) == 1
    assert bool(priced) == (method == "auto")
    limit = plan.estimates.peak_bytes_per_device // 2
    with contextlib.suppress(MemoryLimitError):
        autopar.plan(train_step, state, *batch, cluster=one, method=method, memory_limit=limit)
    assert priced


@pytest.mark.parametrize("room", [4, math.inf])
def test_one_mesh_comes_before_stages_where_devices_hardly_wait(
    room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With much room; what is planned then bounds the stages, and the plan is the same."""
    monkeypatch.setattr(layout_search, "LONG_PROGRAM", 1)
    monkeypatch.setattr(compiler, "MUCH_ROOM", room)
    state, told = init_apart(), list[str]()
    batch = [jax.ShapeDtypeStruct((16384 * len(x), *x.shape[1:]), x.dtype) for x in BATCH]
    traced = trace(train_step, (state, *batch))
    two = autopar.Cluster.preset("dgx-h100", nodes=2)
    fast = dataclasses.replace(two.inter_node, bandwidth=1e13, latency=0.0)
    two = dataclasses.replace(two, intra_node=fast, inter_node=fast)
    found = compile_graph(traced.graph, Options.from_kwargs(), two, None, told.append)
    first = next(x for x in told if x.startswith(("choosing shardings", "slicing")))
    assert first.startswith("choosing" if room == 4 else "slicing")
    assert found.plan.num_microbatches == len(found.plan.stages) == 1


def test_a_long_program_has_the_same_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its search begins with another number of microbatches."""
    state, plans = init_apart(), []
    batch = [jax.ShapeDtypeStruct((8 * len(x), *x.shape[1:]), x.dtype) for x in BATCH]
    options: dict[str, Any] = {"method": "data", "memory_limit": "20MiB"}
    for equations in (1, 10**6):
        monkeypatch.setattr(layout_search, "LONG_PROGRAM", equations)
        plan = autopar.plan(train_step, state, *batch, cluster=cluster(), stages="auto", **options)
        plans.append(plan)
    long, short = plans
    assert long.num_microbatches == short.num_microbatches
    assert [s.layers for s in long.stages] == [s.layers for s in short.stages]
    assert long.estimates == short.estimates


def test_units_are_not_planned_on_meshes_without_a_prospect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On several nodes, those that were too slow with half as many; one is left at the least."""
    real, found = UnitCosts._planned, list[set[tuple[int, ...]]]()

    def planned(self: UnitCosts, ways: Any, mesh: Any, kind: Any) -> Any:
        found[-1].add(mesh)
        return real(self, ways, mesh, kind)

    monkeypatch.setattr(UnitCosts, "_planned", planned)
    for times in (unit_costs.HOPELESSLY_SLOW, 0.5):
        monkeypatch.setattr(unit_costs, "HOPELESSLY_SLOW", times)
        found.append(set())
        plan = autopar.plan(
            train_step, init_apart(), *BATCH, cluster=cluster(8), stages="auto", microbatches=4
        )
        assert plan.estimates.step_seconds > 0
    assert [sorted(m for m in meshes if math.prod(m) == 4) for meshes in found] == [
        [(2, 2), (4,)],
        [(4,)],
    ]


@pytest.mark.usefixtures("no_remedies")
@pytest.mark.parametrize(("method", "limit"), [("data", "1MB"), ("zero3", "700KB")])
def test_a_long_program_is_refused_for_about_the_same_bytes(
    method: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the layers count a table twice that two read, and few rows are not divided."""
    layers = [jnp.ones((2, 64, 64)) for _ in range(2)]
    params = {"table": jnp.ones((2048, 64)), "layers": layers}
    four = dataclasses.replace(cluster(1), devices_per_node=4)
    options: dict[str, Any] = {"method": method, "memory_limit": limit, "cluster": four}
    least = []
    for equations in (1, 10**6):
        monkeypatch.setattr(layout_search, "LONG_PROGRAM", equations)
        with pytest.raises(MemoryLimitError, match="8 microbatches are not possible") as refused:
            autopar.plan(tied_step, params, np.zeros((16, 32), int), stages="auto", **options)
        assert refused.value.least_bytes is not None
        least.append(refused.value.least_bytes)
    # Of a long program, only the number of microbatches that promises least is planned.
    assert least[1] <= least[0] <= 1.2 * least[1], least


class Expected:
    """A search for stages that takes so long with each number of microbatches; None: too much.

    The objective of the dynamic program is 4% above what stages take.
    """

    def __init__(self, seconds: dict[int, float | None], count: int):
        self.seconds, self.num_microbatches = seconds, count

    def with_microbatches(self, count: int) -> Expected:
        return Expected(self.seconds, count)

    def bound(self, limit: int, at_most: float = math.inf) -> float:
        found = self.seconds[self.num_microbatches]
        return math.inf if found is None or 1.04 * found > at_most else 1.04 * found

    def within(self, limit: int, at_most: float = math.inf) -> tuple[None, float] | None:
        found = self.seconds[self.num_microbatches]
        return None if found is None or found > at_most else (None, found)


@pytest.mark.parametrize(
    ("seconds", "left"),
    [
        ({8: 1.0, 16: 1.01, 32: 1.2, 64: 1.03}, [8, 16, 64]),  # as good as any: the fewest first
        ({8: 0.9, 16: 1.01, 32: 1.2, 64: 1.3}, [8, 16, 64]),  # hardly better is looked beyond
        ({8: 0.9, 16: 1.21, 32: 1.2, 64: 1.3}, [8, 16, 64]),  # hardly worse, too
        ({8: 0.9, 16: 1.27, 32: 1.2, 64: 1.3}, []),
        ({8: 1.3, 16: 1.3, 32: 1.2, 64: 1.1}, [64, 8, 16]),  # more microbatches are timed as well
        ({8: None, 16: None, 32: None, 64: 1.0}, [64, 8, 16]),  # too large until there
        ({8: 1.2, 16: 1.18, 32: 1.2, 64: 1.19}, []),  # hardly better than what is known
    ],
)
def test_numbers_of_microbatches_that_are_worth_trying(
    seconds: dict[int, float | None], left: list[int]
) -> None:
    known = seconds[32] or math.inf
    search: Any = Expected(seconds, 32)
    found = worth_trying(search, [8, 16, 64], 0, known, known)
    assert found == left


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_a_schedule_that_is_asked_for(schedule: str) -> None:
    plan = autopar.plan(
        train_step,
        jax.eval_shape(init),
        *BATCH,
        cluster=cluster(),
        microbatches=8,
        schedule=schedule,
    )
    assert plan.pipeline is not None
    assert plan.pipeline.schedule == schedule


def test_one_mesh_needs_no_schedule() -> None:
    one = cluster(1)
    plan = autopar.plan(train_step, jax.eval_shape(init), *BATCH, cluster=one, schedule="1f1b")
    assert len(plan.stages) == 1


def priced_stages(seconds: dict[int, tuple[float, float]], count: int) -> Any:
    """Stages as priced with `count` microbatches, and what they tell of others."""

    class Priced:
        """Takes so many seconds within the limit, and so many with any memory."""

        def __init__(self, own: int):
            self.own = own

        def with_microbatches(self, other: int) -> Priced:
            return Priced(other)

        def within(self, limit: int, at_most: float = math.inf) -> tuple[None, float] | None:
            found = seconds[self.own][limit == sys.maxsize]
            return None if found > at_most else (None, found)

    split: Any = types.SimpleNamespace(num_microbatches=count)
    search: Any = Priced(count)
    return PricedStages(split, search, search.within(0))


def stages_of(rows: int) -> AutomaticStages:
    graph = trace(lambda w, x: jnp.mean(x @ w), (jnp.ones((4, 4)), jnp.ones((rows, 4)))).graph
    search: Any = types.SimpleNamespace(graph=graph, options=Options(), cluster=cluster())
    return AutomaticStages(search)


@pytest.mark.parametrize(
    ("others", "is_short"),
    [
        ({}, True),
        ({16: (50.0, 30.0), 64: (39.5, 39.0)}, True),  # hardly quicker
        ({16: (50.0, 30.0), 64: (36.0, 28.0)}, False),  # clearly quicker
    ],
)
def test_stages_that_memory_makes_slow_wait_for_quicker_ones(
    others: dict[int, tuple[float, float]], is_short: bool
) -> None:
    stages = priced_stages({32: (40.0, 31.0)} | others, 32)
    assert stages_of(128)._is_short(stages, [*others]) == is_short


def test_microbatches_of_one_row_tell_nothing_of_others() -> None:
    """No value of theirs has a dimension of rows: all time would be the same for more rows."""
    priced = [priced_stages({count: (1.0, 1.0)}, count) for count in (32, 64, 128)]
    assert stages_of(256)._telling(priced) is priced[-1]
    assert stages_of(128)._telling(priced) is priced[1]
    assert stages_of(128)._telling(priced[2:]) is priced[2]
