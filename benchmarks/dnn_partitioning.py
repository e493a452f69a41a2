"""The throughput planner of Tarnawski et al. (NeurIPS 2020): a branching graph over accelerators.

A device's load is the time of its nodes and of every value that it sends or receives, each once;
the largest load counts. Nodes of one colour stay together, backward nodes among them, so the cuts
are the downsets of the graph of colours. A split in one topological order sees only the downsets
that are prefixes of that order; its cost is reported beside the optimum over all downsets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lattices import downsets, inclusion_lattice
from numpy.typing import NDArray

from autopar.passes.planner.stage_problem import StageKind, StagePath, StageProblem, Successors
from autopar.passes.planner.stage_search import best_path

Floats = NDArray[np.float64]
MOST_CUTS = 4_000


@dataclass(frozen=True, eq=False)
class Workload:
    """A graph of nodes in colours.

    Args:
      nodes: the file's nodes, in its order.
      colour: for each node, its colour: a number from 0.
      predecessors: for each colour, those that must come before it.
      consumers: 0/1 `[nodes, nodes]`: entry `[u, v]` says that v reads u.
      transfer: for each node, the time to move its value once.
      accelerators: how many there are.
      cpus: how many there are.
      memory_limit: bytes of an accelerator.
    """

    nodes: list[dict[str, Any]]
    colour: NDArray[np.intp]
    predecessors: tuple[frozenset[int], ...]
    consumers: Floats
    transfer: Floats
    accelerators: int
    cpus: int
    memory_limit: float

    def values(self, key: str) -> Floats:
        return np.array([node[key] for node in self.nodes], dtype=np.float64)


def load(directory: Path, case: dict[str, Any]) -> Workload:
    raw = json.loads((directory / case["file"]).read_text())
    nodes = raw["nodes"]
    position = {node["id"]: index for index, node in enumerate(nodes)}
    colours: dict[Any, int] = {}
    # A node without a colour is one of its own.
    colour = np.array(
        [
            colours.setdefault(node.get("colorClass", ("alone", node["id"])), len(colours))
            for node in nodes
        ]
    )
    consumers = np.zeros((len(nodes), len(nodes)))
    transfer = np.zeros(len(nodes))
    predecessors: list[set[int]] = [set() for _ in colours]
    for edge in raw["edges"]:
        producer, consumer = position[edge["sourceId"]], position[edge["destId"]]
        consumers[producer, consumer] = 1
        transfer[producer] = edge["cost"]
        backward = nodes[producer]["isBackwardNode"] or nodes[consumer]["isBackwardNode"]
        if not backward and colour[producer] != colour[consumer]:
            predecessors[colour[consumer]].add(int(colour[producer]))
    return Workload(
        nodes,
        colour,
        tuple(map(frozenset, predecessors)),
        consumers,
        transfer,
        raw["maxFPGAs"],
        raw["maxCPUs"],
        raw["maxSizePerFPGA"],
    )


def describe(case: dict[str, Any]) -> str:
    return case["file"].removesuffix(".json").replace("_", " ")


def published(case: dict[str, Any]) -> float:
    return float(case["max_load_ms"])


def plan(workload: Workload, case: dict[str, Any]) -> dict[str, Any]:
    """The best plan over all downsets; a stage is its device and its nodes."""
    prefixes = np.array(topological_prefixes(workload))
    ordered = _best(workload, prefixes)
    sets = downsets(workload.predecessors, limit=MOST_CUTS)
    if sets is None:
        sets = prefixes
    path = _best(workload, sets)
    if path is None:
        return {"cost": None}
    stages = []
    for step in path.steps:
        inside = (sets[step.stop] & ~sets[step.start])[workload.colour]
        ids = [workload.nodes[node]["id"] for node in np.flatnonzero(inside)]
        stages.append({"device": ("accelerator", "cpu")[step.kind], "nodes": ids})
    return {
        "cost": path.cost,
        "stages": stages,
        "cuts": len(sets),
        "topological_order": None if ordered is None else ordered.cost,
    }


def topological_prefixes(workload: Workload) -> list[NDArray[np.bool_]]:
    """The prefixes of the order that always takes the first colour of the file that it can."""
    before = np.zeros(len(workload.predecessors), dtype=np.bool_)
    prefixes = [before]
    for _ in workload.predecessors:
        ready = [
            colour
            for colour, needed in enumerate(workload.predecessors)
            if not before[colour] and all(before[other] for other in needed)
        ]
        if not ready:
            raise ValueError("the colours depend on each other in a circle")
        before = before.copy()
        before[ready[0]] = True
        prefixes.append(before)
    return prefixes


def _best(workload: Workload, sets: NDArray[np.bool_]) -> StagePath | None:
    """The best plan over the cuts `sets`, `[cuts, colours]`."""
    lattice = inclusion_lattice(sets)
    accelerator, size = _loads(workload, sets, lattice)
    members = sets[:, workload.colour].astype(np.float64)
    totals = members @ workload.values("cpuLatency")
    cpu = np.where(np.isfinite(accelerator), totals[None, :] - totals[:, None], np.inf)
    kinds = (
        StageKind(devices=1, weight=0, bottleneck=accelerator[None], bytes_fixed=size[None]),
        StageKind(devices=0, weight=1, bottleneck=np.maximum(cpu, 0.0)[None]),
    )
    problem = StageProblem(
        lattice,
        kinds,
        workload.accelerators,
        max_count=workload.cpus,
        all_devices=False,
        memory_limit=workload.memory_limit,
    )
    return best_path(problem)


def _loads(
    workload: Workload, sets: NDArray[np.bool_], lattice: Successors
) -> tuple[Floats, Floats]:
    """`[cuts, cuts]`: the load of an accelerator with what lies between two cuts, and its bytes."""
    members = sets[:, workload.colour].astype(np.float32)
    read = members @ workload.consumers.T.astype(np.float32)
    consumers = workload.consumers.sum(axis=1)
    latency, bytes_ = workload.values("fpgaLatency"), workload.values("size")
    loads = np.full((len(sets), len(sets)), np.inf)
    sizes = np.zeros((len(sets), len(sets)))
    for start, after in enumerate(lattice):
        inside = members[after] - members[start]
        # How many of each node's readers are inside: sends if not all, is received if any.
        inside_readers = read[after] - read[start]
        moved = np.where(inside > 0, inside_readers < consumers, inside_readers > 0)
        loads[start, after] = inside @ latency + moved @ workload.transfer
        sizes[start, after] = inside @ bytes_
    return loads, sizes
