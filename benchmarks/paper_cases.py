"""What `planning.py --paper` plans: models on clusters, by every method and as Alpa published.

Published plans are those of Zheng et al., OSDI 2022 (section 8 and the artifact): stages, their
submeshes and logical shapes, and the number of microbatches, on p3.16xlarge nodes. How tensors lie
in a stage is left to autopar.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from models import registry, wide_resnet

import autopar
from autopar.base.methods import METHODS

V100, H100 = "p3.16xlarge", "dgx-h100"
NODE_COUNTS = (1, 2, 4, 8)
IN_A_NODE = 8

Mesh = tuple[int, ...]

PAPER_DEVICES = {
    "gpt-125M": 1,
    "gpt-350M": 1,
    "gpt-760M": 2,
    "gpt-1.3B": 4,
    "gpt-2.6B": 8,
    "gpt-6.7B": 16,
    "gpt-15B": 32,
    "gpt-39B": 64,
    "moe-380M": 1,
    "moe-690M": 2,
    "moe-1.3B": 4,
    "moe-2.4B": 8,
    "moe-10B": 16,
    "moe-27B": 32,
    "moe-70B": 64,
    "wide-resnet-250M": 1,
    "wide-resnet-500M": 2,
    "wide-resnet-1B": 4,
    "wide-resnet-2B": 8,
    "wide-resnet-4B": 16,
    "wide-resnet-6.8B": 32,
    "wide-resnet-13B": 64,
}
"""V100s on which the paper trains a model; models that it does not have are on 64 H100s."""

H100_DEVICES = {"llama3-70B": 256, "llama3-405B": 1024, "mixtral-8x22B": 128, "qwen3-235B": 256}
"""Of these, what is too large for 64."""


WITHOUT_REMAT = ("llama-7B", "llama-70B")
"""Also as Hugging Face's models are by default: their layers keep all, so that memory binds."""


@dataclass(frozen=True)
class PlanningCase:
    """A model on a cluster, planned with these options."""

    model: str
    preset: str
    devices: int
    asked: str
    options: dict[str, Any] = field(default_factory=dict)
    remat: bool = True

    @property
    def label(self) -> str:
        """What `--only` is searched in."""
        return f"{self.model} {self.devices} {self.preset} {self.asked}"

    @property
    def cluster(self) -> autopar.Cluster:
        """Whole nodes, or a part of one."""
        nodes, each = max(self.devices // IN_A_NODE, 1), min(self.devices, IN_A_NODE)
        return autopar.Cluster.preset(self.preset, nodes=nodes, devices_per_node=each)

    @property
    def dtype(self) -> str:
        """V100s compute fast in float16, H100s in bfloat16; residual networks are in float32."""
        if self.model.startswith("wide-resnet"):
            return "float32"
        return "float16" if self.preset == V100 else "bfloat16"


def _stages(shares: Sequence[float], meshes: Sequence[Mesh]) -> list[autopar.Stage]:
    return [
        autopar.Stage(layers=share / sum(shares), logical_mesh=mesh)
        for share, mesh in zip(shares, meshes, strict=True)
    ]


def _equal(count: int, mesh: Mesh) -> list[autopar.Stage]:
    return _stages([1] * count, [mesh] * count)


def _blocks(name: str, groups: Sequence[int], meshes: Sequence[Mesh]) -> list[autopar.Stage]:
    """Stages of so many blocks of a residual network."""
    flops = wide_resnet.block_flops(wide_resnet.SIZES[name])
    ends = itertools.accumulate(groups, initial=0)
    return _stages([sum(flops[a:b]) for a, b in itertools.pairwise(ends)], meshes)


def published() -> dict[str, dict[str, Any]]:
    """For each model the options of the plan that Alpa found."""
    thirteen = [(8, 1), (1, 8), (8, 1), (1, 8), (8, 1), (8, 1), (1, 8), (8, 1)]
    found: dict[str, tuple[int, list[autopar.Stage]]] = {
        "gpt-760M": (128, _equal(2, (1, 1))),
        "gpt-1.3B": (128, _equal(2, (2, 1))),
        "gpt-2.6B": (128, _stages([2, 2, 4], [(2, 1), (2, 1), (4, 1)])),
        "gpt-6.7B": (64, _equal(2, (2, 4))),
        "gpt-15B": (128, _equal(4, (2, 4))),
        "gpt-39B": (1024, _equal(16, (1, 4))),
        "moe-1.3B": (32, _equal(2, (2, 1))),
        "moe-2.4B": (32, _equal(2, (4, 1))),
        "moe-10B": (16, _equal(2, (8, 1))),
        "moe-27B": (128, _equal(8, (4, 1))),
        "moe-70B": (64, _equal(8, (8, 1))),
        "wide-resnet-2B": (24, _blocks("2B", [8, 8], [(4, 1), (1, 4)])),
        "wide-resnet-4B": (32, _blocks("4B", [5, 4, 7], [(4, 1), (4, 1), (8, 1)])),
        "wide-resnet-6.8B": (32, _blocks("6.8B", [5, 4, 4, 3], [(8, 1)] * 4)),
        # The paper's batch of 1,520 images, in 38 microbatches, is one of 1,536 here, in 48.
        "wide-resnet-13B": (48, _blocks("13B", [4] * 6 + [5, 4], thirteen)),
    }
    return {
        name: {"microbatches": count, "stages": stages} for name, (count, stages) in found.items()
    }


def cases(only: str = "", *, everywhere: bool = False) -> Iterator[PlanningCase]:
    """Every model on its cluster, by every method and as published; or by "auto" everywhere."""
    plans = published()
    for name in registry.NAMES:
        devices = PAPER_DEVICES.get(name, H100_DEVICES.get(name, 64))
        preset = V100 if name in PAPER_DEVICES else H100
        made = [PlanningCase(name, preset, devices, "auto")]
        if everywhere:
            made += [
                PlanningCase(name, kind, nodes * IN_A_NODE, "auto")
                for kind in ((H100,) if name.startswith(registry.TODAY) else (V100, H100))
                for nodes in NODE_COUNTS
                if (kind, nodes * IN_A_NODE) != (preset, devices)
            ]
        if devices > 1:
            made += [
                PlanningCase(name, preset, devices, method, {"method": method})
                for method in METHODS
                if method != "auto" and (method != "hsdp" or devices > IN_A_NODE)
            ]
        if name in WITHOUT_REMAT:
            asked = "auto without jax.checkpoint"
            made.append(PlanningCase(name, preset, devices, asked, remat=False))
        if name in plans:
            made.append(PlanningCase(name, preset, devices, "published", plans[name]))
        yield from (case for case in made if re.search(only, case.label))
