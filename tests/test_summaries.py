"""Folding keeps every tensor, and a folded name stands for exactly the paths it seems to."""

import doctest
import itertools
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.base.plan_records import Collective, StagePlan, StageTransfer, TensorPlan
from autopar.report import path_folding, summaries
from autopar.report.path_folding import fold_paths, short_path
from autopar.report.summaries import fold_tensors, group_collectives, group_transfers


def tensor(path: str, *shape: int, role: str = "state") -> TensorPlan:
    size = 4
    for n in shape:
        size *= n
    return TensorPlan(path, role, shape, "float32", ((),) * len(shape), size, size)


def test_docstrings() -> None:
    for module in (path_folding, summaries):
        results = doctest.testmod(module)
        assert results.attempted > 0
        assert results.failed == 0


def test_short_paths() -> None:
    assert short_path("state.params['Block_0']['kernel']") == "state/params/Block_0/kernel"
    assert short_path("[0].opt_state[1][0].mu['w']") == "0/opt_state/1/0/mu/w"
    assert short_path('args["a"].b') == "args/a/b"
    assert short_path("params/w") == "params/w"
    assert short_path("key") == "key"


def test_numbers_fold_to_ranges_and_lists() -> None:
    assert list(fold_paths([f"l{i}/w" for i in (2, 0, 1)])) == ["l{0..2}/w"]
    assert list(fold_paths([f"l{i}/w" for i in (0, 2, 3)])) == ["l{0,2,3}/w"]
    assert list(fold_paths(["l0/w"])) == ["l0/w"]


def test_names_fold_when_all_else_is_equal() -> None:
    paths = [f"s.{m}['l{i}']['{n}']" for m in ("mu", "nu") for i in range(4) for n in ("b", "g")]
    assert list(fold_paths(paths)) == ["s/{mu,nu}/l{0..3}/{b,g}"]


def test_only_full_combinations_fold() -> None:
    folded = fold_paths(["l0/a0", "l0/a1", "l1/a1"])
    assert sorted(path for paths in folded.values() for path in paths) == [
        "l0/a0",
        "l0/a1",
        "l1/a1",
    ]
    assert len(folded) == 2


names = st.lists(st.sampled_from(["a", "b", "a0", "a1", "b12", "0", "1"]), min_size=1, max_size=4)


@settings(deadline=None)
@given(st.lists(names.map("/".join), unique=True, max_size=12))
def test_folding_keeps_every_path_once(paths: list[str]) -> None:
    folded = fold_paths(paths)
    assert sorted(itertools.chain(*folded.values())) == sorted(paths)
    for name, members in folded.items():
        assert expand(name) == set(members)


def expand(name: str) -> set[str]:
    """The paths that a reader takes a folded name for; items in braces may have braces inside."""
    start = name.find("{")
    if start < 0:
        return {name}
    items, depth, position = [""], 0, start
    while depth or position == start:
        character = name[position]
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 1:
            items.append("")
        elif position > start and depth:
            items[-1] += character
        position += 1
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", items[0]):
        items = [str(i) for i in range(int(match[1]), int(match[2]) + 1)]
    return {path for item in items for path in expand(name[:start] + item + name[position:])}


def test_tensors_fold_only_with_their_like() -> None:
    tensors = [
        tensor("b", 7),
        *(tensor(f"l{i}/w", 4, 4) for i in range(3)),
        tensor("l3/w", 4, 5),
        tensor("l4/w", 4, 4, role="batch"),
    ]
    groups = fold_tensors(tensors)
    assert [group.path for group in groups] == ["b", "l{0..2}/w", "l3/w", "l4/w"]
    assert [group.count for group in groups] == [1, 3, 1, 1]
    assert [group.bytes for group in groups] == [28, 192, 80, 64]


def test_collectives_add_up() -> None:
    def collective(purpose: str, num_bytes: int, times: int, seconds: float) -> Collective:
        return Collective("all-reduce", ("x",), num_bytes, times, purpose, seconds=seconds)

    items = (collective("b", 10, 2, 1.0), collective("a", 1, 1, 9.0), collective("b", 5, 1, 0.5))
    groups = group_collectives([StagePlan((2,), ("x",), 2, (), items)])
    assert [(g.purpose, g.count, g.bytes, g.seconds) for g in groups] == [
        ("a", 1, 1, 9.0),
        ("b", 3, 25, 2.5),
    ]


def transfer(source: int, target: int, what: str, times: int = 1) -> StageTransfer:
    return StageTransfer(source, target, what, (2, 3), "float32", 24, times)


def rows(num_stages: int, *transfers: StageTransfer) -> list[tuple[str, str, int, int]]:
    groups = group_transfers(transfers, num_stages)
    return [(g.routes, g.what, g.count, g.bytes) for g in groups]


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

    found = group_collectives([stage(5, 5), stage(3), stage(4, 6)])
    assert [(g.count, g.bytes, g.stages) for g in found] == [(2, 10, (0, 2)), (1, 3, (1,))]


def test_tensors_fold_over_stages_and_are_counted_on_the_fullest_mesh() -> None:
    def stored(i: int, *stages: int) -> TensorPlan:
        return TensorPlan(f"w{i}", "state", (4,), "float32", ((),), 16, 16, stages=stages)

    (group,) = fold_tensors([stored(0, 0), stored(1, 1), stored(2, 2), stored(3, 0, 3)])
    assert group.path == "w{0..3}"
    assert (group.bytes, group.bytes_per_device) == (64, 32)
    assert group.stages == ((0,), (1,), (2,), (0, 3))
    (group,) = fold_tensors([stored(0, 0), stored(1, 1), stored(2, 2)], meshes=[0, 1, 0])
    assert group.bytes_per_device == 32
