"""One mesh beside stages: from how many microbatches on it is planned, and on which shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.base.options import Options
from autopar.passes.planner import meshes_in_turn, stage_shardings
from autopar.passes.planner.auto_stages import StageSearch
from autopar.passes.planner.known_costs import KnownCosts
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.meshes_in_turn import plan_meshes
from autopar.passes.planner.one_mesh import (
    OneMeshBound,
    OneMeshCosts,
    find_bound,
    working_within,
    worth_pricing,
)
from autopar.passes.planner.planned_stage import PlannedStage
from autopar.passes.planner.search_so_far import SearchSoFar
from autopar.passes.planner.stage_costs import UnitCost
from autopar.passes.planner.stage_shardings import MeshSearch
from autopar.passes.planner.unit_costs import UnitCosts
from autopar.passes.sharding.peak_memory import MemoryPeak
from autopar.passes.trace.trace import trace

MESH = (2, 4)
# Of the whole batch at once: 8 s, 1 of them however few the rows; 20 bytes stay, 64 hold rows.
ALL_ROWS = UnitCost(8.0, 2.0, 1.0, 0.5, 20, 32, 40, 8)


class Priced:
    """What all layers cost with some microbatches: in two ways on a mesh, and a guess beside."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.total = ALL_ROWS.with_rows(1 / count)
        self.seconds = count * self.total.seconds + self.total.once_seconds

    def seconds_by_mesh(self, size: int, longest: float) -> dict[tuple[int, ...], float]:
        return {MESH: 0.99 * self.seconds, (size,): 2 * self.seconds}

    def totals(self, size: int) -> list[tuple[tuple[int, ...], UnitCost]]:
        assert size == math.prod(MESH)
        return [(MESH, self.total), (MESH, self.total._replace(seconds=100.0))]


class Layers:
    """All layers on one mesh with some number of microbatches; the numbers that were priced."""

    def __init__(self) -> None:
        self.priced: list[int] = []

    def __call__(self, count: int) -> OneMeshCosts:
        self.priced.append(count)
        return OneMeshCosts(cast(UnitCosts, Priced(count)), math.prod(MESH))


@pytest.mark.parametrize(
    ("limit", "best", "fewest", "priced"),
    [
        (92, 8.0, 1, [1]),  # the whole batch fits, and is not too slow
        (60, 30.0, 2, [1, 2]),
        (40, 30.0, 4, [1, 2]),  # told by two, which the whole batch says too little of
        (60, 8.0, None, [1, 2]),  # with two microbatches it takes 9.5 s
        (92, 6.0, None, [1]),
        (27, 30.0, None, [1, 2]),  # what cannot fit is not priced
    ],
)
def test_the_fewest_microbatches_on_one_mesh(
    limit: int, best: float, fewest: int | None, priced: list[int]
) -> None:
    layers = Layers()
    found = find_bound([1, 2, 4, 8, 16], best, layers, limit)
    assert (None if found is None else found.fewest) == fewest
    assert layers.priced == priced
    if found is not None:
        seconds = Priced(found.fewest).seconds
        known = Priced(priced[-1]).seconds
        longer = seconds / (0.99 * known)  # within the memory than with any
        guess = pytest.approx(2 * known * longer)
        assert found.expected == {MESH: seconds, (8,): guess}, "within the memory, or a guess"


@pytest.mark.parametrize(("limit", "priced"), [(46, [2]), (39, [2, 4])])
def test_what_surely_fits_with_half_the_rows_is_not_priced_again(
    limit: int, priced: list[int]
) -> None:
    """Four microbatches need 38 bytes."""
    layers = Layers()
    found = find_bound([2, 4, 8, 16], 30.0, layers, limit)
    assert found is not None
    assert (found.fewest, layers.priced) == (4, priced)
    assert found.expected[MESH] == Priced(4).seconds


