"""What fits is found from below, and it is what trying everything in turn finds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from counted_rows import rows_over_peaks
from small_steps import perceptron

import autopar
from autopar.base.options import Options
from autopar.base.progress import Progress
from autopar.passes.planner import (
    candidates,
    fitting_plan,
    layout_search,
    mesh_choice,
    meshes_in_turn,
    stage_shardings,
)
from autopar.passes.planner.compiler import compile_graph
from autopar.passes.planner.layouts import submesh
from autopar.passes.planner.least_memory import LeastMemory
from autopar.passes.planner.mesh_choice import plan_mesh
from autopar.passes.planner.planned_stage import PlannedStage
from autopar.passes.sharding.compiler_rules import GPU, RULES
from autopar.passes.solver import TooDear
from autopar.passes.trace.trace import trace

pytestmark = pytest.mark.usefixtures("no_remedies", "solved_once")

CLUSTER = autopar.Cluster.preset("p3.16xlarge")
ROWS, WIDTH = 32, 16


def scanned(state: jax.Array, x: jax.Array) -> Any:
    def loss(state: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, state)
        return jnp.mean(y * y)

    value, gradient = jax.value_and_grad(loss)(state)
    return state - 0.1 * gradient, value


STEPS: dict[str, tuple[Callable[..., Any], Any]] = {
    "perceptron": (perceptron, {f"w{i}": jnp.ones((WIDTH, WIDTH)) for i in range(2)}),
    "scanned": (scanned, jnp.ones((2, WIDTH, WIDTH))),
}


def planned(name: str, limit: int, rows: int = ROWS, **options: Any) -> autopar.Plan:
    step, state = STEPS[name]
    x = jnp.ones((rows, WIDTH))
    return autopar.plan(step, state, x, cluster=CLUSTER, stages=1, memory_limit=limit, **options)


def everything(
    split: Any,
    meshes: Sequence[tuple[int, ...]],
    options: Options,
    cluster: autopar.Cluster,
    report: Any,
    *_: Any,
) -> list[PlannedStage]:
    """Every mesh by itself: the quickest that fits, or what needs least."""
    return [plan_mesh(split, mesh, options, submesh(cluster, math.prod(mesh))) for mesh in meshes]


def in_turn(patch: pytest.MonkeyPatch) -> None:
    """All numbers of microbatches, and all meshes, one after the other."""
    patch.setattr(layout_search.LayoutSearch, "too_few", lambda self, counts: [])
    patch.setattr(candidates, "plan_meshes", everything)


@pytest.mark.parametrize(
    ("name", "rows", "limit", "method"),
    [
        ("perceptron", ROWS, 3100, "zero3"),
        ("perceptron", ROWS // 2, 900, "auto"),
        ("scanned", ROWS, 2900, "zero3"),
        ("scanned", ROWS, 900, "zero3"),
    ],
)
def test_the_plan_is_that_of_trying_everything(
    name: str, rows: int, limit: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[int] = []

    def found() -> Any:
        try:
            plan = planned(name, limit, rows, method=method)
        except autopar.errors.MemoryLimitError as error:
            return error.least_bytes
        # What else was tried is not the plan, nor what that proves of it.
        assert plan.solver is not None
        bounds.append(plan.solver.lower_bound)
        return {**plan.to_dict(), "candidates": None, "solver": plan.solver.cost}

    quick = found()
    in_turn(monkeypatch)
    assert quick == found()
    assert bounds == sorted(bounds, reverse=True), "no less is proved of it"


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("perceptron", "auto"),
        ("scanned", "zero3"),
        pytest.param("perceptron", "zero3", marks=pytest.mark.full),
        pytest.param("scanned", "auto", marks=pytest.mark.full),
    ],
)
def test_the_bound_is_below_every_plan(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[LeastMemory] = []
    real = layout_search.LayoutSearch.too_few

    def kept(self: Any, counts: Sequence[int]) -> list[int]:
        name = CLUSTER.device.name
        seen.append(LeastMemory.of(self.graph, self.rules, name, self.analysis))
        return real(self, counts)

    monkeypatch.setattr(layout_search.LayoutSearch, "too_few", kept)
    with pytest.raises(autopar.errors.MemoryLimitError):
        planned(name, 300, method=method)
    bounds = {count: seen[0].bytes(count, CLUSTER.num_devices) for count in (1, 4)}
    assert bounds[1] > bounds[4] > 300
    for count, bound in bounds.items():
        least = planned(name, 2**30, method=method, microbatches=count)
        assert bound <= least.estimates.peak_bytes_per_device


def correlated(state: Any, x: jax.Array) -> Any:
    """A sum of products of all rows is carried as a scalar."""
    w, target, wide = state
    y, total = x @ wide, jnp.zeros(())
    for row in w:
        y = jnp.tanh(y * row)
        total += jnp.sum(target * (y.T @ y)) / len(x)
    return (w * (1 - 0.1 * total), target, wide), total


def shared(state: Any, x: jax.Array) -> Any:
    """The gradient of a weight of many layers is carried once."""
    return scanned_loss(state, x, lambda w, y: jnp.tanh(y @ w))


def in_halves(state: Any, x: jax.Array) -> Any:
    """Gradients in bfloat16 are added up in float32."""
    return scanned_loss(state, x, lambda w, y: jnp.tanh(y @ w.astype(jnp.bfloat16)))


def scanned_loss(state: Any, x: jax.Array, layer: Callable[[Any, Any], Any]) -> Any:
    def loss(state: jax.Array) -> jax.Array:
        y = x
        for _ in range(6):
            y = layer(state, y)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    value, gradient = jax.value_and_grad(loss)(state)
    return state - 0.1 * gradient, value


def updated_at_once(state: Any, x: jax.Array) -> Any:
    """New weights are not there in the loop, though they are written before its last layer."""
    new = []
    for w in state:
        y = jnp.tanh(x @ w)
        new.append(w @ w - 0.1 * (x.T @ y) / len(x))
    return new, jnp.mean(x)


def scanned_in_place(state: Any, x: jax.Array) -> Any:
    """A loop writes over what it carries, and hands on what it does not change."""
    y = x @ jnp.ones((WIDTH, 16 * WIDTH))
    (y, z), _ = jax.lax.scan(lambda c, _: ((jnp.sin(c[0]), c[1]), None), (y, y), None, length=4)
    z, _ = jax.lax.scan(lambda z, _: (z * 2, None), z, None, length=4)
    return state * 2, jnp.sum(y) + jnp.sum(z)


SQUARE = jnp.ones((4 * WIDTH, 4 * WIDTH))
LOOPED: dict[str, tuple[Callable[..., Any], Any, jax.Array]] = {
    "correlated": (
        correlated,
        (jnp.ones((12, 4 * WIDTH)), SQUARE, jnp.ones((WIDTH, 4 * WIDTH))),
        jnp.ones((16 * ROWS, WIDTH)),
    ),
    "shared": (shared, SQUARE, jnp.ones((ROWS, 4 * WIDTH))),
    "in_halves": (in_halves, SQUARE, jnp.ones((ROWS, 4 * WIDTH), jnp.bfloat16)),
    "updated_at_once": (updated_at_once, [SQUARE] * 4, jnp.ones((ROWS, 4 * WIDTH))),
    "scanned_in_place": (scanned_in_place, SQUARE, jnp.ones((8 * ROWS, WIDTH))),
    "perceptron": (*STEPS["perceptron"], jnp.ones((ROWS, WIDTH))),
    "scanned": (*STEPS["scanned"], jnp.ones((ROWS, WIDTH))),
}


@pytest.mark.parametrize("name", LOOPED)
def test_the_bound_of_a_loop_is_below_the_least_plan(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the search unbounded; what the loop carries is what the splitter makes it carry."""
    step, state, x = LOOPED[name]
    seen: list[LeastMemory] = []

    def none(self: Any, counts: Sequence[int]) -> list[int]:
        name = CLUSTER.device.name
        seen.append(LeastMemory.of(self.graph, self.rules, name, self.analysis))
        return []

    monkeypatch.setattr(layout_search.LayoutSearch, "too_few", none)
    options: dict[str, Any] = {"cluster": CLUSTER, "stages": 1, "remat": "none"}
    for count in (1, 4, 16) if name in ("correlated", "scanned_in_place") else (4,):
        # Too little: the error says what the smallest plan needs.
        with pytest.raises(autopar.errors.MemoryLimitError) as caught:
            autopar.plan(
                step, state, x, batch_argnums=1, memory_limit=64, microbatches=count, **options
            )
        bound, least = seen[-1].bytes(count, CLUSTER.num_devices), caught.value.least_bytes
        assert least is not None and 0 < bound <= least, (name, count)


