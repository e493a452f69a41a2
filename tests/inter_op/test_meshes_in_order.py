"""In which order a stage's logical meshes are planned within the memory, and which further."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from autopar.passes.planner import mesh_choice

Mesh = tuple[int, ...]


@dataclass(frozen=True)
class Planned:
    """A stage on a mesh: what it takes, with any memory at the least."""

    mesh: Mesh
    step_seconds: float
    least_seconds: float
    fits: bool


@dataclass
class Place:
    """Of a stage that need not fit."""

    must_fit: bool = False


@dataclass
class Search:
    """Takes `free` with any memory; fits at `priced` seconds at a price, or at `full` at length."""

    mesh: Mesh
    free_seconds: float
    priced: float
    full: float
    calls: list[tuple[str, Mesh]]

    is_large: bool = True

    def free(self) -> Planned:
        return Planned(self.mesh, self.free_seconds, self.free_seconds, fits=False)


def within(
    search: Search, first: Planned, expected: float, *, is_only: bool = True, **_: Any
) -> Planned:
    """What fits at a price, or, if the mesh is the only one, at length."""
    search.calls.append(("full" if is_only else "priced", search.mesh))
    seconds = min(search.priced, search.full if is_only else math.inf)
    found = seconds if seconds < math.inf else search.free_seconds
    return Planned(search.mesh, found, search.free_seconds, seconds < math.inf)


def planned(
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[Mesh, tuple[float, float, float]],
    unexpected: Sequence[Mesh] = (),
    promised: float | None = None,
) -> tuple[float, list[tuple[str, Mesh]]]:
    """The best that fits, and what was searched, where free, priced and full plans take so long."""
    calls: list[tuple[str, Mesh]] = []

    class Searches:
        @staticmethod
        def of(split: Any, mesh: Mesh, *_: Any) -> Search:
            return Search(mesh, *seconds[mesh], calls)

    monkeypatch.setattr(mesh_choice, "MeshSearch", Searches)
    monkeypatch.setattr(mesh_choice, "fitting_plan", within)
    nothing: Any = None
    place: Any = Place()
    expected = {
        mesh: promised or free for mesh, (free, _, _) in seconds.items() if mesh not in unexpected
    }
    found = mesh_choice.plan_on_any(nothing, [*seconds], nothing, nothing, place, expected)
    return min((x.step_seconds for x in found if x.fits), default=math.inf), calls


def test_what_fits_at_no_price_is_not_looked_at_further_beside_what_is_about_as_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meshes = {(8,): (1.0, math.inf, 1.005), (4, 2): (1.01, 1.015, 1.015)}
    best, calls = planned(monkeypatch, meshes)
    assert best == 1.015
    assert calls == [("priced", (8,)), ("full", (4, 2))]


def test_but_beside_what_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    best, calls = planned(monkeypatch, {(8,): (1.0, math.inf, 1.05), (4, 2): (3.0, 3.0, 3.0)})
    assert best == 1.05
    assert calls == [("priced", (8,)), ("full", (4, 2)), ("full", (8,))]


def test_where_nothing_fits_every_mesh_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    none = math.inf
    meshes = {(8,): (1.0, none, none), (4, 2): (2.0, none, none), (2, 4): (2.5, none, none)}
    best, calls = planned(monkeypatch, meshes)
    assert best == math.inf
    assert sorted(mesh for kind, mesh in calls if kind == "full") == sorted(meshes)
    assert [mesh for kind, mesh in calls if kind == "priced"] == [(8,), (4, 2)]


def test_meshes_that_are_known_to_be_slower_come_after_those_that_are_expected_to_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meshes = {(8,): (1.01, 1.01, 1.01), (2, 4): (2.0, 2.0, 2.0), (4, 2): (1.0, 1.09, 1.09)}
    best, calls = planned(monkeypatch, meshes, [(8,), (2, 4)])
    assert best == 1.09
    assert calls == [("priced", (4, 2))]


def test_where_memory_makes_these_slow_the_others_may_be_quicker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meshes = {(8,): (1.01, 1.03, 1.03), (2, 4): (2.0, 2.0, 2.0), (4, 2): (1.0, 1.3, 1.3)}
    best, calls = planned(monkeypatch, meshes, [(8,), (2, 4)])
    assert best == 1.03
    assert calls == [("priced", (4, 2)), ("priced", (8,))]


def test_and_before_those_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    none = math.inf
    meshes = {(8,): (3.0, none, none), (2, 4): (2.0, none, 2.5), (4, 2): (none, none, none)}
    best, calls = planned(monkeypatch, meshes, [(2, 4)])
    assert best == 2.5
    assert calls == [("priced", (8,)), ("full", (2, 4))]


def test_a_mesh_that_takes_longer_with_any_memory_is_not_planned_within_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It is expected to be as quick.
    meshes = {(8,): (1.0, 1.1, 1.1), (4, 2): (1.5, 1.6, 1.6)}
    best, calls = planned(monkeypatch, meshes, promised=1.0)
    assert best == 1.1
    assert calls == [("priced", (8,))]
