"""What a choice of stages promises to take, by the simulator's rules, before any stage is planned.

The dynamic program adds up what Alpa's formula does (`stage_choice`). The simulator knows more: a
transfer occupies no mesh but delays who waits for it, 1F1B has few microbatches in flight to hide
that, and what passes between stages once a step (a tied embedding and its gradient) comes before
the first microbatch or after the last. Here the stages' seconds run through the schedule with what
passes between them, as the simulated plan's pieces will. What comes after the microbatches is taken
to need nothing that arrives, as most of it does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.extend.core import Literal

from autopar.base.cluster import Cluster
from autopar.base.transfer_costs import MeshLinks
from autopar.passes.planner.candidates import PlannedStep
from autopar.passes.schedules.make import make_schedule
from autopar.passes.schedules.schedule import Schedule
from autopar.passes.slicing.stage_graphs import StageGraph, StageLink, Stages


class StageTime(NamedTuple):
    """Seconds of a stage on its mesh: each microbatch, and once a step after and before them."""

    forward: float
    backward: float
    after: float = 0.0
    before: float = 0.0


class Crossing(NamedTuple):
    """From which stage to which, and `when`: with each "F" or "B", or once "before" or "after"."""

    source: int
    target: int
    when: str


@dataclass(frozen=True)
class UnitLinks:
    """What runs of layers pass to each other, so that it is known for all stages made of them.

    Args:
      passed: for every value, the unit that makes it, those that receive it, when, and its bytes.
    """

    passed: tuple[tuple[int, frozenset[int], str, int], ...]

    @classmethod
    def of(cls, units: Stages) -> UnitLinks:
        """Those of a step cut into units."""
        targets: dict[tuple[int, int], set[int]] = defaultdict(set)
        links: dict[tuple[int, int], StageLink] = {}
        for link in units.links:
            key = link.source, link.source_output
            targets[key].add(link.target)
            links[key] = link
        early = [_early(stage) for stage in units.graphs]
        passed = []
        for (unit, output), link in links.items():
            to = frozenset(targets[unit, output])
            if link.per_microbatch:
                when = "F" if min(to) > unit else "B"
            else:
                when = "before" if output in early[unit] else "after"
            passed.append((unit, to, when, link.bytes))
        return cls(tuple(passed))

    def crossing(self, starts: Sequence[int]) -> Mapping[Crossing, int]:
        """Bytes that pass between stages which begin at these units; the first begins at 0."""
        found: dict[Crossing, int] = defaultdict(int)
        for unit, to, when, size in self.passed:
            source = bisect_right(starts, unit) - 1
            for target in {bisect_right(starts, other) - 1 for other in to} - {source}:
                found[Crossing(source, target, when)] += size
        return found


def _early(stage: StageGraph) -> frozenset[int]:
    """The outputs of a stage's graph that are known before its loop."""
    jaxpr = stage.graph.jaxpr
    known = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if stage.loop is not None and eqn is stage.loop.scan:
            break
        known.update(eqn.outvars)
    outputs = enumerate(jaxpr.outvars)
    return frozenset(i for i, atom in outputs if isinstance(atom, Literal) or atom in known)


def own_times(step: PlannedStep, cluster: Cluster) -> tuple[StageTime, ...]:
    """What the pieces of a planned step's stages take."""
    taken = [dict.fromkeys(("prologue", "F", "B", "W", "epilogue"), 0.0) for _ in step.planned]
    prices = [planned.costs(cluster) for planned in step.planned]
    for piece in step.pieces.pieces:
        planned = step.planned[piece.stage]
        taken[piece.stage][piece.kind] += planned.seconds(piece, prices[piece.stage])
    return tuple(StageTime(x["F"], x["B"] + x["W"], x["epilogue"], x["prologue"]) for x in taken)


def promised_seconds(
    stages: Sequence[StageTime],
    crossing: Mapping[Crossing, int],
    sizes: Sequence[int],
    cluster: Cluster,
    num_microbatches: int,
    schedule: str = "1f1b",
) -> float:
    """What a step of a pipeline takes; time grows by the same for every further microbatch.

    Args:
      stages: what each takes.
      crossing: bytes that pass between them, counted once.
      sizes: devices of each mesh; they lie one after another on the cluster.
      cluster: all devices.
      num_microbatches: of the step.
      schedule: the order of the tasks; it does not split the backward pass.
    """
    busy = [(x.source, x.target) for x in crossing if x.when in ("F", "B")]
    links = MeshLinks(cluster, list(sizes), busy)
    seconds = {x: links.seconds(x.source, x.target, size) for x, size in crossing.items()}
    period = len(stages)
    few = min(num_microbatches, 4 * period)
    total = _walk(stages, seconds, make_schedule(schedule, period, few))
    if few < num_microbatches:
        more = _walk(stages, seconds, make_schedule(schedule, period, few + period))
        total += (more - total) / period * (num_microbatches - few)
    return total


def _walk(
    stages: Sequence[StageTime], seconds: Mapping[Crossing, float], schedule: Schedule
) -> float:
    """The end of the last stage, each of which runs its tasks in order as soon as it can."""
    waits: dict[tuple[int, str], list[tuple[int, float]]] = defaultdict(list)
    for (source, target, when), each in seconds.items():
        waits[target, when].append((source, each))
    now = [0.0] * len(stages)
    for stage, own in enumerate(stages):
        now[stage] = max([own.before, *(each for _, each in waits[stage, "before"])])
    done: dict[tuple[str, int, int], float] = {}
    place = [0] * len(stages)
    going = True
    while going:
        going = False
        for stage, tasks in enumerate(schedule.tasks):
            while place[stage] < len(tasks):
                kind, _, microbatch = tasks[place[stage]]
                given = waits[stage, kind]
                keys = [(kind, source, microbatch) for source, _ in given]
                if any(key not in done for key in keys):
                    break
                arrivals = (done[key] + each for key, (_, each) in zip(keys, given, strict=True))
                start = max([now[stage], *arrivals])
                takes = stages[stage].forward if kind == "F" else stages[stage].backward
                now[stage] = done[kind, stage, microbatch] = start + takes
                place[stage] += 1
                going = True
    ends = list(now)
    for stage, own in enumerate(stages):
        arrived = [ends[source] + each for source, each in waits[stage, "after"]]
        now[stage] = max([ends[stage] + own.after, *arrived])
    return max(now)
