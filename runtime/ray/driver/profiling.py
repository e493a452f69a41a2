"""A profile of a step on actors: every instruction alone, and a step as it always runs."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from autopar.passes.pipeline.instructions import PipelineProgram
from autopar.runtime.event_times import Place, Times
from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.actor.timing import turns
from autopar.runtime.ray.driver.running import Running


class Measured(NamedTuple):
    """What a profile is made of (`autopar.profile.profile_of`).

    It has the seconds of each instruction alone, the times of a real run by this process's clock,
    and more arguments of `simulate` (`machine`).
    """

    program: PipelineProgram
    seconds: dict[Place, float]
    times: Times
    machine: dict[str, Any]


def profiled(running: Running, leaves: Sequence[Any]) -> Measured:
    """Run a step three times: to warm up, one instruction at a time, and as it is.

    None of its arguments' leaves is consumed, and the results are dropped.

    Raises:
      StageError: a step failed.
    """
    pool, steps, program = running.pool, running.steps, running.pipeline.runnable.program
    in_turn = {plan.actor: turns(program, plan) for plan in pool.plans}
    steps.ask(
        "reach",
        [
            ({other: pool.addresses[other] for other in in_turn[plan.actor].others}, pool.deadline)
            for plan in pool.plans
        ],
        "connecting",
    )

    def run(record: Callable[[ActorPlan], Any]) -> list[Any]:
        running.step(leaves, (), record)
        steps.finish()
        return steps.ask("times", None, "reading times")

    run(lambda plan: "together")  # what it needs is compiled then
    seconds: dict[Place, float] = defaultdict(float)
    for found in run(lambda plan: in_turn[plan.actor]):
        for place, taken in found.items():
            seconds[place] = max(seconds[place], taken)
    ahead = _clocks(running)
    times = Times({}, {})
    for found, offset in zip(run(lambda plan: "together"), ahead, strict=True):
        for place, at in found.dispatched.items():
            times.dispatched[place] = min(times.dispatched.get(place, math.inf), at - offset)
        for place, at in found.ready.items():
            times.ready[place] = max(times.ready.get(place, -math.inf), at - offset)
    temporary: dict[str, int] = {}
    for memory in steps.ask("describe", [("memory",)] * len(pool.plans), "describing memory"):
        for name, sizes in memory.items():
            temporary[name] = max(temporary.get(name, 0), sizes.get("temp_size_in_bytes", 0))
    machine = {
        "shared_cores": os.cpu_count() if pool.is_local else None,
        "devices_per_mesh": [plan.num_devices for plan in pool.plans if plan.process == 0],
        "temporary_bytes": temporary,
    }
    return Measured(program, dict(seconds), times, machine)


def _clocks(running: Running) -> list[float]:
    """How far each actor's clock is ahead of this process's, in seconds; 0 on one machine."""
    pool, steps = running.pool, running.steps
    if pool.is_local:
        return [0.0] * len(pool.plans)
    with steps.busy():
        found = []
        for number, actor in enumerate(pool.handles):
            tries = []
            for _ in range(_CLOCK_TRIES):
                before = time.perf_counter()
                there = steps.result(number, actor.clock.remote())
                after = time.perf_counter()
                tries.append((after - before, there - (before + after) / 2))
            found.append(min(tries)[1])
        return found


_CLOCK_TRIES = 9
"""The quickest of so many questions for the time is taken."""
