"""When every instruction ran, simulated or measured: the same rows, to be compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from autopar.base.displayed import Displayed
from autopar.base.errors import ScheduleError
from autopar.base.units import format_bytes, format_seconds
from autopar.passes.pipeline.buffer_memory import input_bytes, live_bytes
from autopar.passes.pipeline.instructions import (
    Free,
    Instruction,
    PipelineProgram,
    Recv,
    Run,
    Send,
    buffer_names,
)

_MICROSECONDS = 1e6


@dataclass(frozen=True)
class Forecast:
    """A step in seconds and bytes, without the times of its instructions.

    Args:
      name: the schedule's.
      step_seconds: from the first start to the last end on any mesh.
      busy: for every mesh, the seconds in which it executes something.
      span: for every mesh, the seconds from the start of its first run or transfer to its last end.
      peak_bytes: for every mesh, the most bytes per device that are alive at once.
      devices_per_mesh: weights of the meshes in `bubble_fraction`.
    """

    name: str
    step_seconds: float
    busy: tuple[float, ...]
    span: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    devices_per_mesh: tuple[int, ...]

    @property
    def bubble_fraction(self) -> float:
        """The share of all devices' time in the step in which they execute nothing."""
        devices, busy = self.devices_per_mesh, self.busy
        total = sum(devices) * self.step_seconds
        if total == 0:
            return 0.0
        # What is busy all the time may come out a last digit longer than the step.
        return max(0.0, 1 - sum(n * t for n, t in zip(devices, busy, strict=True)) / total)

    def __str__(self) -> str:
        step = format_seconds(self.step_seconds)
        title = f"{self.name}: {step} a step, {self.bubble_fraction:.1%} bubble"
        rows = [("mesh", "busy", "span", "idle", "peak memory")]
        for mesh, (busy, span) in enumerate(zip(self.busy, self.span, strict=True)):
            idle = max(0.0, 1 - busy / self.step_seconds) if self.step_seconds else 0.0
            peak = format_bytes(self.peak_bytes[mesh])
            times = format_seconds(busy), format_seconds(span)
            rows.append((str(mesh), *times, f"{idle:.1%}", peak))
        return "\n".join([title, *_aligned(rows)])


