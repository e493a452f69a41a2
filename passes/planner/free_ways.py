"""Plans of units with any memory, of which those at prices of memory are made."""

from __future__ import annotations

from typing import NamedTuple

from autopar.base.cluster import Cluster
from autopar.passes.planner.layer_units import Kind
from autopar.passes.planner.planned_stage import PlannedStage
from autopar.passes.planner.stage_costs import Mesh, Way
from autopar.passes.planner.stage_shardings import MeshSearch

MESHES_PRICED = 3  # of as many devices, the quickest
TOO_SLOW = 2.0  # times the quickest mesh of as many devices: not worth to be slower for memory


class FreeWays(NamedTuple):
    """The plans of units with any memory, by logical mesh and kind; the ways of quick meshes."""

    part: Cluster
    searches: dict[Mesh, dict[Kind, MeshSearch]]
    planned: dict[Mesh, dict[Kind, PlannedStage]]
    ways: dict[Mesh, Way]
    heaviest: dict[Mesh, float]  # seconds of the kind that computes most, also where only guessed

    def quickest(self) -> list[Mesh]:
        """The meshes on which more may be planned than the kind that computes most."""
        meshes = sorted(self.planned, key=self.heaviest.__getitem__)[:MESHES_PRICED]
        return [m for m in meshes if self.heaviest[m] <= TOO_SLOW * self.heaviest[meshes[0]]]

    def slower_with_twice(self, mesh: Mesh) -> float:
        """How many times slower a mesh of twice the devices is than the quickest of as many.

        By the one of half: that has half as many nodes, of which the first axis crosses as much
        less.
        """
        first, *others = mesh
        half = (*((first // 2,) if first > 2 or not others else ()), *others)
        if first % 2 or half not in self.heaviest:
            return 1.0
        least, crosses = min(self.heaviest.values()), self.part.num_nodes > 1
        return self.heaviest[half] / least if least and crosses else 1.0