@pytest.mark.parametrize(
    ("needs", "even", "fewest", "priced"),
    [
        # 64 bytes for each microbatch of the first, and what no number of them changes.
        (lambda count: 64 // count, 0, 8, [1, 16, 4, 8]),
        (lambda count: 64 // count + 4, 0, 16, [1, 16, 4, 8]),
        (lambda count: 64 // count + 9, 0, None, [1, 16]),  # not even with the most
        (lambda count: 9 if count == 1 else 0, 0, 2, [1, 16, 4, 2]),
        # More than four leave devices without rows, and may need more.
        (lambda count: 8 if count == 4 else 9, 4, 4, [1, 4, 2]),
        (lambda count: 8 if count == 16 else 9, 4, 16, [1, 4, 16, 4, 8]),
        (lambda count: 9, 4, None, [1, 4, 16]),
    ],
)
def test_where_nothing_fits_elsewhere_the_most_are_priced_next(
    needs: Any, even: int, fewest: int | None, priced: list[int]
) -> None:
    asked: list[int] = []

    class One(Priced):
        def totals(self, size: int) -> list[tuple[tuple[int, ...], UnitCost]]:
            rowless = UnitCost(1.0, 0.5, 0.0, 0.0, 0, 0, needs(self.count), 0)
            # However few the rows, a way that is bound from below may do.
            return [(MESH, rowless), ((8,), rowless._replace(bytes_working=100))]

    def layers(count: int) -> OneMeshCosts:
        asked.append(count)
        one = One(count)
        return OneMeshCosts(cast(UnitCosts, one), math.prod(MESH))

    found = find_bound([1, 2, 4, 8, 16], math.inf, layers, 8, even)
    assert (None if found is None else found.fewest) == fewest
    assert asked == priced
    assert layers(16).smallest() == (MESH,)


def test_where_no_state_fits_no_shape_is_smallest() -> None:
    class Nothing(Priced):
        def totals(self, size: int) -> list[tuple[tuple[int, ...], UnitCost]]:
            return []

    assert OneMeshCosts(cast(UnitCosts, Nothing(1)), 8).smallest() == ()


def test_layers_that_are_not_known_bound_nothing() -> None:
    assert find_bound([4, 8], 1.0, lambda count: None, 1) == OneMeshBound(4)


ON_PARTS = ALL_ROWS.with_rows(1 / 8)  # of eight microbatches, on a quarter of the devices
CLUSTER = autopar.Cluster.preset("dgx-h100")


@pytest.mark.parametrize(
    ("best", "limit", "state", "counts"),
    [
        # On all eight devices (8 * (1 + 7 / 8) + 0.5) / 4 = 3.9 s, less with fewer microbatches.
        (100.0, 1000, 0, [1, 2, 4, 8, 16]),
        (3.9, 1000, 0, [1, 2, 4, 8]),
        (1.8, 1000, 0, [1]),  # without microbatches it may take a quarter longer
        (1.0, 1000, 0, []),
        # A microbatch of eight keeps 4 bytes on 2 of 8 devices: 8 bytes, at least half of them.
        (100.0, 8, 40, [4, 8, 16]),
        (100.0, 8, 62, [16]),
        (100.0, 8, 64, []),
        # With 2 devices for 8 of 16 microbatches 2 * (20 + 2 + 8) bytes, 80% of them at least; the
        # whole batch at once needs no sums: the state, 2 * 8 bytes to work with, half of 2 * 32.
        (100.0, 8, 0, [1, 4, 8, 16]),
        (100.0, 7, 8, [1, 8, 16]),
        (100.0, 7, 9, [8, 16]),
        (100.0, 5, 0, []),
    ],
)
def test_what_layers_cost_on_parts_says_which_microbatches_are_priced(
    best: float, limit: int, state: int, counts: list[int]
) -> None:
    stages = StageSearch((0,), (0,), (False,), (), {2: [(ON_PARTS,)], 4: []}, 8, CLUSTER, "none")
    assert worth_pricing([1, 2, 4, 8, 16], best, stages, limit, state) == counts
    nothing = StageSearch((0,), (0,), (False,), (), {2: []}, 8, CLUSTER, "none")
    assert worth_pricing([1, 2], best, nothing, limit, state) == [1, 2]


def test_what_a_mesh_works_on_bounds_computing_again() -> None:
    """20 bytes stay; 40 are there for the whole batch, 8 of them however few the rows."""
    priced = {1: Layers()(1), 2: None}
    assert working_within([1, 2, 4, 8], priced, 60) == [1, 2, 4, 8]
    assert working_within([1, 2, 4, 8], priced, 31) == [4, 8]
    assert working_within([1, 2, 4, 8], priced, 27) == [8]
    assert working_within([1, 2, 4, 8], priced, 10) == [8], "layers may need less together"
    assert working_within([1, 2], {2: None}, 0) == [1, 2]


def step(w: Any, x: jax.Array) -> Any:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * gradient, loss


def test_meshes_go_in_the_order_of_what_they_are_expected_to_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And where they would hardly take less they are not planned."""
    cluster = autopar.Cluster.preset("dgx-h100")
    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), "float32")
    graph = trace(step, shapes).graph
    split = LayoutSearch.of(graph, Options(), cluster, lambda message: None).split(1)
    meshes, begun = [(8,), (4, 2), (2, 4)], list[str]()
    expected = {(8,): 300.0, (4, 2): 2.0, (2, 4): 400.0}

    def planned(known: dict[tuple[int, ...], float]) -> list[tuple[int, ...]]:
        begun.clear()
        so_far = SearchSoFar(expected=known)
        found = plan_meshes(split, meshes, Options(), cluster, begun.append, others=so_far)
        return [each.mesh for each in found]

    assert planned({}) == meshes
    assert planned(expected) == [(4, 2)]
    assert "4 x 2" in begun[0]
    monkeypatch.setattr(meshes_in_turn, "ENOUGH_OF_LARGE", 1e-6)
    assert planned(expected) == meshes
    assert "4 x 2" in begun[0] and "mesh of 8," in begun[1]


def test_meshes_that_need_no_less_than_one_that_does_not_fit_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If more microbatches can be tried; then not more than two are, and of the others none."""
    cluster = autopar.Cluster.preset("dgx-h100")
    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), "float32")
    graph, options = trace(step, shapes).graph, Options.from_kwargs(memory_limit=1000)
    split = LayoutSearch.of(graph, options, cluster, lambda message: None).split(1)
    meshes = [(8,), (4, 2), (2, 4)]
    monkeypatch.setattr(stage_shardings, "LARGE_PROBLEM", 0)
    monkeypatch.setattr(meshes_in_turn, "HOPELESS", math.inf)

    def solved(so_far: SearchSoFar) -> int:
        said = list[str]()
        found = plan_meshes(split, meshes, options, cluster, said.append, others=so_far)
        assert found and not any(each.fits for each in found)
        return sum("are missing" in message for message in said)

    waiting = SearchSoFar(more_microbatches=True)
    assert solved(waiting) == 2
    assert solved(waiting._replace(need=dict.fromkeys(meshes, 10))) == 1
    assert solved(waiting._replace(need={(8,): 10, (4, 2): 9, (2, 4): 8})) == 2
    assert solved(SearchSoFar(need=dict.fromkeys(meshes, 10))) == 3


class Within:
    """Plans a large step on three logical meshes, on which all need 22,532 bytes.

    What is planned within the limit takes `slower` times as long, and fits or does not. `others`
    are meshes on which it takes so many times as long, and so many bytes.
    """

    others: Mapping[tuple[int, ...], tuple[float, int]] = MappingProxyType({})

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int, slower: float, fits: bool):
        self.slower, self.fits, self.again = slower, fits, list[PlannedStage]()
        self.solved = self.chosen_for_bytes = 0
        self.options = Options.from_kwargs(memory_limit=limit)
        monkeypatch.setattr(stage_shardings, "LARGE_PROBLEM", 0)
        monkeypatch.setattr(meshes_in_turn, "HOPELESS", math.inf)
        monkeypatch.setattr(
            meshes_in_turn, "_whole_seconds", lambda planned, _: planned.step_seconds
        )
        real = MeshSearch.attempt

        def attempt(search: MeshSearch, memory: int | None, remat: bool) -> PlannedStage:
            first = real(search, memory, remat)
            times, size = self.others.get(first.mesh, (1.0, first.peak.bytes))
            solution = first.solution
            bound = round(solution.lower_bound * times)
            solution = replace(solution, cost=round(solution.cost * times), lower_bound=bound)
            return replace(first, solution=solution, peak=MemoryPeak(size, ()))

        monkeypatch.setattr(MeshSearch, "attempt", attempt)
        monkeypatch.setattr(MeshSearch, "tightened", self.tightened)
        monkeypatch.setattr(MeshSearch, "dear", self.dear)

    def tightened(self, first: PlannedStage, tries: object, at_most: float) -> PlannedStage:
        self.solved += 1
        cost = round(first.solution.cost * self.slower)
        return replace(first, solution=replace(first.solution, cost=cost), fits=self.fits)

    def dear(self, first: PlannedStage, number: int) -> PlannedStage:
        self.chosen_for_bytes += 1
        return first

    def plan(self, again: float, expected: float = 1e-9) -> list[PlannedStage]:
        """With what takes so long when it computes values again."""
        cluster, shape = autopar.Cluster.preset("dgx-h100"), (64, 64)
        shapes = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)
        graph = trace(step, shapes).graph
        split = LayoutSearch.of(graph, self.options, cluster, lambda message: None).split(1)
        meshes = [(8,), (4, 2), (2, 4)]

        def computing_again(free: PlannedStage) -> float:
            self.again.append(free)
            return again

        others = SearchSoFar(
            more_microbatches=True,
            expected=dict.fromkeys(meshes, expected),
            again=computing_again,
        )
        found = plan_meshes(
            split, meshes, self.options, cluster, lambda message: None, others=others
        )
        assert all(self.others or each.peak.bytes == 22_532 for each in found)
        return found


