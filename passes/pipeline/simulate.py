"""A virtual clock that runs the instruction lists that the runtimes run.

Every mesh executes its list in order, one instruction at a time. A `Send` goes on at once; what it
sends arrives after the transfer's time, in which no mesh is occupied, and a `Recv` waits for it.

With `shared_cores`, the meshes are virtual devices that share the cores of one machine (processor
sharing): a mesh of n devices wants n cores, or all if there are fewer, and when the meshes that run
something want more cores than there are, all slow down by the same factor. The given seconds are
those of a mesh that has the machine to itself.

Meshes of `in_line` start their runs one at a time, in the program's dispatch order, as one process
does whose XLA client has one queue for programs of several devices (that for CPUs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from autopar.base.errors import ScheduleError
from autopar.passes.pipeline.instructions import (
    Accumulate,
    Free,
    Instruction,
    PipelineProgram,
    Recv,
    Reshard,
    Run,
    Send,
    buffer_names,
)
from autopar.passes.pipeline.order import dispatchable, require_end
from autopar.passes.pipeline.timeline import Event, Timeline

_T = TypeVar("_T")
_Seconds = Callable[[Instruction], float]


def simulate(
    program: PipelineProgram,
    run_seconds: Callable[[Run], float] | float,
    transfer_seconds: Callable[[Send], float] | float = 0.0,
    *,
    send_seconds: Callable[[Send], float] | float = 0.0,
    recv_seconds: Callable[[Recv], float] | float = 0.0,
    reshard_seconds: Callable[[Reshard], float] | float = 0.0,
    accumulate_seconds: Callable[[Accumulate], float] | float = 0.0,
    shared_cores: int | None = None,
    in_line: Sequence[int] = (),
    devices_per_mesh: Sequence[int] | int = 1,
    temporary_bytes: Mapping[str, int] | None = None,
) -> Timeline:
    """The timeline of a program, if its instructions take the given seconds.

    Every cost is a number of seconds or a function of the instruction.

    Args:
      program: the instructions.
      run_seconds: how long a piece runs.
      transfer_seconds: from the end of a `Send` until its buffers have arrived; occupies no mesh.
      send_seconds: how long packing occupies the mesh.
      recv_seconds: how long unpacking occupies the mesh.
      reshard_seconds: how long a `Reshard` occupies the mesh.
      accumulate_seconds: how long an `Accumulate` occupies the mesh.
      shared_cores: cores that all meshes share; None where every device works for itself.
      in_line: the meshes whose runs wait for all runs of these that were dispatched before.
      devices_per_mesh: devices of each mesh, or one number for all.
      temporary_bytes: by the piece's name, the bytes per device that it needs inside while it runs.

    Raises:
      ScheduleError: meshes wait for each other in a cycle (named), or a cost is negative.
    """
    num_meshes, given = len(program.meshes), devices_per_mesh
    devices = (given,) * num_meshes if isinstance(given, int) else tuple(given)
    if len(devices) != num_meshes or min(devices, default=1) < 1:
        raise ScheduleError(
            f"devices_per_mesh={devices_per_mesh} does not give {num_meshes} meshes their devices."
        )
    if shared_cores is not None and shared_cores < 1:
        raise ScheduleError(f"shared_cores={shared_cores} is not a number of cores.")

    costs: dict[type, Callable[..., float] | float] = {
        Run: run_seconds,
        Send: send_seconds,
        Recv: recv_seconds,
        Reshard: reshard_seconds,
        Accumulate: accumulate_seconds,
        Free: 0.0,
    }

    def seconds(instruction: Instruction) -> float:
        return _cost(costs[type(instruction)], instruction)

    latency = partial(_cost, transfer_seconds)
    if shared_cores is None and not in_line:
        events = _independent(program, seconds, latency)
    else:
        cores = sum(devices) if shared_cores is None else shared_cores
        wanted = [min(n, cores) for n in devices]
        events = _shared(program, seconds, latency, cores, wanted, _line(program, in_line))
    return Timeline(program, tuple(sorted(events)), devices, dict(temporary_bytes or {}))


def _independent(
    program: PipelineProgram, seconds: _Seconds, latency: Callable[[Send], float]
) -> list[Event]:
    """Every mesh has devices of its own: each list is walked as far as it goes, in turns."""
    clock = [0.0] * len(program.meshes)
    arrival: dict[int, float] = {}
    events: list[Event] = []
    names = buffer_names(program.values)
    for mesh, index, instruction in dispatchable(program.meshes, arrival, names):
        start = clock[mesh]
        if isinstance(instruction, Recv):
            start = max(start, arrival[instruction.tag])
        clock[mesh] = start + seconds(instruction)
        if isinstance(instruction, Send):
            arrival[instruction.tag] = clock[mesh] + latency(instruction)
        events.append(Event(mesh, index, start, clock[mesh]))
    return events


def _shared(
    program: PipelineProgram,
    seconds: _Seconds,
    latency: Callable[[Send], float],
    cores: int,
    wanted: Sequence[int],
    line: Mapping[tuple[int, int], int],
) -> list[Event]:
    """All meshes share `cores`: time goes on to the next end of a run or arrival of a transfer.

    `line` has the places of the runs that start one at a time.
    """
    position = [0] * len(program.meshes)
    now = 0.0
    started: dict[int, float] = {}
    left: dict[int, float] = {}  # seconds that a mesh's instruction still needs at full speed
    arrival: dict[int, float] = {}
    events: list[Event] = []
    served = 0  # places of the line that are done

    def finish(mesh: int, start: float) -> None:
        nonlocal served
        served += (mesh, position[mesh]) in line
        instruction = program.meshes[mesh][position[mesh]]
        if isinstance(instruction, Send):
            arrival[instruction.tag] = now + latency(instruction)
        events.append(Event(mesh, position[mesh], start, now))
        position[mesh] += 1

    waking: list[float] = []
    while True:
        progress = True
        while progress:
            progress, waking = False, []
            for mesh, instructions in enumerate(program.meshes):
                while mesh not in left and position[mesh] < len(instructions):
                    instruction = instructions[position[mesh]]
                    if isinstance(instruction, Recv):
                        arrives = arrival.get(instruction.tag)
                        if arrives is None:
                            break
                        if arrives > now:
                            waking.append(arrives)
                            break
                    if line.get((mesh, position[mesh]), served) != served:
                        break
                    needs = seconds(instruction)
                    progress = True
                    if needs > 0:
                        started[mesh], left[mesh] = now, needs
                    else:
                        finish(mesh, now)
        if not left and not waking:
            break
        if not left:
            now = min(waking)
            continue
        speed = min(1.0, cores / sum(wanted[mesh] for mesh in left))
        shortest = min(left.values())
        if waking and min(waking) - now < shortest / speed:
            step = (min(waking) - now) * speed
            now = min(waking)
            left = {mesh: rest - step for mesh, rest in left.items()}
            continue
        now += shortest / speed
        left = {mesh: rest - shortest for mesh, rest in left.items()}
        # Equal work that started together ends together, whatever rounding says.
        for mesh in [mesh for mesh, rest in left.items() if rest <= shortest * 1e-12]:
            del left[mesh]
            finish(mesh, started.pop(mesh))
    require_end(program.meshes, position, buffer_names(program.values))
    return events


def _line(program: PipelineProgram, meshes: Sequence[int]) -> dict[tuple[int, int], int]:
    """The runs of these meshes, numbered in the order in which they are dispatched."""
    places = ((m, i) for m, i in program.order if m in meshes)
    runs = ((m, i) for m, i in places if isinstance(program.meshes[m][i], Run))
    return {place: number for number, place in enumerate(runs)}


def _cost(given: Callable[[_T], float] | float, instruction: _T) -> float:
    cost = given(instruction) if callable(given) else given
    if not (cost >= 0 and math.isfinite(cost)):
        raise ScheduleError(
            f"An instruction cannot take {cost} seconds.", where=f"instruction: {instruction}"
        )
    return cost
