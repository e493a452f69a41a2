"""What blocks cost, shared out among the layers that they are made of."""

import math

import numpy as np

from autopar.passes.planner.layer_units import FinerUnits, Units
from autopar.passes.planner.stage_costs import UnitCost, with_halfway
from autopar.passes.planner.stage_options import RangeTotals, StageTransfers
from autopar.passes.slicing.stage_graphs import Layer

UNIT = UnitCost(8.0, 2.0, 0.4, 1.0, 100, 10, 30, 8)
QUICK = UNIT._replace(seconds=6.0, bytes_fixed=300, bytes_working=40)


def finer(layers: list[Layer], boundaries: tuple[int, ...]) -> FinerUnits:
    return FinerUnits(Units(tuple(layers), (0, *boundaries)))


def layer(flops: int, weights: int, *, inside: bool) -> Layer:
    return Layer((), flops, 0, 64, "", "", inside=inside, weight_bytes=weights)


BLOCKS = [
    layer(3, 1, inside=True),
    layer(1, 3, inside=False),
    layer(1, 0, inside=True),
    layer(1, 0, inside=False),
]


def test_layers_together_cost_what_their_blocks_do() -> None:
    found = finer(BLOCKS, (2,))
    assert found.starts == [0, 1, 2, 3] and found.inside == [False, True, False, True]
    assert [found.first_of(unit) for unit in range(2)] == [0, 2]
    shared = found.shared_out((UNIT, QUICK))
    for unit, cost in enumerate((UNIT, QUICK)):
        layers = shared[2 * unit : 2 * unit + 2]
        for name in ("seconds", "forward_seconds", "once_seconds", "bytes_per_microbatch"):
            assert math.isclose(sum(getattr(x, name) for x in layers), getattr(cost, name))
        assert sum(x.bytes_fixed for x in layers) >= cost.bytes_fixed
        assert {x.bytes_working for x in layers} == {cost.bytes_working}
    first, second = shared[:2]
    assert (first.seconds, second.seconds) == (6.0, 2.0)  # by FLOPs
    assert (first.bytes_fixed, second.bytes_fixed) == (25, 75)  # by parameters


def test_many_layers_stay_in_their_blocks() -> None:
    found = finer(BLOCKS * 20, tuple(range(2, 80, 2)))
    way = (UNIT,) * 40
    assert len(found.starts) == 40 and not any(found.inside)
    assert found.shared_out(way) is way


def test_a_stage_that_begins_inside_of_a_block_keeps_what_it_receives() -> None:
    found = finer(BLOCKS, (2,))
    totals = RangeTotals.of([found.shared_out((UNIT, UNIT))])
    kept = [5 * inside for inside in found.inside]
    transfers = StageTransfers([0.0] * 4, [5] * 4, kept, [])
    options = totals.options(1, transfers, "none", is_hidden=False)
    each = options.bytes_per_microbatch[0]
    assert each[0, 4] == 2 * UNIT.bytes_per_microbatch
    assert each[1, 4] == UNIT.bytes_per_microbatch + 5
    assert np.isinf(options.seconds[0, 3, 2])


def test_between_two_ways_half_of_the_layers_are_run_in_each() -> None:
    ways = [((4,), (UNIT,)), ((2, 2), (UNIT,)), ((4,), (QUICK,))]
    *known, (mesh, (between,)) = with_halfway(ways)
    assert known == ways and mesh == (4,)
    assert (between.seconds, between.bytes_fixed, between.bytes_working) == (7.0, 200, 40)
