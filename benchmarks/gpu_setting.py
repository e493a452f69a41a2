"""How the rows of `gpu.py` are measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax

from autopar.base.cluster import Cluster


@dataclass(frozen=True)
class Setting:
    """How rows are measured: tiny or whole models, how often, and the cluster's file."""

    tiny: bool
    repeats: int
    cluster_file: Path

    @property
    def cluster(self) -> Cluster:
        """The calibrated cluster; where that row is missing, what autopar knows of the device."""
        if self.cluster_file.exists():
            return Cluster.load(self.cluster_file)
        return Cluster.local(jax.devices()[:1])
