"""Rows about stages stand for exactly the transfers and collectives that they fold."""

import doctest
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.base.plan_records import Collective, StagePlan, StageTransfer, TensorPlan
from autopar.plans import stage_summaries
from autopar.plans.stage_summaries import group_stage_collectives, group_transfers
from autopar.plans.summaries import fold_tensors


def transfer(source: int, target: int, what: str, times: int = 1) -> StageTransfer:
    return StageTransfer(source, target, what, (2, 3), "float32", 24, times)


def rows(num_stages: int, *transfers: StageTransfer) -> list[tuple[str, str, int, int]]:
    groups = group_transfers(transfers, num_stages)
    return [(g.routes, g.what, g.count, g.bytes) for g in groups]


def test_docstrings() -> None:
    results = doctest.testmod(stage_summaries)
    assert results.attempted > 0
    assert results.failed == 0


def test_routes_that_many_programs_have_get_names() -> None:
    stages = range(4)
    chain = [transfer(s, s + 1, "activation", 8) for s in stages[:-1]]
    back = [transfer(s + 1, s, "gradient", 8) for s in stages[:-1]]
    scalars = [transfer(s, t, "scalar") for s, t in itertools.permutations(stages, 2)]
    out = [transfer(0, t, f"state['{name}']") for name in ("step", "key") for t in (1, 2, 3)]
    home = [transfer(s, 2, "sum") for s in (0, 1, 3)]
    assert rows(4, *scalars, *out, *chain, *home, *back) == [
        ("each to the next", "activation", 24, 24 * 24),
        ("each to the one before", "gradient", 24, 24 * 24),
        ("each to all others", "scalar", 12, 12 * 24),
        ("0 to all others", "state/{step,key}", 6, 6 * 24),
        ("all others to 2", "sum", 3, 3 * 24),
    ]


def test_other_routes_are_written_out() -> None:
    assert rows(4, transfer(0, 1, "x", 2), transfer(0, 3, "x", 2), transfer(2, 3, "x", 2)) == [
        ("0 to 1, 3", "x", 4, 96),
        ("2 to 3", "x", 2, 48),
    ]
    assert rows(4, transfer(0, 3, "x"), transfer(2, 3, "x")) == [("0, 2 to 3", "x", 2, 48)]
    assert rows(2, transfer(0, 1, "x"), transfer(1, 0, "x")) == [
        ("0 to 1", "x", 1, 24),
        ("1 to 0", "x", 1, 24),
    ]


routes = st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda pair: pair[0] != pair[1])
names = st.sampled_from(["activation", "state.a0", "state.a1", "scalar"])
transfers = st.builds(
    lambda route, what, times: transfer(route[0], route[1], what, times),
    routes,
    names,
    st.sampled_from([1, 4]),
)


@settings(deadline=None)
@given(st.lists(transfers, max_size=20))
def test_nothing_is_lost_or_counted_twice(items: list[StageTransfer]) -> None:
    groups = group_transfers(items, 4)
    assert sum(g.count for g in groups) == sum(item.times for item in items)
    assert sum(g.bytes for g in groups) == sum(item.times * item.bytes for item in items)
    assert len({(g.routes, g.what, g.per_microbatch) for g in groups}) == len(groups)


def test_equal_collectives_of_stages_take_one_row() -> None:
    def stage(*sizes: int) -> StagePlan:
        found = [
            Collective("all-reduce", ("x",), n, 1, "gradient", seconds=n * 1e-6) for n in sizes
        ]
        return StagePlan((2,), ("x",), 2, (), tuple(found))

    found = group_stage_collectives([stage(5, 5), stage(3), stage(4, 6)])
    assert [(g.count, g.bytes, where) for g, where in found] == [(2, 10, (0, 2)), (1, 3, (1,))]


def test_tensors_fold_over_stages_and_are_counted_on_the_fullest_mesh() -> None:
    def tensor(i: int, *stages: int) -> TensorPlan:
        return TensorPlan(f"w{i}", "state", (4,), "float32", ((),), 16, 16, stages=stages)

    (group,) = fold_tensors([tensor(0, 0), tensor(1, 1), tensor(2, 2), tensor(3, 0, 3)])
    assert group.path == "w{0..3}"
    assert (group.bytes, group.bytes_per_device) == (64, 32)
    assert group.stages == ((0,), (1,), (2,), (0, 3))
    (group,) = fold_tensors([tensor(0, 0), tensor(1, 1), tensor(2, 2)], meshes=[0, 1, 0])
    assert group.bytes_per_device == 32
