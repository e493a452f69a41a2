"""What is known elsewhere says which submeshes are not worth pricing, and no stages are lost."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest
from inter_op.chained_layers import step

import autopar
from autopar.base.options import Options
from autopar.passes.planner import automatic_stages
from autopar.passes.planner.auto_stages import NEEDING, StageSearch
from autopar.passes.planner.layer_units import units_of
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.more_microbatches import WORTH_PRICING, worth_trying
from autopar.passes.planner.stage_bound import (
    FEW,
    MIXED,
    NOTHING_ELSEWHERE,
    UNEVEN,
    KnownElsewhere,
)
from autopar.passes.planner.stage_clock import StageWork, step_seconds
from autopar.passes.planner.stage_costs import NOTHING, UnitCost, busy_seconds, evenly, joined
from autopar.passes.planner.stage_pricing import price_stages
from autopar.passes.planner.stages_within import WORTH_PLANNING
from autopar.passes.planner.unit_costs import UnitCosts
from autopar.passes.trace.trace import trace

CLUSTER = autopar.Cluster.preset("p3.16xlarge", nodes=2)
SCHEDULES = "1f1b", "eager_1f1b"
UNIT = UnitCost(1.0, 0.25, 0.2, 0.1, 0, 0, 0, 0)
FREE = 2**60


def stages_of(way: tuple[UnitCost, ...], size: int, count: int) -> StageSearch:
    number = len(way)
    starts, nothing = tuple(range(number)), (0,) * number
    more = (False,) * number, (), {size: [way]}, count, CLUSTER, "none", SCHEDULES
    return StageSearch(starts, nothing, *more)


def within(search: StageSearch) -> float:
    found = search.within(FREE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("seed", range(24))
def test_the_bound_is_below_what_stages_are_expected_to_take(seed: int) -> None:
    """Of units that are not alike, on two to eight stages, by any schedule."""
    random = np.random.default_rng(seed)
    size, count = int(random.choice([2, 4, 8])), int(random.choice([4, 8, 32]))
    way = tuple(
        UNIT._replace(
            seconds=x, forward_seconds=forward * x, rowless_seconds=rowless * x, once_seconds=y
        )
        for x, y, forward, rowless in zip(
            *random.uniform(0.5, 1.5, (2, 16)),
            random.uniform(0.2, 0.35, 16),
            random.uniform(0.0, 0.4, 16),
            strict=True,
        )
    )
    found = stages_of(way, size, count)
    own = within(found)
    alone = KnownElsewhere(1.0).least(joined(way), 16 / size, count, SCHEDULES)
    assert alone <= own * WORTH_PLANNING
    for other in (2 * count, count // 2):
        known = KnownElsewhere(1.0, (other,)).least(joined(way), 16 / size, count, SCHEDULES)
        assert known <= within(found.with_microbatches(other)) * WORTH_PRICING


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_what_a_clock_tells_of_equal_stages(seed: int) -> None:
    """With no number of microbatches and by no schedule it is less."""
    random = np.random.default_rng(seed)
    seconds, number, own = random.uniform(1.0, 2.0), int(random.choice([2, 4, 16])), 16
    total = UNIT._replace(seconds=seconds, forward_seconds=random.uniform(0.2, 0.7) * seconds)
    counts = 4, 8, own, 64, 256
    clocked = dict[int, float]()
    for count in counts:
        part = total.with_rows(own / count).shared_by(number)
        work = StageWork(part.forward_seconds, part.backward_seconds, part.once_seconds, 0.0)
        tried = (step_seconds(name, [work] * number, count) for name in NEEDING["eager_1f1b"])
        few = count <= FEW * number
        margin = WORTH_PLANNING if count == own else WORTH_PRICING
        clocked[count] = margin * min(tried) / (UNEVEN if few else 1.0)
    told = KnownElsewhere(1.0, counts).least(total, number, own, SCHEDULES)
    assert told == pytest.approx(min(clocked.values()))


@pytest.mark.parametrize("count", [4, 16, 64])
def test_stages_take_no_less_than_keeps_devices_busy(count: int) -> None:
    random = np.random.default_rng(count)
    ways = {
        size: [tuple(UNIT._replace(seconds=x / size) for x in random.uniform(0.5, 1.5, 16))]
        for size in (1, 2, 4, 8)
    }
    search = dataclasses.replace(stages_of(ways[8][0], 8, count), ways=ways)
    busy = count * busy_seconds(ways) / CLUSTER.num_devices
    assert busy <= within(search)
    assert search.within(FREE, 0.99 * busy) is None
    assert math.isinf(search.bound(FREE, 0.99 * busy))


def test_stages_of_many_units_are_told_by_a_search() -> None:
    many = stages_of((UNIT,) * 32, 8, 16)
    own = within(many)
    assert many.are_alike and not stages_of((UNIT,) * 8, 8, 16).are_alike
    assert KnownElsewhere(1.05 * own).beaten_with(many, [16], FREE) == [16]
    assert KnownElsewhere(0.98 * own).beaten_with(many, [16], FREE) == []


def test_sizes_are_priced_if_stages_may_be_quicker_on_one() -> None:
    """On others that lack hardly more, there may be some of the stages then."""
    seconds = {1: 3.0, 2: 1.04, 4: 0.99, 8: MIXED}
    asked = dict[int, float]()

    def least(size: int, enough: float) -> float:
        asked[size] = enough
        return seconds[size]

    assert KnownElsewhere(1.0).hopeful([1, 2, 4, 8], least) == [2, 4]
    assert {*asked.values()} == {MIXED}
    assert KnownElsewhere(1.0).hopeful([1, 2, 8], least) == []
    assert NOTHING_ELSEWHERE.hopeful([1, 2, 8], least) == [1, 2, 8]


def test_larger_sizes_than_hopeful_ones_are_not_asked_for() -> None:
    """More devices send more; what they take is known of plans, which take time to find."""
    seconds, asked = {1: 3.0, 2: 0.98, 4: 1.01, 8: 1.2, 16: 1.3}, list[int]()

    def least(size: int, enough: float) -> float:
        asked.append(size)
        return seconds[size]

    assert KnownElsewhere(1.0).hopeful([*seconds], least) == [2, 4]
    assert asked == [1, 2, 1, 2, 4, 8]
    # Among these the one that may be quicker comes later, or has other factors.
    for seconds, hopeful in (
        ({1: 1.04, 2: 1.06, 4: 0.9}, [1, 4]),
        ({8: 1.02, 16: 0.99, 24: 3.0, 32: 1.01, 48: 0.5}, [8, 16, 32]),
    ):
        assert KnownElsewhere(1.0).hopeful([*seconds], least) == hopeful


def test_fewer_devices_bound_those_that_they_divide() -> None:
    """Twenty-four of them compute no quicker than eight where nothing divides by three."""
    shapes = [jax.ShapeDtypeStruct((4096, 4096), "float32")] * 4
    graph = trace(step, (shapes, jax.ShapeDtypeStruct((65536, 4096), "float32"))).graph
    cluster = autopar.Cluster.preset("p3.16xlarge", nodes=12)
    search = LayoutSearch.of(graph, Options(stages="auto"), cluster, lambda message: None)
    split = search.split(8, is_pipeline=True)
    units = units_of(split)
    assert units is not None
    costs = UnitCosts(units, units.typical_graphs(split), search.options, cluster, 8)
    for size in (8, 16, 24, 32):
        told = min(x.seconds for x in costs.least_totals(size, known=False))
        assert told <= min(x.seconds for x in costs.least_totals(size))


def test_typical_units_are_cut_as_among_all() -> None:
    """Also where layers that look alike are not cut from each other."""
    shapes = [jax.ShapeDtypeStruct((64, 64), "float32")] * 9
    graph = trace(step, (shapes, jax.ShapeDtypeStruct((64, 64), "float32"))).graph
    search = LayoutSearch.of(graph, Options(stages="auto"), CLUSTER, lambda message: None)
    split = search.split(8, is_pipeline=True)
    units = units_of(split)
    assert units is not None and 2 * len(units.typical) + 1 < len(units.starts)
    alone, among_all = units.typical_graphs(split), units.graphs_of(units.sliced(split))
    assert [*alone] == [*among_all]
    for kind, unit in alone.items():
        other = among_all[kind]
        assert str(unit.graph.jaxpr) == str(other.graph.jaxpr)
        assert unit.tasks == other.tasks and unit.inputs == other.inputs
        received = zip(unit.graph.inputs, other.graph.inputs, strict=True)
        assert all(a.role == b.role and a.batch_axis == b.batch_axis for a, b in received)


def test_what_stages_take_for_the_first_microbatch_is_bounded_too() -> None:
    """The objective of the search is above what they take, by the others' turns at the most."""
    known = KnownElsewhere(10.0)
    assert known.longest(8, 5) == 15.0
    total = UNIT._replace(seconds=5.0, once_seconds=0.0)
    assert evenly(total, 5, 8) <= known.longest(8, 5)
    assert evenly(total.shared_by(2), 5, 8) == evenly(total, 5, 8) / 2
    assert NOTHING.shared_by(3) == NOTHING


