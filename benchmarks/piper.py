"""Piper's planner (NeurIPS 2021): tensor, data and pipeline parallelism with recomputation.

A stage of d replicas, each of t devices, takes its compute, its transfers and its share of the
gradients' exchange per microbatch; the slowest stage counts. What it keeps per microbatch in flight
depends on the replicas after it. Which of its nodes are recomputed is chosen exactly: nodes whose
recomputation saves the same memory are interchangeable, so of each such group the k cheapest are
recomputed, for every k.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lattices import downsets, inclusion_lattice
from numpy.typing import NDArray

from autopar.passes.planner.stage_problem import StageKind, StageProblem, Successors
from autopar.passes.planner.stage_search import best_path

Floats = NDArray[np.float64]
VARIANT = ("timePerSample", "memoryUsageA", "memoryUsageB")
MOST_CUTS = 2_000


@dataclass(frozen=True, eq=False)
class Workload:
    """A graph of nodes with costs per tensor-parallel degree, and its cuts.

    Args:
      nodes: the file's nodes, in its order.
      edges: (producer, consumer, bytes), by position in `nodes`.
      sets: boolean `[cuts, nodes]`: what lies before each cut.
      lattice: which cut may follow which.
    """

    nodes: list[dict[str, Any]]
    edges: list[tuple[int, int, float]]
    sets: NDArray[np.bool_]
    lattice: Successors

    def total(self, values: Floats) -> Floats:
        """`[cuts, cuts]`: the sum of a value per node over the nodes between two cuts."""
        totals = self.sets @ values
        return np.maximum(totals[None, :] - totals[:, None], 0.0)

    def variants(self, node: int, degree: int) -> list[dict[str, Any]]:
        return self.nodes[node]["TMPCs"][str(degree)]


def load(directory: Path, case: dict[str, Any]) -> Workload:
    raw = json.loads((directory / case["file"]).read_text())
    position = {node["id"]: index for index, node in enumerate(raw["nodes"])}
    edges = [
        (position[edge["sourceId"]], position[edge["destId"]], edge["communicationCost"])
        for edge in raw["edges"]
    ]
    predecessors: list[list[int]] = [[] for _ in raw["nodes"]]
    for producer, consumer, _ in edges:
        predecessors[consumer].append(producer)
    sets = downsets(predecessors, limit=MOST_CUTS)
    if sets is None:
        raise ValueError(f"{case['file']} has more than {MOST_CUTS} cuts")
    return Workload(raw["nodes"], edges, sets, inclusion_lattice(sets))


def describe(case: dict[str, Any]) -> str:
    text = f"{case['devices']} devices, {case['memory_bytes'] / 2**30:g} GiB"
    return text + (f", {case['restrict']}" if case["restrict"] else "")


def published(case: dict[str, Any]) -> float | None:
    return None if case["TPS"] is None else float(case["TPS"])


def plan(workload: Workload, case: dict[str, Any]) -> dict[str, Any]:
    """The best plan; a stage is its nodes, t, d and which of its nodes are recomputed."""
    found = []
    degrees = [1] if case["restrict"] == "noTP" else map(int, workload.nodes[0]["TMPCs"])
    for degree in degrees:
        choices = _choices(workload, case, degree)
        for replicas in range(1, 2 if case["restrict"] == "noDP" else case["devices"] + 1):
            if case["microbatches"] % replicas == 0 and replicas * degree <= case["devices"]:
                kind = _kind(workload, case, degree, replicas, choices)
                found.append((kind, degree, replicas, choices))
    problem = StageProblem(
        workload.lattice,
        tuple(kind for kind, *_ in found),
        case["devices"],
        max_count=min(case["devices"], case["microbatches"]),
        all_devices=False,
        memory_limit=case["memory_bytes"],
    )
    path = best_path(problem)
    if path is None:
        return {"cost": None}
    stages = []
    for step in path.steps:
        _, degree, replicas, choices = found[step.kind]
        inside = workload.sets[step.stop] & ~workload.sets[step.start]
        stages.append(
            {
                "nodes": [workload.nodes[node]["id"] for node in np.flatnonzero(inside)],
                "tensor_parallel": degree,
                "replicas": replicas,
                "recomputed": [
                    workload.nodes[node]["id"]
                    for node in choices[step.start, step.stop][step.option].recomputed
                ],
            }
        )
    return {"cost": path.cost, "stages": stages}


@dataclass(frozen=True)
class Choice:
    """Which nodes of a stage are recomputed: the time per microbatch, bytes in flight and fixed."""

    seconds: float
    bytes_per_microbatch: float
    bytes_fixed: float
    recomputed: tuple[int, ...]


Choices = dict[tuple[int, int], list[Choice]]


def _choices(workload: Workload, case: dict[str, Any], degree: int) -> Choices:
    """For every two cuts, the choices that are best for some number of microbatches in flight."""
    nodes = range(len(workload.nodes))
    plain = np.array(
        [[workload.variants(node, degree)[0][key] for key in VARIANT] for node in nodes]
    )
    # What recomputing a node changes, where it saves anything.
    changes: dict[int, tuple[float, ...]] = {}
    for node in nodes if case["restrict"] != "noAR" else ():
        for variant in workload.variants(node, degree)[1:]:
            change = tuple(variant[key] - plain[node, place] for place, key in enumerate(VARIANT))
            if min(change) < 0:
                changes[node] = change
    found: Choices = {}
    for start, after in enumerate(workload.lattice):
        for stop in after:
            inside = np.flatnonzero(workload.sets[stop] & ~workload.sets[start])
            groups: dict[tuple[float, ...], list[int]] = defaultdict(list)
            for node in inside.tolist():
                if node in changes:
                    groups[changes[node][1:]].append(node)
            totals = plain[inside].sum(axis=0)[None]
            for group in groups.values():
                group.sort(key=lambda node: changes[node][0])
                # After the k cheapest of the group are recomputed, for k = 0, 1, ...
                steps = np.cumsum([(0.0, 0.0, 0.0), *(changes[node] for node in group)], axis=0)
                totals = (totals[:, None] + steps).reshape(-1, 3)
            shape = [len(group) + 1 for group in groups.values()]
            useful = found[start, int(stop)] = []
            for index in _useful(totals, case["memory_bytes"]):
                counts = np.unravel_index(index, shape)
                chosen = [
                    node
                    for group, k in zip(groups.values(), counts, strict=True)
                    for node in group[:k]
                ]
                seconds, per_microbatch, fixed = totals[index]
                useful.append(Choice(seconds, per_microbatch, fixed, tuple(sorted(chosen))))
    return found


def _useful(totals: Floats, limit: float) -> list[int]:
    """The rows that no other one beats in time and in how many microbatches fit."""
    seconds, per_microbatch, fixed = totals.T
    room = np.floor_divide(limit - fixed, np.maximum(per_microbatch, 1.0))
    kept = []
    most = 0.0
    for index in np.lexsort([-room, seconds]):
        if room[index] > most:
            most = room[index]
            kept.append(int(index))
    return kept


def _kind(
    workload: Workload, case: dict[str, Any], degree: int, replicas: int, choices: Choices
) -> StageKind:
    """The stages of `replicas` replicas of `degree` devices each."""
    cuts = len(workload.lattice)
    seconds, fixed, per_microbatch = np.zeros(
        (3, max(map(len, choices.values())), cuts, cuts), dtype=np.float64
    )
    seconds[:] = np.inf
    for (start, stop), useful in choices.items():
        for option, choice in enumerate(useful):
            seconds[option, start, stop] = choice.seconds
            fixed[option, start, stop] = choice.bytes_fixed
            per_microbatch[option, start, stop] = choice.bytes_per_microbatch
    bandwidth, microbatches = case["bandwidth_Bps"], case["microbatches"]
    weights = np.array(
        [_the(workload, node, degree, "parameterSize") for node in range(len(workload.nodes))]
    )
    exchange = 4 * (replicas - 1) * workload.total(weights) / (replicas * microbatches * bandwidth)
    transfers = _transfers(workload, degree) / (replicas * bandwidth)
    return StageKind(
        devices=replicas * degree,
        weight=replicas,
        bottleneck=seconds / replicas + transfers + exchange,
        bytes_fixed=fixed,
        bytes_per_microbatch=per_microbatch,
        in_flight=lambda count: -(-count // replicas),
    )


def _transfers(workload: Workload, degree: int) -> Floats:
    """`[cuts, cuts]`: twice the bytes on the edges that enter and leave a stage."""
    sets = workload.sets.astype(np.float64)
    transfers = np.zeros((len(sets), len(sets)))
    for producer, consumer, size in workload.edges:
        before, after = workload.nodes[producer]["id"], workload.nodes[consumer]["id"]
        extra_in = _the(workload, consumer, degree, "syncTimeFw")[str(before)]
        extra_out = _the(workload, producer, degree, "syncTimeBw")[str(after)]
        crosses = sets[:, producer] * (1 - sets[:, consumer])
        transfers += 2 * (size + extra_in) * np.outer(crosses, sets[:, consumer])
        transfers += 2 * (size + extra_out) * np.outer(1 - sets[:, producer], crosses)
    return transfers


def _the(workload: Workload, node: int, degree: int, key: str) -> Any:
    """What all variants of a node have in common."""
    first, *others = (variant[key] for variant in workload.variants(node, degree))
    if any(other != first for other in others):
        raise ValueError(f"the variants of node {node} differ in {key}")
    return first
