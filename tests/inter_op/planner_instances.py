"""Small random instances of the published planners' formats, and all of their plans."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from inter_op import planner_objectives

Json = dict[str, Any]


def least(objective: Callable[[Json, Json, Json], float], raw: Json, case: Json, plans: Any) -> Any:
    """The least cost of the plans that keep the planner's rules; None: none does."""
    costs = []
    for plan in plans:
        try:
            costs.append(objective(raw, case, plan))
        except AssertionError:
            continue
    return min(costs, default=None)


def write(folder: Path, name: str, raw: Json) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(raw))
    return name


def compositions(total: int, at_most: bool = False) -> Iterator[tuple[int, ...]]:
    """The ways to write `total` (or less) as a sum of positive numbers in order."""
    if total == 0 or at_most:
        yield ()
    for first in range(1, total + 1):
        for rest in compositions(total - first, at_most):
            yield (first, *rest)


def pipedream(folder: Path, seed: int, two_levels: bool) -> Json:
    """A network that splits in two and joins again, in PipeDream's states."""
    source = random.Random(seed)
    states = [{0}, {0, 1}, {0, 2}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}]
    weights = [[source.randint(0, 9) for _ in range(5)] for _ in range(3)]
    totals = [[float(sum(row[node] for node in state)) for state in states] for row in weights]
    preds = [[k for k, other in enumerate(states) if other < state] for state in states]
    raw = {
        "cum_compute": totals[0],
        "cum_param": totals[1],
        "cum_act": totals[2],
        "out_act": [float(source.randint(0, 9)) for _ in states],
        "preds": preds,
    }
    profile = write(folder, f"random{seed}.json", raw).removesuffix(".json")
    machines = [2, 2] if two_levels else [4]
    case: Json = {
        "profile": profile,
        "levels_machines": machines,
        "levels_bandwidth_Bps": [float(source.randint(1, 9)) for _ in machines],
        "transfer_cost": source.random() < 0.8,
        "straight": not two_levels and source.random() < 0.2,
        "memory_limit_bytes": source.choice([None, 40.0, 80.0]) if not two_levels else None,
        "use_fewer_machines": False,
    }
    # The published formula for memory counts all machines, used or not.
    if case["memory_limit_bytes"] is None:
        case["use_fewer_machines"] = not two_levels and source.random() < 0.3

    def chains(start: int, stop: int) -> Iterator[list[tuple[int, int]]]:
        if start == stop:
            yield []
        for cut in range(start + 1, stop + 1):
            if start == 0 or start - 1 in preds[cut - 1]:
                for rest in chains(cut, stop):
                    yield [(start, cut), *rest]

    def level(start: int, stop: int, count: int, at_most: bool = False) -> list[list[list[int]]]:
        return [
            [[first, last, m] for (first, last), m in zip(chain, parts, strict=True)]
            for chain in chains(start, stop)
            for parts in compositions(count, at_most)
            if len(parts) == len(chain)
        ]

    plans: list[Json] = [
        {"stages": stages}
        for stages in level(0, len(states), machines[-1], case["use_fewer_machines"])
    ]
    if two_levels:
        plans = [
            plan | {"inner_stages": list(inner)}
            for plan in plans
            for inner in itertools.product(
                *(level(start, stop, machines[0]) for start, stop, _ in plan["stages"])
            )
        ]
    return case | {"optimum_s": least(planner_objectives.pipedream, raw, case, plans)}


def ordered_partitions(items: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """The ways to deal `items` out to stages, first to last; no stage is empty."""
    if not items:
        yield []
    for size in range(1, len(items) + 1):
        for first in itertools.combinations(items, size):
            rest = tuple(item for item in items if item not in first)
            for others in ordered_partitions(rest):
                yield [first, *others]


def piper(folder: Path, seed: int) -> Json:
    """Three nodes with recomputation, at two tensor-parallel degrees."""
    source = random.Random(seed)
    edges = [(u, v) for u, v in ((0, 1), (0, 2), (1, 2)) if source.random() < 0.7]

    def variants(node: int) -> list[Json]:
        common = {
            "parameterSize": source.randint(0, 9),
            "syncTimeFw": {str(u): source.randint(0, 3) for u, v in edges if v == node},
            "syncTimeBw": {str(v): source.randint(0, 3) for u, v in edges if u == node},
        }
        seconds, kept, saved = source.randint(1, 9), source.randint(4, 9), source.choice([2, 4])
        slower = seconds + source.randint(0, 3)
        return [
            common | {"timePerSample": seconds, "memoryUsageA": kept, "memoryUsageB": 1},
            common
            | {
                "timePerSample": slower,
                "memoryUsageA": kept - saved,
                "memoryUsageB": source.choice([1, 3]),
            },
        ]

    raw = {
        "nodes": [{"id": n, "TMPCs": {t: variants(n) for t in ("1", "2")}} for n in range(3)],
        "edges": [
            {"sourceId": u, "destId": v, "communicationCost": source.randint(0, 9)}
            for u, v in edges
        ],
    }
    case: Json = {
        "file": write(folder, f"random{seed}.json", raw),
        "devices": 4,
        "microbatches": 4,
        "bandwidth_Bps": 8.0,
        "memory_bytes": float(source.choice([4, 12, 20, 40])),
        "restrict": source.choice(["", "", "noDP", "noTP", "noAR"]),
    }
    ways = list(itertools.product((1, 2), (1, 2, 4)))
    plans = (
        {
            "stages": [
                {"nodes": nodes, "tensor_parallel": t, "replicas": d, "recomputed": recomputed}
                for nodes, (t, d) in zip(stages, chosen, strict=True)
            ]
        }
        for stages in ordered_partitions((0, 1, 2))
        for chosen in itertools.product(ways, repeat=len(stages))
        if sum(t * d for t, d in chosen) <= 4
        for size in range(4)
        for recomputed in itertools.combinations(range(3), size)
    )
    return case | {"TPS": least(planner_objectives.piper, raw, case, plans)}


def dnn_partitioning(folder: Path, seed: int) -> Json:
    """Four forward nodes, two of which have backward mates, on two accelerators and a CPU."""
    source = random.Random(seed)
    nodes = [
        {
            "id": 10 + node,
            "isBackwardNode": int(node > 3),
            "colorClass": (0, 1, 2, 3, 1, 2)[node],
            "cpuLatency": source.randint(0, 30),
            "fpgaLatency": source.randint(0, 9),
            "size": source.randint(0, 9),
        }
        for node in range(6)
    ]
    possible = [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3), (5, 4), (3, 5)]
    costs = [source.randint(0, 5) for _ in nodes]
    raw = {
        "nodes": nodes,
        "edges": [
            {"sourceId": 10 + u, "destId": 10 + v, "cost": costs[u]}
            for u, v in possible
            if source.random() < 0.8
        ],
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "maxSizePerFPGA": 24.0,
    }
    case: Json = {"file": write(folder, f"random{seed}.json", raw)}
    plans = (
        {
            "stages": [
                {
                    "device": device,
                    "nodes": [node["id"] for node in nodes if node["colorClass"] in colours],
                }
                for device, colours in zip(devices, stages, strict=True)
            ]
        }
        for stages in ordered_partitions((0, 1, 2, 3))
        if len(stages) <= 3
        for devices in itertools.product(("accelerator", "cpu"), repeat=len(stages))
    )
    return case | {"max_load_ms": least(planner_objectives.dnn_partitioning, raw, case, plans)}