@dataclass(frozen=True, order=True)
class Event:
    """One instruction of one mesh from `start` to `end`, in seconds, without the wait before it."""

    mesh: int
    index: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline(Displayed):
    """A program with the time of every instruction.

    Args:
      program: what ran.
      events: one for every instruction, by mesh and index.
      devices_per_mesh: weights of the meshes in `bubble_fraction`; by default all are equal.
      temporary_bytes: by the piece's name, the bytes per device that it needs inside while it runs.
    """

    program: PipelineProgram
    events: tuple[Event, ...]
    devices_per_mesh: tuple[int, ...] | None = None
    temporary_bytes: Mapping[str, int] = field(default_factory=dict)

    page: ClassVar = ("small_pages", "timeline_page")

    def instruction(self, event: Event) -> Instruction:
        return self.program.meshes[event.mesh][event.index]

    @property
    def step_seconds(self) -> float:
        """From the first start to the last end on any mesh."""
        if not self.events:
            return 0.0
        return max(event.end for event in self.events) - min(event.start for event in self.events)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For every mesh, the seconds in which it executes something."""
        seconds = [0.0] * len(self.program.meshes)
        for event in self.events:
            seconds[event.mesh] += event.seconds
        return tuple(seconds)

    @cached_property
    def span(self) -> tuple[float, ...]:
        """For every mesh, the seconds from the start of its first run or transfer to its last end.

        Instructions that take no time do not count, except runs.
        """
        times: list[list[float]] = [[] for _ in self.program.meshes]
        for event in self.events:
            if event.seconds > 0 or isinstance(self.instruction(event), Run):
                times[event.mesh] += (event.start, event.end)
        return tuple(max(mesh, default=0.0) - min(mesh, default=0.0) for mesh in times)

    @property
    def forecast(self) -> Forecast:
        """The whole step of it, without the events."""
        devices = self.devices_per_mesh or (1,) * len(self.busy)
        name, step = self.program.schedule.name, self.step_seconds
        return Forecast(name, step, self.busy, self.span, self.peak_bytes, devices)

    @property
    def bubble_fraction(self) -> float:
        """The share of all devices' time in the step in which they execute nothing."""
        return self.forecast.bubble_fraction

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """For every mesh, the most bytes per device that are alive at once."""
        return tuple(max(size for _, size in steps) for steps in self._bytes)

    def bytes_over_time(self, mesh: int) -> tuple[tuple[float, int], ...]:
        """(seconds, bytes per device alive on `mesh` from then on), in the order of time."""
        return self._bytes[mesh]

    @cached_property
    def _bytes(self) -> tuple[tuple[tuple[float, int], ...], ...]:
        live = live_bytes(self.program, self.temporary_bytes)
        start = min((event.start for event in self.events), default=0.0)
        steps = [[(start, given)] for given in input_bytes(self.program)]
        for event in self.events:
            during, after = live[event.mesh][event.index]
            steps[event.mesh] += [(event.start, during), (event.end, after)]
        return tuple(map(tuple, steps))

    @property
    def run_order(self) -> tuple[tuple[int, str], ...]:
        """(mesh, piece and microbatch) of all runs by the time of their start.

        Of runs that start together, as one whose end was seen late, the first to be dispatched.
        """
        dispatched = {place: number for number, place in enumerate(self.program.order)}
        runs = [e for e in self.events if isinstance(self.instruction(e), Run)]
        runs.sort(key=lambda event: (event.start, dispatched[event.mesh, event.index]))
        return tuple((event.mesh, self.instruction(event).label) for event in runs)

    def to_chrome_trace(self) -> dict[str, Any]:
        """This timeline for chrome://tracing or Perfetto, ready for `json.dump`.

        It has a row per mesh and its memory as a counter, in the Trace Event Format: complete
        events ("X"), flows ("s", "f") from each send to its recv, counters ("C") of live bytes, and
        metadata ("M"); times are in microseconds.
        """
        program = self.program
        names = buffer_names(program.values)
        rows: list[dict[str, Any]] = []

        def add(ph: str, name: str, mesh: int, **more: Any) -> None:
            rows.append({"ph": ph, "name": name, "pid": 0, "tid": mesh, **more})

        add("M", "process_name", 0, args={"name": program.schedule.name})
        for mesh in range(len(program.meshes)):
            add("M", "thread_name", mesh, args={"name": f"mesh {mesh}"})
            counter = f"mesh {mesh}: bytes per device"
            for seconds, size in self.bytes_over_time(mesh):
                add("C", counter, mesh, ts=seconds * _MICROSECONDS, args={"bytes": size})
        for event in self.events:
            instruction = self.instruction(event)
            if isinstance(instruction, Free):
                continue
            kind = instruction.kind if isinstance(instruction, Run) else type(instruction).__name__
            start, duration = event.start * _MICROSECONDS, event.seconds * _MICROSECONDS
            args = {"index": event.index, "instruction": instruction.text(names)}
            add("X", instruction.label, event.mesh, cat=kind, ts=start, dur=duration, args=args)
            if isinstance(instruction, Send | Recv):
                flow: dict[str, Any] = {"cat": "transfer", "id": instruction.tag}
                if isinstance(instruction, Send):
                    add("s", "transfer", event.mesh, ts=event.end * _MICROSECONDS, **flow)
                else:
                    add("f", "transfer", event.mesh, ts=start, bp="e", **flow)
        return {"traceEvents": rows, "displayTimeUnit": "ms"}

    def __str__(self) -> str:
        return str(self.forecast)


def difference(expected: Timeline, measured: Timeline) -> str:
    """The rows of `compared` as text."""
    heads = ("mesh", "instruction", "count", "expected", "measured", "difference")
    return "\n".join(_aligned([heads, *compared(expected, measured)]))


def compared(expected: Timeline, measured: Timeline) -> list[tuple[str, ...]]:
    """A table of two timelines of one program: how long each piece took, and the whole step.

    What took no time in either (freeing, free transfers) is left out. Its columns are mesh,
    instruction, count, expected and measured time, and difference.

    Args:
      expected: the simulated one.
      measured: that of a real run.

    Raises:
      ScheduleError: they are not of the same instructions.
    """
    if expected.program.meshes != measured.program.meshes:
        raise ScheduleError(
            "Two timelines can only be compared if they are of the same instructions.",
            where=f"{expected.program.schedule.name} and {measured.program.schedule.name}",
        )
    rows: list[tuple[str, ...]] = []
    before, after = _totals(expected), _totals(measured)
    for (mesh, what), (count, seconds) in before.items():
        if seconds or after[mesh, what][1]:
            rows.append((str(mesh), what, str(count), *_compared(seconds, after[mesh, what][1])))
    rows.append(("", "step", "", *_compared(expected.step_seconds, measured.step_seconds)))
    return rows


def _totals(timeline: Timeline) -> dict[tuple[int, str], tuple[int, float]]:
    totals: dict[tuple[int, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in timeline.events:
        instruction = timeline.instruction(event)
        kind = type(instruction).__name__.lower()
        what = instruction.piece if isinstance(instruction, Run) else kind
        count, seconds = totals[event.mesh, what]
        totals[event.mesh, what] = (count + 1, seconds + event.seconds)
    return totals


def _compared(expected: float, measured: float) -> tuple[str, str, str]:
    change = f"{(measured - expected) / expected:+.1%}" if expected else "-"
    return format_seconds(expected), format_seconds(measured), change


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