def test_microbatches_that_fit_are_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products that a loop adds up to a scalar are not there all at once."""
    step, state, x = LOOPED["correlated"]
    options: dict[str, Any] = {"cluster": CLUSTER, "stages": 1, "remat": "none"}

    def plan() -> autopar.Plan:
        return autopar.plan(step, state, x, batch_argnums=1, memory_limit=20_000, **options)

    quick = plan()
    assert quick.num_microbatches == 16
    in_turn(monkeypatch)
    assert {**quick.to_dict(), "candidates": None} == {**plan().to_dict(), "candidates": None}


def test_where_two_meshes_need_far_too_much_no_other_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (step, state), x = STEPS["perceptron"], jnp.ones((ROWS, WIDTH))
    options: dict[str, Any] = {"memory_limit": 600, "microbatches": 1, "stages": 1, "remat": "none"}
    options["cluster"] = dataclasses.replace(CLUSTER, num_nodes=2)

    def refused() -> tuple[int, int]:
        """Meshes that were looked at, and the least that was found."""
        lines: list[str] = []
        monkeypatch.setattr(Progress, "report", lambda self, line: lines.append(line))
        with pytest.raises(autopar.errors.MemoryLimitError) as caught:
            autopar.plan(step, state, x, **options)
        assert caught.value.least_bytes is not None
        return sum("choosing shardings" in line for line in lines), caught.value.least_bytes

    number, least = refused()
    monkeypatch.setattr(stage_shardings, "LARGE_PROBLEM", 0)
    few, found = refused()
    assert few == meshes_in_turn.MESHES_TRIED < number
    assert least <= found <= 2 * least


def test_what_misses_by_far_is_not_solved_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans that are chosen for their bytes tell, where more microbatches can be tried."""
    monkeypatch.setattr(layout_search.LayoutSearch, "too_few", lambda self, counts: [])
    solved: list[int] = []
    real = stage_shardings.MeshSearch.tightened

    def tightened(self: Any, plan: PlannedStage, *more: Any) -> PlannedStage:
        solved.append(self.split.num_microbatches)
        return real(self, plan, *more)

    monkeypatch.setattr(stage_shardings.MeshSearch, "tightened", tightened)
    plan = planned("scanned", 24_000, rows=1024, method="zero3")
    assert plan.estimates.peak_bytes_per_device <= 24_000
    assert plan.num_microbatches == 4 and not {1, 2} & {*solved}


