"""Pipelines of automatic stages within a limit of memory: which that may fit are planned."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from autopar.passes.planner.auto_stages import StageSearch
from autopar.passes.planner.candidates import PlannedStep, quickest
from autopar.passes.planner.layouts import StageLayout
from autopar.passes.planner.useless_stages import MisfitError, SlowStageError

STAGES_TRIED = 4  # how often the search for stages is given less memory, when they do not fit
WORTH_PLANNING = 1.02  # times what a pipeline may take: with less, it is not planned
WORTH_TRYING = 1.2  # times what the search promises: with less, stages are not planned


class PlanStages(Protocol):
    """Plans stages; a `MisfitError` if one does not fit that `must`.

    And a `SlowStageError` if one takes longer than the `longest` seconds.
    """

    def __call__(
        self, layout: StageLayout, *, must_fit: bool, longest: float
    ) -> list[PlannedStep]: ...


class StagesPlanner(NamedTuple):
    """Plans the stages of a split step; of a long program, as the search expects them to be."""

    plan: PlanStages
    is_long: bool

    def planned(
        self, layout: StageLayout, *, must_fit: bool = False, longest: float = math.inf
    ) -> list[PlannedStep]:
        """Pipelines with these stages; a `MisfitError` as soon as one does not fit that `must`.

        Or a `SlowStageError` as soon as one takes longer than the `longest` seconds of a step.
        """
        layout = layout if self.is_long else replace(layout, expected=())
        return self.plan(layout, must_fit=must_fit, longest=longest)


def pipelines_within(
    stages: StageSearch,
    first: tuple[StageLayout, float],
    limit: int,
    planner: StagesPlanner,
    *,
    must_fit: bool = False,
    longest: float = math.inf,
) -> list[PlannedStep]:
    """Pipelines of the stages that are found, the `first` ones and with less and less memory.

    The search adds up what layers need, which is not all: until a pipeline fits, or one that fits
    takes about as long as the search takes the next one to do at the least.

    Args:
      stages: the search.
      first: the stages that it finds within the limit, and the seconds of a step that it promises.
      limit: bytes that a device may hold.
      planner: of the split step.
      must_fit: what does not fit soon is nothing: something else does, or it is known what lacks.
      longest: seconds of a step elsewhere; stages of which one takes longer are not planned on.
    """
    made: list[PlannedStep] = []
    target, is_slow = limit, False
    for tried in range(STAGES_TRIED):
        found = stages.within(target) if tried else first
        if found is None or found[1] * WORTH_TRYING > seconds_of_best(made):
            break
        must_fit = must_fit or any(candidate.fits for candidate in made)
        try:
            slow = min(longest, seconds_of_best(made))
            planned = planner.planned(found[0], must_fit=must_fit, longest=slow)
        except SlowStageError:
            is_slow = True
            break
        except MisfitError as misfit:
            most = misfit.peak_bytes
        else:
            made += planned
            if all(candidate.fits for candidate in planned):
                break
            most = max(max(candidate.peak_bytes) for candidate in planned)
        target -= max(most - limit, limit // 50)
    best = min(seconds_of_best(made), longest if is_slow else math.inf)
    return made + _on_equal_devices(stages, first, limit, planner, best)


def _on_equal_devices(
    stages: StageSearch,
    first: tuple[StageLayout, float],
    limit: int,
    planner: StagesPlanner,
    best: float,
) -> list[PlannedStep]:
    """Pipelines on submeshes of one size, where memory made the `first` stages slower.

    Then they take longer than the search promised; of a long program, others that promise less than
    the `best` that is known are planned too.
    """
    if not planner.is_long or not WORTH_PLANNING * first[1] < best < math.inf:
        return []
    more: list[PlannedStep] = []
    for layout, seconds in stages.of_equal_devices(limit, best):
        known = min(best, seconds_of_best(more))
        if seconds * WORTH_PLANNING < known and layout.devices != first[0].devices:
            with contextlib.suppress(MisfitError, SlowStageError):
                more += planner.planned(layout, must_fit=True, longest=known)
    return more


def seconds_of_best(candidates: Sequence[PlannedStep]) -> float:
    """What a step takes with the quickest that fits; infinite without any."""
    best = quickest(candidates)
    return math.inf if best is None else best.step_seconds
