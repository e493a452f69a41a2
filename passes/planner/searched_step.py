"""What a search for plans is to those who look at a part of it, or at another step, below it."""

from __future__ import annotations

from typing import Protocol

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.passes.graph.graph import Graph
from autopar.passes.planner.split_step import SplitStep


class SearchedStep(Protocol):
    """A step for which plans are searched (`autopar.passes.planner.layout_search`)."""

    @property
    def graph(self) -> Graph:
        """The traced step."""

    @property
    def options(self) -> Options:
        """What the user asked for."""

    @property
    def cluster(self) -> Cluster:
        """The devices."""

    def split(self, count: int, is_pipeline: bool = False) -> SplitStep:
        """The step in so many microbatches."""