def test_meshes_are_left_where_what_needs_too_much_takes_longer_than_what_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of them say so; with nothing that fits, all are solved within the limit."""
    within = Within(monkeypatch, 10_000, slower=2.0, fits=False)
    within.plan(again=1.5 * 6.40811e-06)
    assert (within.solved, within.chosen_for_bytes, len(within.again)) == (2, 0, 1)
    within = Within(monkeypatch, 10_000, slower=2.0, fits=False)
    within.plan(again=math.inf)
    assert within.solved == 3 and within.chosen_for_bytes > 0


def test_of_many_nodes_bytes_have_a_price_unless_far_too_much_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    priced = list[PlannedStage]()

    def at_least_price(search: MeshSearch, free: PlannedStage, at_most: float) -> PlannedStage:
        priced.append(free)
        return replace(free, fits=True)

    monkeypatch.setattr(stage_shardings, "MANY_NODES", 0)
    monkeypatch.setattr(MeshSearch, "at_least_price", at_least_price)
    near = Within(monkeypatch, 22_000, slower=1.0, fits=True)
    assert any(each.fits for each in near.plan(again=math.inf))
    assert near.solved == 0 and len(priced) == 1
    far = Within(monkeypatch, 11_000, slower=1.0, fits=True)
    far.plan(again=math.inf)
    assert far.solved == 1 and len(priced) == 1


def test_where_little_is_missing_other_shards_come_before_computing_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And if these take hardly longer than with any memory, nothing else is looked at."""
    within = Within(monkeypatch, 22_000, slower=1.004, fits=True)
    within.plan(again=math.inf)
    assert (within.solved, within.again) == (1, [])
    within = Within(monkeypatch, 22_000, slower=1.02, fits=True)
    within.plan(again=math.inf)
    assert (within.solved, len(within.again)) == (1, 1)
    # Nor is it asked what a slower mesh, on which much is missing, would take.
    within = Within(monkeypatch, 22_000, slower=1.004, fits=True)
    within.others = dict.fromkeys([(4, 2), (2, 4)], (1.2, 40_000))
    within.plan(again=math.inf, expected=0.0)
    assert (within.solved, within.again) == (1, [])
    within = Within(monkeypatch, 20_000, slower=1.004, fits=True)
    within.plan(again=math.inf)
    assert (within.solved, len(within.again)) == (1, 1), "more is missing"


