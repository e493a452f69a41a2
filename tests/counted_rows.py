"""The integer program's account of memory beside that of the programs that are made of it."""

from __future__ import annotations

import pytest

from autopar.passes.planner.planned_stage import PlannedStage
from autopar.passes.planner.stage_shardings import MeshSearch
from autopar.passes.sharding.memory_rows import memory_rows, rows_peak


def rows_over_peaks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the rows count, over what the program needs: filled as programs are planned."""
    seen: list[float] = []
    real = MeshSearch.checked

    def checked(self: MeshSearch, plan: PlannedStage) -> PlannedStage:
        found = real(self, plan)
        rows = memory_rows(self.built, self.memory(plan.remat))
        told = rows_peak(self.built, rows, plan.solution.assignment)
        seen.append(told / found.peak.bytes)
        return found

    monkeypatch.setattr(MeshSearch, "checked", checked)
    return seen
