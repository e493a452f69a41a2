"""What a step is expected to take and to hold, without the list of its instructions.

A schedule of many microbatches repeats itself (`autopar.passes.schedules.repeats`), and so do the
instructions that are made of it. They are made of two shorter schedules, one of which has a round
more than the other: what it has more is what every further round has. The clock then goes through
the rounds as often as they are there, just as `simulate` goes through the whole list; and the bytes
that are alive grow by the same in every round, so that they are at their most before the rounds
that were left out or after them. A schedule in which nothing repeats is simulated whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.passes.pipeline.buffer_memory import input_bytes, live_bytes
from autopar.passes.pipeline.instructions import (
    Free,
    Instruction,
    PipelineProgram,
    Recv,
    Reshard,
    Run,
    Send,
    ValueTransfer,
)
from autopar.passes.pipeline.parts import PipelineParts, bundled
from autopar.passes.pipeline.simulate import simulate
from autopar.passes.pipeline.timeline import Forecast, Timeline
from autopar.passes.schedules.repeats import KEPT_ROUNDS, Stretch, shortened, stretches
from autopar.passes.schedules.schedule import Schedule


@dataclass(frozen=True)
class StepCosts:
    """What the instructions of a step take; all others take no time.

    Args:
      run_seconds: by the piece's name, how long it runs.
      transfer_seconds: from a program and its transfers, how long a `Send`'s buffers are under way.
      devices_per_mesh: the devices of every mesh.
      temporary_bytes: by the piece's name, the bytes per device that it needs inside while it runs.
    """

    run_seconds: Mapping[str, float]
    transfer_seconds: Callable[[PipelineProgram, Sequence[ValueTransfer]], Callable[[Send], float]]
    devices_per_mesh: tuple[int, ...]
    temporary_bytes: Mapping[str, int]

    def timeline(self, parts: PipelineParts, schedule: Schedule) -> Timeline:
        """All instructions of a step, simulated."""
        program = parts.program(schedule)
        return simulate(
            program,
            lambda run: self.run_seconds[run.piece],
            self.transfer_seconds(program, parts.transfers),
            devices_per_mesh=self.devices_per_mesh,
            temporary_bytes=self.temporary_bytes,
        )


def forecast(parts: PipelineParts, schedule: Schedule, costs: StepCosts) -> Forecast:
    """What `simulate` says of a step, for hardly more work if there are more microbatches.

    Args:
      parts: the pieces of the step, and what they read and write.
      schedule: the order of their tasks.
      costs: what they take.

    Raises:
      ScheduleError: as `emit` does.
    """
    parts = bundled(parts, schedule)
    found = stretches(schedule)
    if found:
        short, longer = (_short(parts, schedule, found, KEPT_ROUNDS + more) for more in (0, 1))
        further = min(stretch.num_rounds for stretch in found) - KEPT_ROUNDS
        if further > 1 and _alike(short, longer):
            clock = _Clock(longer, costs, parts.transfers, further - 1)
            clock.go()
            return Forecast(
                schedule.name,
                clock.step_seconds,
                tuple(clock.busy),
                clock.span,
                _peaks(short, longer, costs.temporary_bytes, further),
                costs.devices_per_mesh,
            )
    return costs.timeline(parts, schedule).forecast


class _Segment(NamedTuple):
    """Instructions of one mesh, `start` to `stop`.

    Those of a round that is there several times have the stretch that it is of. `later` says by how
    many groups of microbatches tasks of a kind and stage are later if a round is there once more.
    """

    start: int
    stop: int
    stretch: Stretch | None
    later: Mapping[tuple[str, int], int]


@dataclass(frozen=True)
class _Short:
    """The instructions of a shorter schedule, and for every mesh its segments."""

    program: PipelineProgram
    segments: tuple[tuple[_Segment, ...], ...]


def _short(
    parts: PipelineParts, schedule: Schedule, found: Sequence[Stretch], num_rounds: int
) -> _Short:
    short = shortened(schedule, found, num_rounds)
    program = parts.program(short.schedule)
    meshes = []
    for mesh, middles in enumerate(short.middles):
        tasks, instructions = short.schedule.tasks[mesh], program.meshes[mesh]
        segments: list[_Segment] = []
        start, later = 0, dict[tuple[str, int], int]()
        for stretch, middle in zip(found, middles, strict=True):
            cuts = stretch.cuts[mesh]
            end = middle + (cuts[1] - cuts[0]) * (num_rounds - KEPT_ROUNDS)
            first, last = (_place(instructions, tasks[place:]) for place in (middle, end))
            segments.append(_Segment(start, first, None, dict(later)))
            segments.append(_Segment(first, last, stretch, {}))
            later.update(dict.fromkeys(stretch.kinds, stretch.group))
            start = last
        segments.append(_Segment(start, len(instructions), None, later))
        meshes.append(tuple(segments))
    return _Short(program, tuple(meshes))


def _place(instructions: Sequence[Instruction], tasks: Sequence[tuple[str, int, int]]) -> int:
    """The index of the first instruction for the first of these tasks that has a piece."""
    runs = {
        (x.kind, x.stage, x.microbatch): index
        for index, x in enumerate(instructions)
        if isinstance(x, Run)
    }
    index = next((runs[task] for task in tasks if task in runs), len(instructions))
    # What arrives for a run stands before it; before that is what follows another one.
    place = index
    while place > 0 and isinstance(instructions[place - 1], Recv | Reshard | Free):
        place -= 1
        if not isinstance(instructions[place], Free):
            index = place
    return index


def _alike(short: _Short, longer: _Short) -> bool:
    """Whether the longer program is the shorter one with a round more, like the one before it."""
    for mesh, (few, more) in enumerate(zip(short.segments, longer.segments, strict=True)):
        program = longer.program.meshes[mesh]
        for a, b in zip(few, more, strict=True):
            if a.stretch is None and b.stop - b.start != a.stop - a.start:
                return False
            if b.stretch is not None:
                size, group = b.stop - b.start, b.stretch.group
                before = program[max(b.start - size, 0) : b.start]
                if [*map(_shape(0), before)] != [*map(_shape(group), program[b.start : b.stop])]:
                    return False
    return True


def _shape(later: int) -> Callable[[Instruction], object]:
    """An instruction without its tag, for microbatches that are `later`."""

    def shape(x: Instruction) -> object:
        buffers = (*x.reads, None, *x.writes, None, *x.gone)
        moved = tuple(b and (b.value, b.microbatch and b.microbatch - later) for b in buffers)
        return type(x), getattr(x, "piece", None), moved

    return shape


def _peaks(
    short: _Short, longer: _Short, temporary: Mapping[str, int], further: int
) -> tuple[int, ...]:
    """The most bytes of every mesh with so many rounds more than the short program has."""
    rows = zip(
        *(live_bytes(x.program, temporary) for x in (short, longer)),
        *(input_bytes(x.program) for x in (short, longer)),
        *(x.segments for x in (short, longer)),
        strict=True,
    )
    peaks = []
    for few, more, given, given_more, segments, others in rows:
        most = [given + further * (given_more - given)]
        for a, b in zip(segments, others, strict=True):
            if a.stretch is None:
                pairs = zip(few[a.start : a.stop], more[b.start : b.stop], strict=True)
                most += [x.during + further * (y.during - x.during) for x, y in pairs]
        peaks.append(max(most))
    return tuple(peaks)


_SEND, _RECV, _RUN = range(3)


class _Op(NamedTuple):
    """A run of some seconds, or a transfer by its number, microbatch and seconds under way."""

    kind: int
    seconds: float = 0.0
    slot: int = 0
    microbatch: int = 0


class _Clock:
    """The virtual clock of a program whose rounds are there `further` more times."""

    def __init__(
        self,
        longer: _Short,
        costs: StepCosts,
        transfers: Sequence[ValueTransfer],
        further: int,
    ) -> None:
        self.program, self.costs, self.further = longer.program, costs, further
        self.transfer_seconds = costs.transfer_seconds(longer.program, transfers)
        number = len(self.program.meshes)
        self.clock, self.busy = [0.0] * number, [0.0] * number
        self.started: list[float | None] = [None] * number
        self.ended = [0.0] * number
        self.arrival: dict[tuple[int, int], float] = {}
        self.slot_of, self.early = self._slots()
        self.walks = [
            [(self._ops(mesh, segment), segment.stretch) for segment in segments]
            for mesh, segments in enumerate(longer.segments)
        ]

    @property
    def step_seconds(self) -> float:
        """From the first start, which is at 0, to the last end."""
        return max(self.clock)

    @property
    def span(self) -> tuple[float, ...]:
        """From the first run to the last end."""
        pairs = zip(self.ended, self.started, strict=True)
        return tuple(end - (start or 0.0) for end, start in pairs)

    def go(self) -> None:
        """Every mesh in its turn, as far as it comes."""
        going = [self._steps(mesh) for mesh in range(len(self.walks))]
        while going:
            before = len(self.arrival)
            left = [steps for steps in going if next(steps, None) is not None]
            # `emit` has proved that a shorter list runs.
            assert len(left) < len(going) or len(self.arrival) > before, "the meshes are stuck"
            going = left

    def _steps(self, mesh: int) -> Iterator[int]:
        """Executes a mesh's list; gives its number whenever it has to wait for another mesh."""
        now, busy, arrival = 0.0, 0.0, self.arrival
        for ops, stretch in self.walks[mesh]:
            times, group = (1, 0) if stretch is None else (self.further + 1, stretch.group)
            for shift in range(0, times * group, group) if group else (0,):
                for kind, seconds, slot, microbatch in ops:
                    if kind == _RUN:
                        if self.started[mesh] is None:
                            self.started[mesh] = now
                        busy += seconds
                        now += seconds
                        self.ended[mesh] = now
                        continue
                    place = slot, microbatch + shift if microbatch >= 0 else -1
                    if kind == _SEND:
                        arrival[place] = now + seconds
                        continue
                    while place not in arrival:
                        yield mesh
                    now = max(now, arrival[place])
        self.clock[mesh], self.busy[mesh] = now, busy

    def _slots(self) -> tuple[dict[int, int], set[int]]:
        """The kind of each transfer by its tag; the kinds that are all sent before the loop.

        Those arrive at the same time for all microbatches.
        """
        numbers: dict[object, int] = {}
        slots, early = {}, set()
        for mesh, instructions in enumerate(self.program.meshes):
            loop = False
            for x in instructions:
                loop |= isinstance(x, Run) and x.microbatch is not None
                if isinstance(x, Send):
                    key = mesh, x.to, tuple((b.value, b.microbatch is None) for b in x.buffers)
                    slots[x.tag] = numbers.setdefault(key, len(numbers))
                    if not loop:
                        early.add(slots[x.tag])
        return slots, early

    def _ops(self, mesh: int, segment: _Segment) -> list[_Op]:
        """What takes time in a segment, with the microbatches that it has in the whole program."""
        instructions = self.program.meshes[mesh]
        ops = []
        everything = max(segment.later.values(), default=0)
        for index in range(segment.start, segment.stop):
            x = instructions[index]
            if isinstance(x, Run):
                ops.append(_Op(_RUN, self.costs.run_seconds[x.piece]))
            elif isinstance(x, Send | Recv):
                # A transfer belongs to the run after which it starts, or before which it arrives.
                starts = isinstance(x, Send)
                near = reversed(instructions[:index]) if starts else instructions[index:]
                run = next((y for y in near if isinstance(y, Run)), None)
                later = everything
                if run is not None and run.microbatch is not None:
                    later = segment.later.get((run.kind, run.stage), 0)
                slot, microbatch = self.slot_of[x.tag], x.buffers[0].microbatch
                if microbatch is None or slot in self.early:
                    microbatch = -1
                else:
                    microbatch += later * self.further
                if isinstance(x, Send):
                    seconds = self.transfer_seconds(x)
                    ops.append(_Op(_SEND, seconds, slot, microbatch))
                else:
                    ops.append(_Op(_RECV, 0.0, slot, microbatch))
        return ops