def test_fewer_microbatches_are_found_where_the_first_number_promises_nothing() -> None:
    """What takes hardly any longer with few rows makes many microbatches slow."""
    unit = UNIT._replace(rowless_seconds=0.99, once_seconds=0.0)
    found = stages_of((unit,) * 16, 8, 64)
    counts, own = (2, 4, 8, 16, 32), within(found)
    quick = {count: within(found.with_microbatches(count)) for count in counts}
    best = min(quick.values())
    assert best * 1.06 < own
    good = worth_trying(found, counts, FREE, best * 1.03, own)
    assert good and quick[good[0]] <= 1.05 * best
    assert worth_trying(found, counts, FREE, best * 1.01, own) == []


def test_backward_passes_are_divided_where_that_may_fit() -> None:
    """Two stages of eight units: in the second one, what two microbatches leave waits by ZB-H1."""
    unit = UNIT._replace(forward_seconds=0.3, once_seconds=0.0, bytes_working=10, bytes_waiting=5)
    found = stages_of((unit,) * 16, 8, 4)
    at_once = dataclasses.replace(found, schedules=("1f1b",))
    needs = 10 + 2 * 8 * 5
    limited, alone = found.within(needs - 1), at_once.within(needs - 1)
    assert limited is not None and alone is not None
    assert within(found) < limited[1] == alone[1]
    assert limited[0].may_divide, "as far as can be told"
    few = found.within(needs // 2)
    assert few is not None and not few[0].may_divide
    divided = found.within(needs)
    assert divided is not None and divided[1] < limited[1]


def test_the_likely_sizes_of_submesh_are_priced_first() -> None:
    shapes = [jax.ShapeDtypeStruct((512, 512), "float32")] * 4
    graph = trace(step, (shapes, jax.ShapeDtypeStruct((64, 512), "float32"))).graph
    search = LayoutSearch.of(graph, Options(stages="auto"), CLUSTER, lambda message: None)
    split, said = search.split(8, is_pipeline=True), list[str]()
    price_stages(split, search.options, CLUSTER, said.append, likely=[4])
    sizes = [int(line.split()[-2]) for line in said if "costs of" in line]
    assert sizes[0] == 4 and sizes[1:] == sorted(sizes[1:]) != []


def test_stages_on_a_node_are_priced_first() -> None:
    """Of smaller submeshes these say whether they need be."""
    shapes = [jax.ShapeDtypeStruct((512, 512), "float32")] * 4
    graph = trace(step, (shapes, jax.ShapeDtypeStruct((64, 512), "float32"))).graph
    said = list[str]()
    search = LayoutSearch.of(graph, Options(stages="auto"), CLUSTER, said.append)
    assert search.promise_of_stages() < math.inf
    assert next(x for x in said if "costs of" in x).endswith(" on 8 devices")


@pytest.mark.parametrize("is_short", [False, True])
def test_what_memory_makes_slow_is_planned_before_others_are_priced(
    is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [jax.ShapeDtypeStruct((512, 512), "float32")] * 4
    graph = trace(step, (shapes, jax.ShapeDtypeStruct((64, 512), "float32"))).graph
    options, said = Options(stages="auto", schedule="1f1b"), list[str]()
    search = LayoutSearch.of(graph, options, CLUSTER, said.append)
    monkeypatch.setattr(automatic_stages, "SHORT_OF_MEMORY", 0.5 if is_short else 1.25)
    looked = list[bool]()

    def noted(*asked: object) -> list[int]:
        looked.append(any("planning stage" in line for line in said))
        return []

    monkeypatch.setattr(automatic_stages, "worth_trying", noted)
    assert search.automatic_pipelines()
    assert looked == [is_short]


def test_nothing_is_priced_where_stages_of_whole_units_are_slower() -> None:
    """Though those that share units evenly are not."""
    shapes = [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 22
    graph = trace(step, (shapes, jax.ShapeDtypeStruct((4096, 1024), "float32"))).graph
    search = LayoutSearch.of(graph, Options(stages="auto"), CLUSTER, lambda message: None)
    split, said = search.split(8, is_pipeline=True), list[str]()
    everything = price_stages(split, search.options, CLUSTER, said.append)
    assert everything is not None
    promise, costs = within(everything), [line for line in said if "costs of" in line]
    assert costs
    for known, priced in ((promise * 1.1, True), (promise / 1.05, False)):
        said.clear()
        price_stages(split, search.options, CLUSTER, said.append, KnownElsewhere(known))
        assert any("costs of" in line for line in said) == priced


def test_what_is_quicker_than_all_that_is_known_is_found_as_without() -> None:
    shapes = [jax.ShapeDtypeStruct((512, 512), "float32")] * 4
    graph = trace(step, (shapes, jax.ShapeDtypeStruct((64, 512), "float32"))).graph
    slow = dataclasses.replace(CLUSTER.inter_node, bandwidth=1e7)
    cluster, said = dataclasses.replace(CLUSTER, inter_node=slow), list[str]()
    search = LayoutSearch.of(graph, Options(stages="auto"), cluster, lambda message: None)
    split = search.split(8, is_pipeline=True)

    def priced(elsewhere: KnownElsewhere) -> tuple[StageSearch, float]:
        said.clear()
        made = price_stages(split, search.options, cluster, said.append, elsewhere)
        assert made is not None
        found = made.within(FREE)
        return made, math.inf if found is None else found[1]

    everything, promise = priced(NOTHING_ELSEWHERE)
    assert promise < math.inf and any(everything.ways.values())
    counts = 8, 16, 32
    _, same = priced(KnownElsewhere(1.03 * promise, counts))
    assert same == promise
    nothing, none = priced(KnownElsewhere(0.001 * promise, counts))
    assert math.isinf(none) and not any(nothing.ways.values())
    assert not any("costs of" in line for line in said)
    assert worth_trying(nothing, [16, 32], FREE, 0.001 * promise, math.inf) == []
