"""`Profile`: what the instructions of a real step took, beside what a simulation makes of them."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from autopar.base.displayed import Displayed
from autopar.base.new_files import place_for
from autopar.passes.pipeline.instructions import Instruction, PipelineProgram, Run
from autopar.passes.pipeline.simulate import simulate
from autopar.passes.pipeline.timeline import Timeline, difference
from autopar.runtime.event_times import Times, alone, events, in_line, together
from autopar.runtime.local import PipelineStep

Leaves = tuple[list[Any], list[Any]]
"""The leaves to donate, in memory of their own, and the others."""


@dataclasses.dataclass(frozen=True)
class Profile(Displayed):
    """A measured step. `print(profile)` compares it with the expected one by instruction.

    Args:
      timeline: of the real run, instructions of all meshes overlapping as they do in every step.
      expected: simulated with the seconds that every instruction took alone. On a CPU the meshes
        share the machine's cores.
      seconds: what each instruction took alone, by mesh and index, as it was measured. (The
        simulation takes the median over the microbatches of a piece.)
      is_received: whether the seconds of a `Send` are those that it occupies its mesh, and a `Recv`
        has its own; else those of a `Send` are all until it has arrived.
    """

    timeline: Timeline
    expected: Timeline
    seconds: Mapping[tuple[int, int], float] = dataclasses.field(hash=False)
    is_received: bool = False

    page: ClassVar = ("small_pages", "profile_page")

    @property
    def step_seconds(self) -> float:
        """Of the real run."""
        return self.timeline.step_seconds

    @property
    def deviation(self) -> float:
        """(measured - expected) / measured, of the whole step."""
        measured = self.step_seconds
        return (measured - self.expected.step_seconds) / measured if measured else 0.0

    @property
    def on_own_devices(self) -> Timeline:
        """Simulated with the same seconds, if every device worked for itself.

        Its `bubble_fraction` is the schedule's; virtual devices that share cores hide that.
        """
        return _simulated(
            self.expected.program,
            self.seconds,
            self.is_received,
            devices_per_mesh=self.expected.devices_per_mesh or 1,
            temporary_bytes=self.expected.temporary_bytes,
        )

    def to_chrome_trace(self) -> dict[str, Any]:
        """The real run for chrome://tracing or Perfetto, ready for `json.dump`.

        `expected.to_chrome_trace()` has the same rows.
        """
        return self.timeline.to_chrome_trace()

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write `to_chrome_trace()` as JSON; an existing file is replaced."""
        place_for(path).write_text(json.dumps(self.to_chrome_trace()), encoding="utf-8")

    def __str__(self) -> str:
        return f"{self.timeline}\n\n{difference(self.expected, self.timeline)}"

    def __repr__(self) -> str:
        title = str(self.timeline).splitlines()[0]
        return f"<Profile {title}, {self.deviation:+.1%} from the simulation>"


def profile_step(step: PipelineStep, leaves: Callable[[], Leaves]) -> Profile:
    """Run a step three times: to warm up, one instruction at a time, and as it is.

    `leaves` gives fresh copies of what a step consumes.
    """
    pipeline, program = step.pipeline, step.pipeline.program
    line = in_line(step)
    together(step, step.place(*leaves()))
    seconds = alone(step, step.place(*leaves()))
    times = together(step, step.place(*leaves()))
    sizes = [0] * len(program.meshes)
    for home, mesh in zip(program.schedule.mesh_of_stage, pipeline.meshes, strict=True):
        sizes[home] = max(sizes[home], mesh.size)
    is_cpu = pipeline.meshes[0].devices.flat[0].platform == "cpu"
    return profile_of(
        program,
        seconds,
        times,
        line=line,
        is_received=False,
        shared_cores=os.cpu_count() if is_cpu else None,
        devices_per_mesh=sizes,
        temporary_bytes=_temporary_bytes(step),
    )


def profile_of(
    program: PipelineProgram,
    seconds: Mapping[tuple[int, int], float],
    times: Times,
    *,
    line: Sequence[int],
    is_received: bool,
    **machine: Any,
) -> Profile:
    """What was measured, as a profile.

    Args:
      program: the instructions.
      seconds: of each alone.
      times: of a real run.
      line: the meshes whose programs wait for all programs that were dispatched before.
      is_received: whether a `Send` and its `Recv` occupy their meshes for the seconds of each; else
        those of a `Send` are all until it has arrived.
      **machine: more arguments of `simulate`.
    """
    expected = _simulated(program, seconds, is_received, in_line=line, **machine)
    measured = dataclasses.replace(expected, events=events(program, times, line))
    return Profile(measured, expected, seconds, is_received)


def _simulated(
    program: PipelineProgram,
    seconds: Mapping[tuple[int, int], float],
    is_received: bool,
    **machine: Any,
) -> Timeline:
    """What each instruction took alone, put together; equal runs take equally long."""
    groups: dict[str | Instruction, list[float]] = defaultdict(list)

    def key(instruction: Instruction) -> str | Instruction:
        return instruction.piece if isinstance(instruction, Run) else instruction

    for (mesh, index), taken in seconds.items():
        groups[key(program.meshes[mesh][index])].append(taken)
    typical = {name: statistics.median(times) for name, times in groups.items()}

    def cost(instruction: Instruction) -> float:
        return typical[key(instruction)]

    kinds = ["reshard", "accumulate", *(["send", "recv"] if is_received else ["transfer"])]
    costs: dict[str, Any] = {f"{kind}_seconds": cost for kind in kinds}
    return simulate(program, cost, **costs, **machine)


def _temporary_bytes(step: PipelineStep) -> dict[str, int]:
    """What XLA says that pieces need inside, per device."""
    sizes: dict[str, int] = defaultdict(int)
    for (name, _), compiled in step.variants.items():
        analysis = compiled.memory_analysis()
        if analysis is not None:
            sizes[name] = max(sizes[name], int(analysis.temp_size_in_bytes))
    return dict(sizes)