def test_what_surely_takes_longer_within_the_limit_is_not_solved() -> None:
    """And what takes no longer is found as without."""
    step, state = STEPS["perceptron"]
    graph = trace(step, (state, jnp.ones((ROWS, WIDTH)))).graph
    options = Options(memory_limit=5000)
    split = layout_search.LayoutSearch.of(graph, options, CLUSTER, print).split(1)
    search = stage_shardings.MeshSearch.of(split, (8,), options, CLUSTER, None, None)
    free = search.free()
    within = search.tightened(free)
    assert not free.fits and within.fits and within.step_seconds > free.step_seconds
    for most in (within.step_seconds * 1.001, within.step_seconds * 1.5):
        same = search.tightened(free, None, most)
        assert same.fits and same.solution.assignment == within.solution.assignment
    with pytest.raises(TooDear):
        search.tightened(free, None, free.step_seconds * 0.99)


def test_what_cannot_fit_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(Progress, "report", lambda self, line: lines.append(line))
    with pytest.raises(autopar.errors.MemoryLimitError):
        planned("perceptron", 300, remat="none")
    passed = [line for line in lines if "cannot fit" in line]
    assert len(passed) == 5 and "at least" in passed[0]
    splits = [line for line in lines if "splitting" in line]
    assert splits == ["splitting the batch into 32 microbatches"]


