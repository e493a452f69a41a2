"""Schedules from names and functions, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autopar.base.errors import AutoparError, ScheduleError
from autopar.passes.schedules.make import make_schedule
from autopar.passes.schedules.schedule import Schedule, Task


def reversed_gpipe(num_meshes: int, num_microbatches: int) -> list[list[tuple[str, int, int]]]:
    forward, backward = range(num_microbatches), reversed(range(num_microbatches))
    order = [("F", i) for i in forward] + [("B", i) for i in backward]
    return [[(kind, mesh, i) for kind, i in order] for mesh in range(num_meshes)]


def test_a_function_gives_the_task_lists() -> None:
    made = make_schedule(reversed_gpipe, 2, 3)
    assert made.name == "reversed_gpipe"
    assert made.mesh_of_stage == (0, 1)
    assert str(made).splitlines()[1] == "mesh 0: F0 F1 F2 B2 B1 B0"


def test_a_function_may_place_stages_as_it_likes() -> None:
    def vee(num_meshes: int, num_microbatches: int) -> Any:
        """Two chunks per mesh, the second in the opposite direction."""
        last = 2 * num_meshes - 1
        for mesh in range(num_meshes):
            tasks = []
            for i in range(num_microbatches):
                tasks += [Task("F", mesh, i), Task("F", last - mesh, i)]
                tasks += [Task("B", last - mesh, i), Task("B", mesh, i)]
            yield iter(tasks)

    made = make_schedule(vee, 2, 2, num_chunks=2)
    assert made.mesh_of_stage == (0, 1, 1, 0)
    assert (made.num_stages, made.num_meshes) == (4, 2)


def test_a_function_may_return_a_schedule() -> None:
    whole = make_schedule("1f1b", 2, 2)
    assert make_schedule(lambda p, m: whole, 2, 2) is whole


def test_a_function_gets_chunks_if_it_has_an_argument_for_them() -> None:
    def custom(p: int, m: int, num_chunks: int) -> Schedule:
        return make_schedule("interleaved_1f1b", p, m, num_chunks=num_chunks)

    assert make_schedule(custom, 2, 2, num_chunks=2).num_stages == 4


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(ScheduleError, match="no schedule 'gpip'") as caught:
        make_schedule("gpip", 2, 2)
    for name in ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "inference"):
        assert repr(name) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AutoparError)


def test_interleaving_needs_a_multiple_of_the_meshes() -> None:
    for m in (1, 3, 6):
        with pytest.raises(ScheduleError, match="multiple of 4") as caught:
            make_schedule("interleaved_1f1b", 4, m, num_chunks=2)
        assert f"microbatches={-(-m // 4) * 4}" in str(caught.value)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2"])
def test_one_stage_per_mesh_refuses_chunks(name: str) -> None:
    with pytest.raises(ScheduleError, match="num_chunks=2") as caught:
        make_schedule(name, 2, 2, num_chunks=2)
    assert "interleaved_1f1b" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1b", 0, 2), "num_meshes=0"),
        (("1f1b", 2, -1), "num_microbatches=-1"),
        (("1f1b", 2, 2.0), "num_microbatches=2.0"),
        (("1f1b", True, 2), "num_meshes=True"),
        ((17, 2, 2), "neither a name nor a function"),
        ((None, 2, 2), "neither a name nor a function"),
    ],
)
def test_odd_arguments(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        make_schedule(*arguments)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, r"returned None \(NoneType\)"),
        (3, r"returned 3 \(int\)"),
        ("F0 B0", r"returned 'F0 B0' \(str\)"),
        ({"mesh": []}, r"\(dict\)"),
        ([None, None], r"returned None \(NoneType\) for mesh 0"),
        ([["F0"], []], r"returned 'F0' \(str\) as a task of mesh 0"),
        ([[("F", 0)], []], r"returned \('F', 0\) \(tuple\) as a task of mesh 0"),
        ([[("G", 0, 0)], []], r"returned \('G', 0, 0\)"),
        ([[("F", 0.0, 0)], []], r"returned \('F', 0.0, 0\)"),
        ([[("F", 0, True)], []], r"returned \('F', 0, True\)"),
        ([[], []], "has no task"),
        ([], "has no task"),
        ([[("F", -1, 0)], []], "negative stage"),
        ([[("F", 0, 0)], [("F", 2, 0)]], "no task for stage 1"),
        ([[("F", 0, 0)], [("F", 0, 1)]], "stage 0 on two meshes"),
        ([[("F", 0, 0), ("F", 0, 1)]], "2 microbatches on 1 meshes"),
        ([[("F", 0, 0), ("F", 0, 1)], [("F", 1, 0)]], r"lacks F\(1,1\)"),
        ([[("F", 0, 0), ("F", 0, 2)], [("F", 1, 0), ("F", 1, 1)]], r"F\(0,2\) that cannot exist"),
    ],
)
def test_odd_results_of_a_function(returned: Any, words: str) -> None:
    def custom(num_meshes: int, num_microbatches: int) -> Any:
        return returned

    with pytest.raises(ScheduleError, match=words) as caught:
        make_schedule(custom, 2, 2)
    assert "custom" in str(caught.value)


def test_a_schedule_of_another_size_is_refused() -> None:
    made = make_schedule("1f1b", 2, 4)
    with pytest.raises(ScheduleError, match="4 microbatches on 2"):
        make_schedule(lambda p, m: made, 2, 2)
    with pytest.raises(ScheduleError, match="2 stages"):
        make_schedule(lambda p, m: made, 2, 4, num_chunks=2)
    chunks = make_schedule("interleaved_1f1b", 2, 4, num_chunks=2)
    with pytest.raises(ScheduleError, match=r"4 stages[\s\S]*num_chunks="):
        make_schedule(lambda p, m: chunks, 2, 4)


def test_a_mesh_without_a_stage_is_refused() -> None:
    def lopsided(num_meshes: int, num_microbatches: int) -> Any:
        order = [(kind, i) for kind in "FB" for i in range(num_microbatches)]
        return [[(kind, stage, i) for kind, i in order for stage in (0, 1)], []]

    with pytest.raises(ScheduleError, match="leaves mesh 1 without a stage"):
        make_schedule(lopsided, 2, 2)


def test_an_exception_of_the_function_is_the_users_own() -> None:
    def broken(num_meshes: int, num_microbatches: int) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        make_schedule(broken, 2, 2)


def test_callables_without_a_signature_get_the_two_numbers() -> None:
    function: Callable[..., Any] = max
    with pytest.raises(ScheduleError, match=r"'max' returned 4 \(int\)"):
        make_schedule(function, 2, 4)
