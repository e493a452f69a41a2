"""Times of every instruction of a pipelined step: each one alone, and in the real run.

`alone` waits for each instruction before it dispatches the next, so an instruction has the whole
machine. `together` dispatches as a step does; a thread per mesh waits for the results of the
mesh's instructions, in their order, and notes when they were there.

XLA's CPU client runs programs of several devices one after the other, in the order in which they
were dispatched, whichever devices they are for (seen with jaxlib 0.10.2: last_collective_launch);
`in_line` tells for which meshes that is so. Programs of one device run beside each other.
"""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.passes.pipeline.instructions import (
    Buffer,
    Free,
    Instruction,
    PipelineProgram,
    Recv,
    Run,
    Send,
)
from autopar.passes.pipeline.lasting import lasting_writes
from autopar.passes.pipeline.timeline import Event
from autopar.runtime.local import PipelineStep

Place = tuple[int, int]
"""A mesh, and the index of an instruction in its list."""


class Times(NamedTuple):
    """When, on one clock, an instruction's dispatch began, and its results, if any, were there."""

    dispatched: dict[Place, float]
    ready: dict[Place, float]


def in_line(step: PipelineStep) -> tuple[int, ...]:
    """The meshes whose programs wait for all programs that were dispatched before."""
    pipeline = step.pipeline
    homes = zip(pipeline.program.schedule.mesh_of_stage, pipeline.meshes, strict=True)
    is_cpu = pipeline.meshes[0].devices.flat[0].platform == "cpu"
    return tuple(sorted({home for home, mesh in homes if mesh.size > 1 and is_cpu}))


def alone(step: PipelineStep, buffers: dict[Buffer, Any]) -> dict[Place, float]:
    """Seconds of each instruction from its dispatch until its results are there.

    Those of a `Send` are the seconds until everything has arrived; a `Recv` then takes none. The
    buffers are the step's inputs, placed; they are consumed.
    """
    program = step.pipeline.program
    jax.block_until_ready(list(buffers.values()))
    sent: dict[int, Any] = {}
    seconds: dict[Place, float] = {}
    for place, action in zip(program.order, step.actions, strict=True):
        x = _at(program, place)
        start = time.perf_counter()
        action(buffers, sent)
        made = sent[x.tag] if isinstance(x, Send) else [buffers[b] for b in x.writes]
        jax.block_until_ready(made)
        passed = time.perf_counter() - start
        seconds[place] = 0.0 if isinstance(x, Recv | Free) else passed
    return seconds


def together(step: PipelineStep, buffers: dict[Buffer, Any]) -> Times:
    """The times of a step as it is; its inputs, placed in these buffers, are consumed.

    Raises:
      Exception: whatever waiting for the step's results raises.
    """
    program = step.pipeline.program
    waited = lasting_writes(program)
    jax.block_until_ready(list(buffers.values()))
    sent: dict[int, Any] = {}
    times = Times({}, {})
    waiters = [Waiter(times.ready) for _ in program.meshes]
    try:
        for place, action in zip(program.order, step.actions, strict=True):
            times.dispatched[place] = time.perf_counter()
            action(buffers, sent)
            arrays = telling(_at(program, place), waited.get(place, ()), buffers)
            if arrays:
                waiters[place[0]].put(place, arrays)
    finally:
        for waiter in waiters:
            waiter.end()
    jax.block_until_ready([buffers[Buffer(n, None)] for n in step.pipeline.pieces.outputs])
    return times