def test_layers_tell_of_more_microbatches_than_they_were_priced_with() -> None:
    """With a quarter of the rows in each: the state stays, and what is as long for few rows."""
    costs, layers = OneMeshCosts(cast(UnitCosts, Priced(2)), 8), ALL_ROWS.with_rows(1 / 8)
    (mesh,) = costs.needed(8, 2)
    assert mesh == MESH and costs.needed(8, 2)[mesh] == pytest.approx(layers.bytes_for_one, abs=1)
    seconds = pytest.approx(8 * layers.seconds + layers.once_seconds)
    slower = costs.by_mesh(math.inf)[8,]
    assert costs.expected(8, 2, limit=1000) == {MESH: seconds, (8,): slower}, "not priced with less"
    assert costs.expected(8, 2, limit=0) == {MESH: seconds, (8,): slower}, "with any memory"


def test_layers_tell_of_fewer_microbatches_than_they_were_priced_with() -> None:
    """As the next ones that were priced do, with any memory."""
    costs = {count: OneMeshCosts(cast(UnitCosts, Priced(count)), 8) for count in (4, 16)}
    known = KnownCosts.nothing()
    assert known.with_fewer(2) == {}
    known.one_mesh.update({**costs, 2: None})
    layers = ALL_ROWS.with_rows(1 / 2)
    seconds = 2 * layers.seconds + layers.once_seconds
    assert known.with_fewer(2)[MESH] == pytest.approx(seconds)
    assert known.with_fewer(2) == costs[4].expected(2, 4, limit=10**9)
    assert known.with_fewer(8) == costs[16].expected(8, 16, limit=10**9)
    assert known.with_fewer(16) == {}


def test_of_shapes_that_need_as_little_the_two_quickest_are_tried_last() -> None:
    def way(mesh: tuple[int, ...], seconds: float, kept: int, working: int) -> Any:
        return mesh, UnitCost(seconds, 0.0, 0.0, 0.0, 10, kept, working, 0)

    class Ways(Priced):
        def totals(self, size: int) -> list[tuple[tuple[int, ...], UnitCost]]:
            return [
                way((8,), 1.0, 700, 500),  # quick, and large
                way((8,), 9.0, 500, 490),
                way((4, 2), 7.0, 500, 491),
                way((2, 4), 8.0, 500, 490),
                way((1, 8), 2.0, 900, 400),  # small, if nothing is kept
            ]

    costs = OneMeshCosts(cast(UnitCosts, Ways(1)), 8)
    assert costs.smallest() == ((4, 2), (2, 4))
    assert costs.smallest(keeps=False) == ((1, 8),)
