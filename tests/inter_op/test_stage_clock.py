"""What a step in stages takes by the clock of a schedule, and cuts that are moved by it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules.reference_clock import times

from autopar.passes.planner.auto_stages import NEEDING
from autopar.passes.planner.moved_cuts import CLEARLY, HELPS, moved_cuts
from autopar.passes.planner.stage_choice import StageChoice, StageOption, StageRange
from autopar.passes.planner.stage_clock import StageWork, step_seconds
from autopar.passes.schedules.make import make_schedule

NAMES = sorted({name for names in NEEDING.values() for name in names})
SECONDS = st.integers(1, 20)


def reference(name: str, works: Sequence[StageWork], count: int) -> float:
    """The longest path; transfers between neighbours all take what the first one takes."""
    schedule = make_schedule(name, len(works), count)
    divides = schedule.splits_backward
    weights = [min(work.forward, work.backward / 2) if divides else 0.0 for work in works]
    backward = [work.backward - own for work, own in zip(works, weights, strict=True)]
    seconds = {"F": [work.forward for work in works], "B": backward, "W": weights}
    ends = [0.0] * len(works)
    begins = [work.awaited for work in works]
    found = times(schedule.tasks, len(works), seconds, works[0].sent, begins)
    for (_, stage, _), (_, end) in found.items():
        ends[stage] = max(ends[stage], end)
    return max(end + work.once for end, work in zip(ends, works, strict=True))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.sampled_from(NAMES),
    st.lists(
        st.tuples(SECONDS, SECONDS, SECONDS, st.just(0) | st.integers(0, 60)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 7),
    st.integers(1, 40),
)
def test_a_step_takes_its_longest_path(
    name: str, stages: list[tuple[int, int, int, int]], sent: int, count: int
) -> None:
    """Of many microbatches those in the middle are guessed: hardly anything is lost."""
    works = [StageWork(*stage[:3], sent, stage[3]) for stage in stages]
    found, exact = step_seconds(name, works, count), reference(name, works, count)
    if count <= 6 * len(works):
        assert found == exact
    else:
        assert found == pytest.approx(exact, rel=0.1)


def option(work: Sequence[tuple[float, float, float]], size: int) -> StageOption:
    """Of layers that take so long forward, backward and once a step."""
    forward, backward, once = (sum(values) for values in zip(*work, strict=True))
    return StageOption(
        seconds=(forward + backward) / size,
        bytes_fixed=len(work),
        bytes_per_microbatch=0,
        once_seconds=once / size,
        forward_seconds=forward / size,
    )


def choice(layers: Sequence[tuple[float, float, float]], cuts: Sequence[int]) -> StageChoice:
    runs = itertools.pairwise([0, *cuts, len(layers)])
    stages = (StageRange(a, b, 1, option(layers[a:b], 1)) for a, b in runs)
    return StageChoice(tuple(stages), 0.0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=4, max_size=9),
    st.integers(1, 12),
    st.data(),
)
def test_of_cuts_that_were_moved_no_single_one_is_better_elsewhere(
    layers: list[tuple[float, float, float]], count: int, data: st.DataObject
) -> None:
    inner = range(1, len(layers))
    begun = sorted(data.draw(st.sets(st.sampled_from(inner), min_size=1, max_size=3)))
    most = data.draw(st.integers(2, len(layers)))

    def fitting(start: int, stop: int, size: int, from_the_end: int) -> list[StageOption]:
        found = option(layers[start:stop], size)
        return [found] if found.bytes_fixed <= most else []

    def seconds(stages: Sequence[StageRange]) -> float:
        return step_seconds("1f1b", [stage.option.work for stage in stages], count)

    found, least = moved_cuts(
        choice(layers, begun), fitting, lambda each: count * each.seconds, seconds
    )
    cuts = [stage.start for stage in found.stages[1:]]
    assert least == seconds(found.stages) and found == choice(layers, cuts)
    first = seconds(choice(layers, begun).stages)
    if cuts == begun:
        assert least == first
        return
    assert least < CLEARLY * first
    for place, step in itertools.product(range(len(cuts)), (-1, 1)):
        other = [*cuts[:place], cuts[place] + step, *cuts[place + 1 :]]
        if [0, *other, len(layers)] != sorted({0, *other, len(layers)}):
            continue
        moved = choice(layers, other).stages
        if all(each.option.bytes_fixed <= most for each in moved[place : place + 2]):
            assert HELPS * least <= seconds(moved)


def test_stages_before_work_that_is_done_once_take_longer() -> None:
    """What the last layer does once a step is done while the first stage is not yet ready."""
    layers = [(1.0, 2.0, 0.0)] * 5 + [(1.0, 2.0, 12.0)]

    def fitting(start: int, stop: int, size: int, from_the_end: int) -> list[StageOption]:
        return [option(layers[start:stop], size)]

    def seconds(stages: Sequence[StageRange]) -> float:
        return step_seconds("eager_1f1b", [stage.option.work for stage in stages], 4)

    even = choice(layers, [3])
    found, least = moved_cuts(even, fitting, lambda each: each.seconds, seconds)
    assert [stage.start for stage in found.stages] == [0, 4]
    assert least < seconds(even.stages)


def test_without_a_backward_pass_nobody_waits_for_it() -> None:
    works = [StageWork(1.0, 0.0, 0.0, 5.0)] * 3
    assert {step_seconds(name, works, 4) for name in NAMES} == {3 * 1.0 + 2 * 5.0 + 3 * 1.0}