def events(program: PipelineProgram, times: Times, line: Sequence[int]) -> tuple[Event, ...]:
    """When every instruction ran, from when its results were seen to be there.

    A run starts once it is dispatched, what is before it on its mesh has ended, and what it
    receives has arrived; on the meshes of `line`, once the program dispatched before has ended too.
    """
    origin = min(times.dispatched.values())
    done = _done(program, times, line)
    clock = [origin] * len(program.meshes)
    last = origin
    sent: dict[int, float] = {}
    found = []
    for place in program.order:
        mesh, index = place
        instruction = _at(program, place)
        start = end = clock[mesh]
        if isinstance(instruction, Send):
            sent[instruction.tag] = start
        elif isinstance(instruction, Recv):
            start = end = max(start, sent[instruction.tag], done.get(place, origin))
        elif not isinstance(instruction, Free):
            queued = mesh in line and isinstance(instruction, Run)
            start = max(start, times.dispatched[place], last if queued else origin)
            end = max(start, done.get(place, origin))
            last = end if queued else last
        clock[mesh] = end
        found.append(Event(mesh, index, start - origin, end - origin))
    return tuple(sorted(found))


def _done(program: PipelineProgram, times: Times, line: Sequence[int]) -> dict[Place, float]:
    """When results were there at the latest: threads see that late, but not one after another.

    What was seen of an instruction also tells of those that must have ended before it.
    """
    bound = [math.inf] * len(program.meshes)
    last = math.inf
    arrived: dict[int, float] = {}
    found: dict[Place, float] = {}
    for place in reversed(program.order):
        mesh, instruction = place[0], _at(program, place)
        seen = min(times.ready.get(place, math.inf), bound[mesh])
        if isinstance(instruction, Recv):
            arrived[instruction.tag] = seen
        elif isinstance(instruction, Send):
            bound[mesh] = min(bound[mesh], arrived[instruction.tag])
        elif not isinstance(instruction, Free):
            if mesh in line and isinstance(instruction, Run):
                seen = last = min(seen, last)
            bound[mesh] = seen
        if seen < math.inf:
            found[place] = seen
    return found


class Waiter:
    """A thread that waits for results in the order in which it gets them.

    What fails has no time: a buffer may be gone without its array knowing, where a program returned
    an argument as it came; a program's own failure shows in the step's results.
    """

    def __init__(self, ready: dict[Place, float]):
        self._ready = ready
        self._queue: queue.SimpleQueue[tuple[Place, list[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="autopar profile", daemon=True)
        self._thread.start()

    def put(self, place: Place, candidates: list[Any]) -> None:
        """Wait for the smallest array: all results of a program are there at once."""
        self._queue.put((place, [min(candidates, key=lambda x: x.nbytes)]))

    def end(self) -> None:
        """Wait until everything has been waited for."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            place, arrays = item
            with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError):
                jax.block_until_ready(arrays)
                self._ready[place] = time.perf_counter()


def telling(
    instruction: Instruction, lasting: Sequence[Buffer], buffers: dict[Buffer, Any]
) -> list[Any]:
    """Arrays that are there when an instruction that was dispatched is done; none, if none tells.

    Of what it writes, nothing takes over what is `lasting`. The buffers are those after it.
    """
    if lasting:
        return [buffers[buffer] for buffer in lasting]
    if isinstance(instruction, Free | Send):
        return []
    usable = [
        x
        for buffer in instruction.writes
        if (x := buffers[buffer]).size
        and isinstance(x.sharding, NamedSharding)
        and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    ]
    if not usable:
        return []
    # A tiny array that is there as soon as these are, and outlives them.
    smallest = min(usable, key=lambda x: x.nbytes)
    return [_first_elements(smallest.sharding.mesh, smallest.sharding.spec)(smallest)]


@functools.lru_cache(maxsize=256)
def _first_elements(mesh: Mesh, spec: PartitionSpec) -> Callable[[Any], Any]:
    """One element of every device's part; nothing is exchanged."""
    return jax.jit(
        jax.shard_map(
            lambda part: part.reshape(-1)[:1],
            mesh=mesh,
            in_specs=spec,
            out_specs=PartitionSpec(mesh.axis_names),
            check_vma=False,
        )
    )


def _at(program: PipelineProgram, place: Place) -> Instruction:
    return program.meshes[place[0]][place[1]]
