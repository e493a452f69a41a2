"""Stages of which one alone takes longer than a step elsewhere are not planned to their end."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from small_steps import perceptron

import autopar
from autopar.base.options import Options
from autopar.passes.planner import automatic_stages
from autopar.passes.planner.automatic_stages import AutomaticStages
from autopar.passes.planner.candidates import PlannedStep, plan_layout
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.layouts import StageLayout
from autopar.passes.planner.stages_within import StagesPlanner, pipelines_within
from autopar.passes.planner.useless_stages import MisfitError, SlowStageError
from autopar.passes.trace.trace import trace

CLUSTER = autopar.Cluster.preset("dgx-h100", nodes=2)


def layouts(**options: Any) -> LayoutSearch:
    """What is tried for four layers on 64 rows."""
    shape = jax.ShapeDtypeStruct
    weights = {f"w{i}": shape((256, 256), jnp.float32) for i in range(4)}
    graph = trace(perceptron, (weights, shape((64, 256), jnp.float32))).graph
    return LayoutSearch.of(graph, Options.from_kwargs(**options), CLUSTER, lambda message: None)


@pytest.fixture(scope="module")
def asked() -> Any:
    """A step in four microbatches, to be cut into two stages."""
    search = layouts(stages=2, microbatches=4, schedule="1f1b")
    return search.split(4, is_pipeline=True), StageLayout(2, (8, 8)), search.options, CLUSTER


def test_a_stage_that_takes_longer_ends_the_planning(asked: Any) -> None:
    said: list[str] = []
    split, layout, options, cluster = asked

    def planned(longest: float = math.inf) -> PlannedStep:
        made = plan_layout(split, layout, options, cluster, said.append, longest=longest)
        return made[0]

    slowest = max(stage.step_seconds for stage in planned().planned)
    assert planned(slowest).step_seconds == planned().step_seconds
    with pytest.raises(SlowStageError):
        planned(0.9 * slowest)
    assert said[-1].startswith("stage ")
    assert said[-1].endswith("too slow")


FIRST, EQUAL = StageLayout((), (1, 3)), StageLayout((), (2, 2))


class Search:
    """Finds stages within less and less memory; on equal submeshes others, which promise 2.2."""

    def __init__(self) -> None:
        self.targets: list[int] = []

    def within(self, target: int) -> tuple[StageLayout, float]:
        self.targets.append(target)
        return FIRST, 2.0

    def of_equal_devices(self, limit: int, best: float) -> list[tuple[StageLayout, float]]:
        return [(EQUAL, 2.2)] if best > 2.2 else []


def tried(error: Exception) -> tuple[list[tuple[StageLayout, float]], int]:
    """What is planned, and at most how slow, where the first stages raise; and the searches."""
    asked: list[tuple[StageLayout, float]] = []
    search: Any = Search()

    def plan(layout: StageLayout, *, must_fit: bool, longest: float) -> list[PlannedStep]:
        asked.append((layout, longest))
        if layout == FIRST:
            raise error
        return []

    planner = StagesPlanner(plan, is_long=True)
    pipelines_within(search, (FIRST, 2.0), 1000, planner, must_fit=True, longest=3.0)
    return asked, len(search.targets)


def test_stages_that_are_too_slow_are_not_looked_for_with_less_memory() -> None:
    # But on equal submeshes, which may be quicker than what is known.
    asked, searches = tried(SlowStageError())
    assert (asked, searches) == ([(FIRST, 3.0), (EQUAL, 3.0)], 0)


def test_as_those_are_that_do_not_fit() -> None:
    asked, searches = tried(MisfitError(1100))
    assert [layout for layout, _ in asked] == [FIRST] * (searches + 1)
    assert searches > 0


def test_automatic_stages_may_take_as_long_as_a_step_that_fits_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    def noting(*_: Any, longest: float, **__: Any) -> list[PlannedStep]:
        asked.append(longest)
        raise SlowStageError

    monkeypatch.setattr(automatic_stages, "plan_layout", noting)
    search = replace(layouts(stages="auto", microbatches=4), best_seconds=1.0)
    assert AutomaticStages(search).pipelines() == []
    assert set(asked) == {1.0}
