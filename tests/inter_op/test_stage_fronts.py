"""Stages found from what units cost on submeshes, at several prices of memory."""

import dataclasses
import math

import pytest

import autopar
from autopar.base.transfer_costs import seconds_across
from autopar.passes.planner.auto_stages import StageSearch
from autopar.passes.planner.more_microbatches import doubled
from autopar.passes.planner.sent_once import OnceSent
from autopar.passes.planner.stage_costs import UnitCost, in_equal_stages

CLUSTER = autopar.Cluster.preset("p3.16xlarge", nodes=2)
QUICK = UnitCost(1.0, 0.25, 0.2, 0.0, 40, 10, 20, 8)
SMALL = UnitCost(1.5, 0.25, 0.2, 0.0, 10, 10, 20, 8)


def search(units: int, *ways: tuple[UnitCost, ...], count: int = 8) -> StageSearch:
    """On eight devices a unit takes half of what it takes on four."""
    halved = [tuple(x._replace(seconds=x.seconds / 2) for x in way) for way in ways]
    starts, crossing = tuple(range(units)), (0,) * units
    known = {4: list(ways), 8: halved}
    return StageSearch(starts, crossing, (False,) * units, (), known, count, CLUSTER, "none")


def test_units_are_run_smaller_only_where_memory_is_short() -> None:
    found = search(4, (QUICK,) * 4, (SMALL,) * 4)
    free = found.within(10_000)
    assert free is not None
    assert free[0].devices == (8, 8)
    assert free[1] == 8 * 1.0 + 1.0  # eight microbatches of two units, then the other stage
    # Two units of the quick kind: 80 + 20, and two microbatches in flight of 20 each.
    assert found.within(140) == free
    tight = found.within(139)
    assert tight is not None
    assert free[1] < tight[1] <= 8 * 1.5 + 1.5
    assert found.within(20) is None


def test_more_microbatches_may_fit() -> None:
    found = search(4, (SMALL,) * 4)
    assert found.within(59) is None  # one unit needs 30 and 10 for each in flight, two need 60
    assert found.with_microbatches(32).within(59) is not None
    assert [*doubled({64}, 8)] == [8, 16, 32, 64]
    assert [*doubled({24}, 8)] == [8]


@pytest.mark.parametrize(("odd", "regular"), [(1.04, True), (6.0, False)])
def test_stages_of_many_units_are_alike_where_that_is_about_as_good(
    odd: float, regular: bool
) -> None:
    """One unit takes a little longer, or so long that its stage must have fewer."""
    units = [QUICK] * 34
    units[5] = QUICK._replace(seconds=odd)
    found = search(34, tuple(units)).within(10_000)
    assert found is not None
    assert (found[0].boundaries == (17,)) is regular


def test_computing_again_needs_what_it_says() -> None:
    found = dataclasses.replace(search(4, (QUICK,) * 4), remat="auto")
    free, tight = found.within(140), found.within(99)
    assert free is not None and tight is not None
    assert not any(free[0].remat)
    assert any(tight[0].remat)
    assert tight[1] > free[1]


def test_the_schedule_hides_transfers_where_more_microbatches_in_flight_fit() -> None:
    """Four stages; what one sends takes as long as a fifth of its work."""
    apart = dataclasses.replace(search(4, (QUICK,) * 4, count=64), schedules=("1f1b", "eager_1f1b"))
    apart = dataclasses.replace(apart, ways={4: apart.ways[4]}, crossing=(600_000_000,) * 4)
    waits = dataclasses.replace(apart, schedules=("1f1b",))
    free, waiting = apart.within(10_000), waits.within(10_000)
    assert free is not None and waiting is not None
    assert free[0].schedule == "eager_1f1b"
    assert free[1] < waiting[1]
    # The first stage: 60 bytes and seven microbatches in flight, or four.
    assert apart.within(130) == free
    tight = apart.within(129)
    assert tight is not None
    assert tight[0].schedule == "1f1b"
    assert free[1] < tight[1] <= waiting[1]