@pytest.mark.parametrize("remat", ["none", "auto"])
def test_large_stages_are_planned_at_prices_of_a_byte(
    remat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fit, and say how far they may be from the best: not below what is proven."""
    state = {f"w{i}": jnp.ones((WIDTH, WIDTH)) for i in range(4)}
    x = jnp.ones((ROWS, WIDTH))

    def plan(limit: int | None) -> autopar.Plan:
        options: dict[str, Any] = {"stages": 2, "microbatches": 4, "schedule": "gpipe"}
        options |= {"cluster": CLUSTER, "remat": remat, "memory_limit": limit}
        options["logical_mesh"] = (4,)
        return autopar.plan(perceptron, state, x, **options)

    free = plan(None)
    limit = max(stage.peak_bytes_per_device for stage in free.stages) * 15 // 16
    exact = plan(limit)
    made: list[PlannedStage] = []
    asked: list[tuple[Any, PlannedStage]] = []
    real = stage_shardings.MeshSearch.at_least_price

    def kept(self: Any, free: PlannedStage) -> PlannedStage:
        asked.append((self, free))
        made.append(real(self, free))
        return made[-1]

    monkeypatch.setattr(stage_shardings.MeshSearch, "at_least_price", kept)
    monkeypatch.setattr(stage_shardings, "LARGE_PROBLEM", 0)
    found = plan(limit)
    assert any(stage.fits for stage in made)
    for stage in made:
        assert 0 < stage.solution.lower_bound <= stage.solution.cost
    # What takes longer than what is known elsewhere is not lowered.
    monkeypatch.setattr(stage_shardings.MeshSearch, "lowered", None)
    search, free_stage = asked[0]
    assert made[0].step_seconds > free_stage.step_seconds
    with pytest.raises(TooDear):
        real(search, free_stage, free_stage.step_seconds)
    assert max(stage.peak_bytes_per_device for stage in found.stages) <= limit
    assert found.estimates.step_seconds <= 1.15 * exact.estimates.step_seconds


@pytest.mark.parametrize(("enough", "looks_on"), [(1e6, False), (0.0, True)])
def test_a_large_stage_that_costs_hardly_more_is_looked_at_no_longer(
    enough: float, looks_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{i}": jnp.ones((WIDTH, WIDTH)) for i in range(4)}
    options: dict[str, Any] = {"stages": 2, "microbatches": 4, "schedule": "gpipe"}
    options |= {"cluster": CLUSTER, "remat": "auto", "logical_mesh": (4,)}
    x = jnp.ones((ROWS, WIDTH))
    free = autopar.plan(perceptron, state, x, **options)
    limit = max(stage.peak_bytes_per_device for stage in free.stages) * 7 // 8
    again: list[PlannedStage] = []
    real = stage_shardings.MeshSearch.rematerialized

    def counted(self: Any, planned: PlannedStage) -> PlannedStage:
        again.append(planned)
        return real(self, planned)

    monkeypatch.setattr(stage_shardings.MeshSearch, "rematerialized", counted)
    monkeypatch.setattr(stage_shardings, "LARGE_PROBLEM", 0)
    monkeypatch.setattr(fitting_plan, "ENOUGH_OF_LARGE", enough)
    found = autopar.plan(perceptron, state, x, **options, memory_limit=limit)
    assert max(stage.peak_bytes_per_device for stage in found.stages) <= limit
    assert bool(again) == looks_on


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_count_what_the_program_of_a_stage_needs(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of gradients once, parameters that are cast and gathered for the loop once.

    (Small sums, which XLA:GPU combines and has beside what is added, are not in the rows.)
    """
    layers, width = 6, 128
    monkeypatch.setitem(RULES, GPU, dataclasses.replace(RULES[GPU], combined_bytes=0))

    def loss(state: Any, x: jax.Array) -> jax.Array:
        for w in state.values():
            x = jnp.tanh(x.astype(dtype) @ w.astype(dtype))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(state: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(state, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value

    seen = rows_over_peaks(monkeypatch)
    state = {f"w{i}": jnp.ones((width, width)) for i in range(layers)}
    for method in ("zero2", "zero3", "auto"):
        autopar.plan(
            step,
            state,
            jnp.ones((64, width)),
            cluster=CLUSTER,
            stages=2,
            microbatches=4,
            schedule="1f1b",
            method=method,
        )
    assert seen and 0.9 <= min(seen) <= max(seen) <= 1.15


@pytest.mark.parametrize("bound", ["LARGE_PROBLEM", "SMALL_PROBLEM"])
@pytest.mark.parametrize("fits", [True, False])
def test_large_stages_with_divided_backward_passes_are_planned_as_they_are_quickest(
    fits: bool, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meshes that the stages had; where one does not fit so, those schedules are none.

    Stages that are not small, too, if they fit as they are with any memory.
    """
    state, x = {f"w{i}": jnp.ones((WIDTH, WIDTH)) for i in range(4)}, jnp.ones((ROWS, WIDTH))
    seen: list[tuple[int, ...]] = []
    real = mesh_choice.plan_free

    def kept(place: Any, options: Any, part: Any, mesh: tuple[int, ...]) -> PlannedStage:
        seen.append(mesh)
        planned = real(place, options, part, mesh)
        assert planned.fits
        return dataclasses.replace(planned, fits=fits)

    monkeypatch.setattr(candidates, "plan_free", kept)
    options: dict[str, Any] = {"cluster": CLUSTER, "stages": 2, "microbatches": 4}
    small = autopar.plan(perceptron, state, x, **options)
    assert not seen and any("zb" in c.note for c in small.candidates)
    monkeypatch.setattr(candidates, bound, 0)
    plan = autopar.plan(perceptron, state, x, **options)
    assert len(seen) == (2 if fits else 1)
    assert any("zb" in c.note for c in plan.candidates) == fits
    if fits:
        assert plan.estimates.step_seconds == small.estimates.step_seconds


def uneven_step(weights: Any, tokens: Any) -> Any:
    """Tied embeddings and layers of which eight devices divide no dimension."""

    def loss_fn(weights: Any) -> Any:
        x = weights["embedding"][tokens]
        for layer in weights["layers"]:
            x = x + jnp.tanh(x @ layer)
        logits = x @ weights["embedding"].T
        chosen = jnp.take_along_axis(logits, tokens[:, None], 1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def test_a_padded_program_is_tried_where_the_state_is_not_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers say that nothing fits, and a plan says so too; padded, the state is cut, and fits."""
    monkeypatch.setattr("autopar.passes.planner.layout_search.LONG_PROGRAM", 50)

    def shaped(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    width, vocabulary = 509, 100_003
    layers = [shaped(width, width) for _ in range(4)]
    weights = {"embedding": shaped(vocabulary, width), "layers": layers}
    tokens = jax.ShapeDtypeStruct((64,), jnp.int32)
    asked: dict[str, Any] = {"cluster": "8xh100", "memory_limit": "620MiB"}
    plan = autopar.plan(uneven_step, weights, tokens, **asked)
    assert plan.padding


def test_a_short_program_on_several_nodes_is_planned_for_one_mesh_first() -> None:
    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            made, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
            return jnp.mean(made**2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * gradient, value

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 512, 512), (256, 512))]
    traced = trace(step, tuple(shapes))
    told: list[str] = []
    cluster = autopar.Cluster.preset("dgx-h100", nodes=2)
    found = compile_graph(traced.graph, Options.from_kwargs(), cluster, None, told.append)
    first = next(line for line in told if line.startswith(("choosing", "slicing")))
    assert first.startswith("choosing shardings on a mesh of 16")
    assert any(line.startswith("slicing into") for line in told)
    assert len(found.plan.stages) == 1 and found.plan.num_microbatches == 1
