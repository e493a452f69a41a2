"""PipeDream's planner (SOSP 2019): replicated stages of a profiled network on one or two levels.

A stage between two cuts with m replicas takes the larger of its compute and weight exchange and of
its transfers; the slowest stage counts. On two levels a stage of the outer level is a group of
devices that runs the stages of the inner level: the inner optimum between every two cuts, which one
sweep per first cut finds, is the outer level's compute time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lattices import from_predecessors
from numpy.typing import NDArray

from autopar.passes.planner.stage_problem import StageKind, StagePath, StageProblem
from autopar.passes.planner.stage_search import best_path
from autopar.passes.planner.stage_sweep import bottleneck_cost, sweep, tabulate

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Profile:
    """A network's cuts: totals of everything before each, the first of which is the empty one.

    Args:
      compute: seconds.
      parameters: bytes.
      activations: bytes.
      output: bytes that cross the cut.
      predecessors: which cuts may come before each.
    """

    compute: Floats
    parameters: Floats
    activations: Floats
    output: Floats
    predecessors: tuple[tuple[int, ...], ...]

    def between(self, totals: Floats, impossible: float = 0.0) -> Floats:
        """`[cuts, cuts]`: what lies between two cuts, or `impossible`."""
        amount = np.full((len(totals), len(totals)), impossible)
        for cut, before in enumerate(self.predecessors):
            # Totals of nested sets can fall by a rounding error.
            amount[before, cut] = np.maximum(0.0, totals[cut] - totals[list(before)])
        return amount


def load(directory: Path, case: dict[str, Any]) -> Profile:
    raw = json.loads((directory / f"{case['profile']}.json").read_text())
    states = len(raw["cum_compute"])
    before = raw["preds"] or [range(state) for state in range(states)]
    # State s of the file is cut s + 1 here; the empty cut may precede every other.
    predecessors = [(), *((0, *sorted(other + 1 for other in others)) for others in before)]
    compute, parameters, activations, output = (
        np.array([0.0, *raw[name]]) for name in ("cum_compute", "cum_param", "cum_act", "out_act")
    )
    return Profile(compute, parameters, activations, output, tuple(predecessors))


def describe(case: dict[str, Any]) -> str:
    machines = " x ".join(map(str, case["levels_machines"]))
    bandwidths = ", ".join(f"{bandwidth / 1e9:g}" for bandwidth in case["levels_bandwidth_Bps"])
    flags = [name for name in ("straight", "use_fewer_machines") if case[name]]
    flags += ["no transfers"] * (not case["transfer_cost"])
    flags += ["memory limit"] * (case["memory_limit_bytes"] is not None)
    return f"{case['profile']} on {machines}, {bandwidths} GB/s" + "".join(
        f", {flag.replace('_', ' ')}" for flag in flags
    )


def published(case: dict[str, Any]) -> float:
    return float(case["optimum_s"])


def plan(profile: Profile, case: dict[str, Any]) -> dict[str, Any]:
    """The best plan: its cost and stages `[first cut, last cut, replicas]`; two levels nest."""
    levels = list(zip(case["levels_machines"], case["levels_bandwidth_Bps"], strict=True))
    compute = profile.between(profile.compute, impossible=np.inf)
    if len(levels) == 1:
        path = best_path(_problem(profile, case, *levels[0], compute))
        return {"cost": None} if path is None else {"cost": path.cost, "stages": _stages(path)}
    (devices, inner_bandwidth), (machines, bandwidth) = levels
    first = _Inner(profile, case, devices, inner_bandwidth, compute)
    outer = best_path(
        _problem(profile, case, machines, bandwidth, first.optima(), first_sync=devices)
    )
    assert outer is not None, "everything on all machines is a plan"
    stages = _stages(outer)
    inner = [first.stages(start, stop) for start, stop, _ in stages]
    return {"cost": outer.cost, "stages": stages, "inner_stages": inner}


def _problem(
    profile: Profile,
    case: dict[str, Any],
    machines: int,
    bandwidth: float,
    compute: Floats,
    first_sync: int = 1,
) -> StageProblem:
    """The stages of one level; `compute` is `[cuts, cuts]` seconds."""
    limit = case["memory_limit_bytes"]
    kept = profile.between(profile.activations) + profile.between(profile.parameters)
    kinds = []
    for replicas in _replicas(case, machines):
        seconds = _seconds(profile, case, replicas, bandwidth, compute, 0, first_sync)
        kinds.append(
            StageKind(
                devices=replicas,
                weight=0 if limit is None else replicas,
                bottleneck=seconds[None],
                bytes_per_microbatch=kept[None],
                in_flight=partial(_in_flight, replicas),
            )
        )
    return StageProblem(
        from_predecessors(profile.predecessors),
        tuple(kinds),
        machines,
        max_count=0 if limit is None else machines,
        all_devices=not case["use_fewer_machines"],
        memory_limit=limit,
    )


def _in_flight(replicas: int, machines: int) -> int:
    """The machines after a stage over its replicas, rounded up; `machines` includes its own."""
    return -(-machines // replicas) - 1


@dataclass(frozen=True, eq=False)
class _Inner:
    """The inner level: the devices of one machine, between any two cuts.

    The first stage after the first cut moves nothing, all others pay for what they receive and
    send. What a stage costs so depends on the first cut alone, and a sweep that runs from the last
    cut to the first, over the mirrored lattice, has the optima of all last cuts.
    """

    profile: Profile
    case: dict[str, Any]
    devices: int
    bandwidth: float
    compute: Floats

    def optima(self) -> Floats:
        """`[cuts, cuts]`: the least bottleneck between two cuts on all devices."""
        cuts = len(self.compute)
        optima = np.full((cuts, cuts), np.inf)
        for start in range(cuts - 1):
            optima[start, start + 1 :] = least_bottlenecks(self._mirrored(start, cuts - 1))[-2::-1]
        return optima

    def stages(self, start: int, stop: int) -> list[list[int]]:
        path = best_path(self._mirrored(start, stop))
        assert path is not None, "the outer level uses cuts that the inner one can reach"
        return [[stop - last, stop - first, m] for first, last, m in reversed(_stages(path))]

    def _mirrored(self, start: int, stop: int) -> StageProblem:
        """The cuts from `stop` down to `start`: cut c is state stop - c."""
        kinds = []
        for replicas in _replicas(self.case, self.devices):
            seconds = _seconds(
                self.profile, self.case, replicas, self.bandwidth, self.compute, start
            )
            part = seconds[start : stop + 1, start : stop + 1]
            kinds.append(StageKind(replicas, 0, part[::-1, ::-1].T[None]))
        possible = np.isfinite(kinds[0].bottleneck[0])
        successors = tuple(np.flatnonzero(row) for row in possible)
        return StageProblem(successors, tuple(kinds), self.devices, max_count=0)


def _seconds(
    profile: Profile,
    case: dict[str, Any],
    replicas: int,
    bandwidth: float,
    compute: Floats,
    first: int,
    first_sync: int = 1,
) -> Floats:
    """`[cuts, cuts]`: seconds of a stage of so many replicas; the one after cut `first` is first.

    The first stage's weight exchange is divided by `first_sync`, as in the published recurrence.
    """
    sync = 4 * (replicas - 1) * profile.between(profile.parameters) / (bandwidth * replicas)
    sync[0] /= first_sync
    seconds = (compute + sync) / replicas
    if case["transfer_cost"]:
        transfer = 2 * profile.output / (bandwidth * replicas)
        charged = np.maximum(seconds, transfer[:, None])
        charged[:, :-1] = np.maximum(charged[:, :-1], transfer[:-1])
        charged[first] = seconds[first]
        return charged
    return seconds


def least_bottlenecks(problem: StageProblem) -> Floats:
    """For each state, the least bottleneck of the stages from it to the end, on all devices.

    One sweep answers for every start, so that one level of a planner can be the cost of the next
    (PipeDream's machines of several devices). Infinite where there is no such path.
    """
    value = sweep(tabulate(problem), bottleneck_cost, np.maximum)
    return value[:, :, problem.num_devices].min(axis=1)


def _replicas(case: dict[str, Any], machines: int) -> range:
    return range(1, 2 if case["straight"] else machines + 1)


def _stages(path: StagePath) -> list[list[int]]:
    return [[step.start, step.stop, step.kind + 1] for step in path.steps]
