"""Numbers of a cluster that no cluster can have."""

from __future__ import annotations

import math
import operator
from typing import Any

from autopar.base.device import FLOATS


def impossible_numbers(cluster: Any) -> list[str]:
    """What of a cluster's numbers cannot be, one line each."""
    device = cluster.device

    def numbers(*names: str) -> list[tuple[str, float]]:
        return [(name, operator.attrgetter(name)(cluster)) for name in names]

    counts = numbers("num_nodes", "devices_per_node", "devices_per_card", "device.memory_bytes")
    rates = numbers("device.memory_bandwidth", "intra_node.bandwidth", "inter_node.bandwidth")
    rates += [(f"device.peak_flops.{name}", rate) for name, rate in device.peak_flops.items()]
    rates += numbers("device.fused_speedup")
    latencies = ("intra_node.latency", "inter_node.latency", "collective_seconds")
    seconds = numbers("device.kernel_seconds", *latencies, "price_per_device_hour")
    seconds += numbers("process_bandwidth", "host_bandwidth", "host_memory_bytes")
    problems = [f"{name} is {n}, less than 1" for name, n in counts if n < 1]
    problems += [f"{name} is {x}, not positive" for name, x in rates if not 0 < x < math.inf]
    problems += [f"{name} is {x}, negative" for name, x in seconds if x < 0]
    finite = [*seconds, ("oversubscription", cluster.oversubscription)]
    problems += [f"{name} is {x}, no finite number" for name, x in finite if not x < math.inf]
    if not 0 < device.max_efficiency <= 1:
        problems.append(f"device.max_efficiency is {device.max_efficiency}, not in (0, 1]")
    if not set(FLOATS) & set(device.peak_flops):
        problems.append(f"device.peak_flops has none of {', '.join(FLOATS)}")
    if cluster.oversubscription < 1 or cluster.nodes_per_switch < 0:
        problems.append("oversubscription is less than 1, or nodes_per_switch less than 0")
    elif cluster.oversubscription > 1 and not cluster.nodes_per_switch:
        problems.append(
            f"oversubscription is {cluster.oversubscription:g}, and nodes_per_switch is 0: all "
            "nodes are joined by one switch"
        )
    for name in ("overlap", "device.memory_fraction", "device.row_share"):
        share = operator.attrgetter(name)(cluster)
        if not 0 <= share <= 1 or (share == 0 and name != "overlap"):
            problems.append(f"{name} is {share}, not a share")
    size, rows = cluster.devices_per_node, cluster.pair_bandwidth
    if rows and (len(rows) < size or any(len(row) != len(rows) for row in rows)):
        problems.append(f"pair_bandwidth has not {size} rows of as many numbers")
    if any(not 0 <= x < math.inf for row in rows for x in row):
        problems.append("pair_bandwidth has a number that is negative")
    return problems