@pytest.mark.parametrize(
    ("home", "others", "times", "is_awaited", "hidden"),
    [
        # The second stage has its first microbatch after 0.8 s, and is done 0.2 s before the first.
        (0, (3,), 2, True, math.inf),
        (0, (3,), 4, True, 0.8),
        (0, (2, 3), 4, True, 0.8),  # once, for both
        (3, (0,), 2, True, 0.0),
        (0, (3,), 4, False, 0.2),
        (0, (1, 2, 3), 4, False, 0.2),
        (3, (0,), 4, False, 0.0),
        (0, (1,), 4, True, math.inf),
    ],
)
def test_what_passes_once_a_step_is_waited_for_where_nothing_hides_it(
    home: int, others: tuple[int, ...], times: int, is_awaited: bool, hidden: float
) -> None:
    """A weight that a later stage needs from the beginning, or a sum of all microbatches."""
    found = search(4, (QUICK._replace(forward_seconds=0.4),) * 4)
    found = dataclasses.replace(found, ways={8: found.ways[8]})
    free = found.within(10_000)
    assert free is not None and free[0].devices == (8, 8)
    sent = seconds_across(CLUSTER, 8, 0.0, 1.0, times * 10**9)
    assert 0.3 * times < sent < 0.4 * times
    apart = dataclasses.replace(found, once=(OnceSent(home, others, times * 10**9, is_awaited),))
    tied = apart.within(10_000)
    assert tied is not None and tied[0] == free[0]
    assert tied[1] == pytest.approx(free[1] + max(sent - hidden, 0.0), rel=1e-5)


def test_who_is_sent_something_last_works_on_with_it() -> None:
    """Its update is the last thing then; other units' are done meanwhile."""
    update = QUICK._replace(forward_seconds=0.4, once_seconds=0.5)
    found = search(4, (update,) * 4)
    found = dataclasses.replace(found, ways={8: found.ways[8]})
    apart = dataclasses.replace(found, once=(OnceSent(0, (3,), 4 * 10**9, is_awaited=False),))
    free, tied = found.within(10_000), apart.within(10_000)
    assert free is not None and tied is not None
    own, last = 2 * 0.5, seconds_across(CLUSTER, 8, 0.0, 1.0, 4 * 10**9) + 0.5 - 0.2
    assert tied[1] == pytest.approx(free[1] - own + last, rel=1e-5)


def test_more_and_fewer_rows_change_what_holds_rows() -> None:
    """Twice the rows and half of them: the rest is as long, and as large, as before."""
    unit = QUICK._replace(bytes_waiting=6)
    assert unit.with_rows(0.5) == pytest.approx((0.6, 0.15, 0.2, 0.0, 40, 5, 10, 8, False, 3))
    assert QUICK.with_rows(0.25).bytes_working == 8
    assert QUICK.with_rows(2.0).seconds == pytest.approx(1.8)
    assert QUICK.with_rows(2.0).bytes_working == 32


def test_the_best_stages_on_submeshes_of_one_size() -> None:
    found = search(4, (QUICK,) * 4, (SMALL,) * 4)
    best = found.within(10_000)
    equal = found.of_equal_devices(10_000)
    assert best is not None and equal
    assert [seconds for _, seconds in equal] == sorted(seconds for _, seconds in equal)
    for layout, seconds in equal:
        assert len(set(layout.devices)) == 1 and seconds >= best[1]
    assert not found.of_equal_devices(10_000, at_most=equal[0][1] / 2)


def test_stages_that_take_too_long_are_not_found() -> None:
    found = search(4, (QUICK,) * 4, (SMALL,) * 4)
    free = found.within(10_000)
    assert free is not None
    assert found.within(10_000, free[1]) == free
    assert found.within(10_000, 0.99 * free[1]) is None


def test_equal_stages_take_and_need_what_their_units_do() -> None:
    """Six units in two stages of three: eight microbatches, the first has two in flight."""
    way = (QUICK._replace(bytes_fixed=100), *(QUICK,) * 4, QUICK._replace(once_seconds=4.0))
    equal, early = in_equal_stages(way, 2, 8), 3 * QUICK.backward_seconds
    assert equal == (3.0 + 3.0 + 7 * 3.0 + 4.0 - early, 180 + 2 * 30 + 20)
    alone = in_equal_stages(way, 1, 8)
    assert alone == (6.0 + 7 * 6.0 + 4.0, 300 + 60 + 20)
    assert in_equal_stages(way, 7, 8) is None
