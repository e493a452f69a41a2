"""A profile of a step on actors: every instruction alone, and a step as it always runs."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from autopar.arrays.ray_array import Keeper
from autopar.passes.pipeline.instructions import PipelineProgram
from autopar.runtime.event_times import Place, Times
from autopar.runtime.ray.actor.timing import turns
from autopar.runtime.ray.driver.running import Running


class Measured(NamedTuple):
    """What a profile is made of (`autopar.profile.profile_of`).

    Args:
      program: the instructions.
      seconds: of each alone.
      times: of a real run, by this process's clock.
      machine: more arguments of `simulate`.
    """

    program: PipelineProgram
    seconds: dict[Place, float]
    times: Times
    machine: dict[str, Any]


def profiled(running: Running, leaves: Sequence[Any], keeper: Keeper) -> Measured:
    """Run a step three times: to warm up, one instruction at a time, and as it is.

    Args:
      running: the step and its actors.
      leaves: of its arguments; none is consumed.
      keeper: of the results, which are dropped.

    Raises:
      StageError: a step failed.
    """
    actors, runnable = running.actors, running.pipeline.runnable
    program = runnable.program
    in_turn = {part.actor: turns(program, part) for part in actors.parts}
    actors.reach(
        [
            {actor for told, _ in in_turn[part.actor].told.values() for actor in told}
            for part in actors.parts
        ]
    )

    def run(record: Any) -> list[Any]:
        running.step(leaves, (), keeper, record)
        actors.finish()
        return actors.times()

    run(lambda part: "together")  # what it needs is compiled then
    seconds: dict[Place, float] = defaultdict(float)
    for found in run(lambda part: in_turn[part.actor]):
        for place, taken in found.items():
            seconds[place] = max(seconds[place], taken)
    ahead = actors.clocks()
    times = Times({}, {})
    for found, offset in zip(run(lambda part: "together"), ahead, strict=True):
        for place, at in found.dispatched.items():
            times.dispatched[place] = min(times.dispatched.get(place, math.inf), at - offset)
        for place, at in found.ready.items():
            times.ready[place] = max(times.ready.get(place, -math.inf), at - offset)
    temporary: dict[str, int] = {}
    for memory in actors.describe("memory"):
        for name, sizes in memory.items():
            temporary[name] = max(temporary.get(name, 0), sizes.get("temp_size_in_bytes", 0))
    machine = {
        "shared_cores": os.cpu_count() if actors.is_local else None,
        "devices_per_mesh": [p.num_devices for p in actors.parts if p.process == 0],
        "temporary_bytes": temporary,
    }
    return Measured(program, dict(seconds), times, machine)
