"""Folding keeps every tensor, and a folded name stands for exactly the paths it seems to."""

import doctest
import itertools
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.base.plan_records import Collective, TensorPlan
from autopar.plans import summaries
from autopar.plans.summaries import fold_paths, fold_tensors, group_collectives, short_path


def tensor(path: str, *shape: int, role: str = "state") -> TensorPlan:
    size = 4
    for n in shape:
        size *= n
    return TensorPlan(path, role, shape, "float32", ((),) * len(shape), size, size)


def test_docstrings() -> None:
    assert doctest.testmod(summaries).failed == 0


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

    groups = group_collectives(
        [collective("b", 10, 2, 1.0), collective("a", 1, 1, 9.0), collective("b", 5, 1, 0.5)]
    )
    assert [(g.purpose, g.count, g.bytes, g.seconds) for g in groups] == [
        ("a", 1, 1, 9.0),
        ("b", 3, 25, 2.5),
    ]
