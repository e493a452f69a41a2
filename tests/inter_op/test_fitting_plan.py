"""In which order ways are tried to make a large stage fit on its mesh, and when one is enough."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from autopar.passes.planner.fitting_plan import fitting_plan
from autopar.passes.planner.planned_stage import PlaceInPipeline
from autopar.passes.solver import TooDear

LIMIT = 100
NO_GRAPH: Any = None


@dataclass(frozen=True)
class Peak:
    """What a plan needs."""

    bytes: int


@dataclass(frozen=True)
class Planned:
    """What a plan takes and needs, and how it was found."""

    kind: str
    step_seconds: float
    peak: Peak
    unlimited: Any = None
    least_seconds: float = 1.0

    @property
    def fits(self) -> bool:
        return self.peak.bytes <= LIMIT


def plan(kind: str, seconds: float, needed: int = LIMIT) -> Planned:
    return Planned(kind, seconds, Peak(needed))


@dataclass
class Search:
    """Of a large stage: plans at a price of memory, computing all again, and within the limit."""

    priced: dict[str, Planned]
    all_again: Planned
    tight: Planned
    limit: int = LIMIT
    hurries: bool = True
    remats: tuple[bool, ...] = (False, True)
    calls: list[str] = field(default_factory=list)
    place: Any = field(default_factory=lambda: PlaceInPipeline(NO_GRAPH, {}))

    def at_least_price(self, planned: Planned) -> Planned:
        self.calls.append(f"{planned.kind} at a price")
        return self.priced[planned.kind]

    def checked(self, planned: Planned) -> Planned:
        return planned

    def rematerialized(self, planned: Planned) -> Planned:
        self.calls.append("all again")
        return self.all_again

    def tightened(self, planned: Planned, at_most: float = math.inf) -> Planned:
        self.calls.append(f"within, {at_most:g} at most")
        if self.tight.step_seconds > at_most:
            raise TooDear(math.ceil(self.tight.step_seconds), math.ceil(at_most))
        return self.tight


FREE = plan("free", 1.0, 200)


def found(
    search: Search, again: Planned | None, expected: float = 0.0, *, is_only: bool = True
) -> tuple[Planned, list[str]]:
    """What is found where `again` computes some values again, and what was tried."""

    def computes_again(planned: Any, other: Any) -> Any:
        search.calls.append("some again")
        return again

    asked: Any = search, FREE, expected
    best: Any = fitting_plan(*asked, is_only=is_only, computes_again=computes_again)
    return best, search.calls


def search(priced: float = 1.5, all_again: float = 2.0, tight: float = 1.6) -> Search:
    """One in which plans take so long."""
    made = {"free": plan("priced", priced), "all": plan("all priced", all_again + 0.1)}
    return Search(made, plan("all", all_again, 150), plan("tight", tight))


def test_what_is_enough_at_a_price_asks_for_nothing_else() -> None:
    best, calls = found(search(priced=1.01), plan("some", 1.0))
    assert best.kind == "priced"
    assert best.unlimited is FREE
    assert calls == ["free at a price"]


@pytest.mark.parametrize(("seconds", "expected"), [(1.01, 0.0), (1.3, 1.28)])
def test_what_computes_some_again_and_takes_as_long_as_expected_is_enough(
    seconds: float, expected: float
) -> None:
    best, calls = found(search(), plan("some", seconds), expected)
    assert best.kind == "some"
    assert calls == ["free at a price", "some again"]


def test_what_takes_longer_is_beside_what_else_may_be_quicker() -> None:
    best, calls = found(search(priced=1.6, tight=1.45), plan("some", 1.5))
    assert best.kind == "tight"
    # To compute all again takes longer already with any memory.
    assert calls == ["free at a price", "some again", "all again", "within, 1.5 at most"]


def test_what_is_proven_to_be_no_quicker_is_left() -> None:
    best, calls = found(search(tight=1.7), plan("some", 1.45))
    assert best.kind == "some"
    assert calls[-1] == "within, 1.45 at most"


def test_all_is_computed_again_at_a_price_where_that_may_be_quicker() -> None:
    best, calls = found(search(priced=3.0, all_again=1.2), None)
    assert best.kind == "all priced"
    assert calls == ["free at a price", "some again", "all again", "all at a price"]


def test_what_does_not_fit_by_computing_again_is_not_taken() -> None:
    best, _ = found(search(priced=1.5), plan("some", 1.0, LIMIT + 1))
    assert best.kind == "priced"


def test_what_computes_some_again_for_long_is_beside_what_is_solved_within_the_memory() -> None:
    best, calls = found(search(priced=1.6, tight=1.05), plan("some", 1.33))
    assert best.kind == "tight"
    assert calls[-1] == "within, 1.33 at most"


def test_what_must_fit_does_so_at_a_price_or_by_computing_again() -> None:
    def hurried() -> Search:
        made = search()
        made.priced = {kind: plan(kind, 1.5, 150) for kind in ("free", "all")}
        assert made.place is not None
        return replace(made, place=made.place._replace(must_fit=True))

    best, calls = found(hurried(), plan("some", 1.9))
    assert best.kind == "some"
    best, calls = found(hurried(), None)
    assert not best.fits
    assert not any(call.startswith("within") for call in calls)


def test_a_mesh_that_is_not_the_only_one_is_solved_within_the_memory_beside_what_fits() -> None:
    def priced_in_vain() -> Search:
        made = search(tight=1.4)
        made.priced = {kind: plan(kind, 1.5, 150) for kind in ("free", "all")}
        return made

    best, _ = found(priced_in_vain(), plan("some", 1.9), is_only=False)
    assert best.kind == "tight"
    best, calls = found(priced_in_vain(), None, is_only=False)
    assert not best.fits
    assert not any(call.startswith("within") for call in calls)
