"""The published planners' objectives, one plan at a time, straight from their descriptions.

Each function checks that a plan keeps the planner's rules and returns what it costs. They share no
code with the benchmark, which only tells them its plans.
"""

from __future__ import annotations

import math
from typing import Any

Json = dict[str, Any]


def pipedream(profile: Json, case: Json, plan: Json) -> float:
    """The slowest stage of a plan `stages` (and `inner_stages`) of `[start, stop, replicas]`."""
    machines, bandwidths = case["levels_machines"], case["levels_bandwidth_Bps"]
    if len(machines) == 1:
        return _pipedream_level(profile, case, machines[0], bandwidths[0], plan["stages"], None)
    inner = []
    for (start, stop, _), stages in zip(plan["stages"], plan["inner_stages"], strict=True):
        assert (stages[0][0], stages[-1][1]) == (start, stop)
        inner.append(
            _pipedream_level(profile, case, machines[0], bandwidths[0], stages, None, inner=True)
        )
    return _pipedream_level(
        profile, case, machines[1], bandwidths[1], plan["stages"], inner, sync_over=machines[0]
    )


def _pipedream_level(
    profile: Json,
    case: Json,
    machines: int,
    bandwidth: float,
    stages: list[list[int]],
    compute: list[float] | None,
    inner: bool = False,
    sync_over: int = 1,
) -> float:
    def until(name: str, cut: int) -> float:
        return profile[name][cut - 1] if cut else 0.0

    last_cut = len(profile["cum_compute"])
    used = sum(replicas for *_, replicas in stages)
    assert used <= machines if case["use_fewer_machines"] else used == machines
    if not inner:
        assert stages[0][0] == 0
        assert stages[-1][1] == last_cut
    slowest = 0.0
    machines_so_far = 0
    for place, (start, stop, replicas) in enumerate(stages):
        assert replicas >= 1
        assert replicas == 1 or not case["straight"]
        assert place == 0 or start == stages[place - 1][1]
        before = profile["preds"][stop - 1] if profile["preds"] else range(stop - 1)
        assert start == 0 or start - 1 in before
        parameters = until("cum_param", stop) - until("cum_param", start)
        seconds = until("cum_compute", stop) - until("cum_compute", start)
        if compute is not None:
            seconds = compute[place]
        sync = 4 * (replicas - 1) * parameters / (bandwidth * replicas)
        time = (seconds + (sync / sync_over if place == 0 else sync)) / replicas
        last = place == len(stages) - 1
        if case["transfer_cost"] and place > 0:
            time = max(time, 2 * profile["out_act"][start - 1] / (bandwidth * replicas))
        if case["transfer_cost"] and place > 0 and (not last or (inner and stop != last_cut)):
            time = max(time, 2 * profile["out_act"][stop - 1] / (bandwidth * replicas))
        machines_so_far += replicas
        if case["memory_limit_bytes"] is not None:
            kept = parameters + until("cum_act", stop) - until("cum_act", start)
            versions = 0 if last else math.ceil((machines - machines_so_far) / replicas)
            assert versions * kept <= case["memory_limit_bytes"]
        slowest = max(slowest, time)
    return slowest


def piper(workload: Json, case: Json, plan: Json) -> float:
    """The time per sample of a plan of `nodes`, `tensor_parallel`, `replicas`, `recomputed`."""
    nodes = {node["id"]: node for node in workload["nodes"]}
    stages = plan["stages"]
    microbatches, bandwidth = case["microbatches"], case["bandwidth_Bps"]
    assert sorted(node for stage in stages for node in stage["nodes"]) == sorted(nodes)
    assert sum(s["replicas"] * s["tensor_parallel"] for s in stages) <= case["devices"]
    assert sum(stage["replicas"] for stage in stages) <= microbatches
    slowest = 0.0
    before: set[int] = set()
    for place, stage in enumerate(stages):
        inside, d, t = set(stage["nodes"]), stage["replicas"], str(stage["tensor_parallel"])
        assert microbatches % d == 0
        assert case["restrict"] != "noDP" or d == 1
        assert case["restrict"] != "noTP" or t == "1"
        assert case["restrict"] != "noAR" or not stage["recomputed"]
        variants = {
            node: nodes[node]["TMPCs"][t][1 if node in stage["recomputed"] else 0]
            for node in inside
        }
        moved = 0.0
        for edge in workload["edges"]:
            source, target, size = (
                edge["sourceId"],
                edge["destId"],
                edge["communicationCost"],
            )
            if target in inside and source not in inside:
                assert source in before
                moved += 2 * (size + variants[target]["syncTimeFw"][str(source)])
            if source in inside and target not in inside:
                moved += 2 * (size + variants[source]["syncTimeBw"][str(target)])
        in_flight = math.ceil(sum(later["replicas"] for later in stages[place:]) / d)
        memory = sum(
            variant["memoryUsageA"] * in_flight + variant["memoryUsageB"]
            for variant in variants.values()
        )
        assert memory <= case["memory_bytes"]
        weights = sum(variant["parameterSize"] for variant in variants.values())
        compute = sum(variant["timePerSample"] for variant in variants.values())
        exchange = 4 * (d - 1) * weights / (d * microbatches * bandwidth)
        slowest = max(slowest, compute / d + moved / (d * bandwidth) + exchange)
        before |= inside
    return slowest


def dnn_partitioning(workload: Json, case: Json, plan: Json) -> float:
    """The largest load of a plan of `device`, `nodes`; stages are in the order of the graph."""
    nodes = {node["id"]: node for node in workload["nodes"]}
    stages = plan["stages"]
    assert sorted(node for stage in stages for node in stage["nodes"]) == sorted(nodes)
    devices = [stage["device"] for stage in stages]
    assert devices.count("accelerator") <= workload["maxFPGAs"]
    assert devices.count("cpu") <= workload["maxCPUs"]
    cost = {edge["sourceId"]: edge["cost"] for edge in workload["edges"]}
    largest = 0.0
    before: set[int] = set()
    for stage in stages:
        inside = set(stage["nodes"])
        colours = {nodes[node]["colorClass"] for node in inside if "colorClass" in nodes[node]}
        assert all(node in inside for node in nodes if nodes[node].get("colorClass", -1) in colours)
        if stage["device"] == "cpu":
            load = sum(nodes[node]["cpuLatency"] for node in inside)
        else:
            assert sum(nodes[node]["size"] for node in inside) <= workload["maxSizePerFPGA"]
            edges = [(edge["sourceId"], edge["destId"]) for edge in workload["edges"]]
            sent = {u for u, v in edges if u in inside and v not in inside}
            received = {u for u, v in edges if u not in inside and v in inside}
            load = sum(nodes[node]["fpgaLatency"] for node in inside)
            load += sum(cost[node] for node in sent | received)
        for edge in workload["edges"]:
            source, target = nodes[edge["sourceId"]], nodes[edge["destId"]]
            if target["id"] in inside and not (
                source["isBackwardNode"] or target["isBackwardNode"]
            ):
                assert source["id"] in before | inside
        before |= inside
        largest = max(largest, load)
    return largest
