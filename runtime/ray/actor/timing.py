"""When a step's instructions ran on an actor: one at a time in all actors, or as they always run.

What local profiles do in one process (`autopar.runtime.profile`) is done here by each actor for its
own list. For the times of instructions that have the machine for themselves, actors take turns:
the process of one mesh tells those of the next in the program's order when it is done.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax

from autopar.passes.pipeline.instructions import Buffer, Free, PipelineProgram, Send
from autopar.passes.pipeline.lasting import lasting_writes
from autopar.runtime.event_times import Place, Times, Waiter, telling
from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.actor.exchange import Exchange

TURN = 1 << 41
"""This bit of a tag says that it is the receiver's turn; the rest counts instructions."""


@dataclass(frozen=True)
class Turns:
    """When an actor may run which of its instructions, if all take turns.

    Each has, by the index of an instruction, a number: with the actor that ends before it, or with
    the actors that wait for its end and are told.
    """

    awaited: dict[int, tuple[int, int]]
    told: dict[int, tuple[tuple[int, ...], int]]

    @property
    def others(self) -> set[int]:
        """The actors that it tells."""
        return {actor for actors, _ in self.told.values() for actor in actors}


def turns(program: PipelineProgram, plan: ActorPlan) -> Turns:
    """The turns of an actor in the order of a program; each process of a mesh has the mesh's."""
    awaited: dict[int, tuple[int, int]] = {}
    told: dict[int, tuple[tuple[int, ...], int]] = {}
    pairs = zip(program.order, program.order[1:], strict=False)
    for number, ((mesh, index), (next_mesh, next_index)) in enumerate(pairs):
        if mesh == next_mesh:
            continue
        if mesh == plan.mesh and plan.process == 0:
            told[index] = plan.processes[next_mesh], number
        if next_mesh == plan.mesh:
            awaited[next_index] = plan.processes[mesh][0], number
    return Turns(awaited, told)


class Together:
    """Notes when instructions are dispatched and when their results are there."""

    def __init__(self, plan: ActorPlan) -> None:
        self._plan = plan
        self._waited = lasting_writes(plan.program)
        self.times = Times({}, {})
        self._waiter = Waiter(self.times.ready)

    def before(self, index: int) -> None:
        """An instruction is about to be dispatched."""
        self.times.dispatched[self._plan.mesh, index] = time.perf_counter()

    def after(self, index: int, buffers: dict[Buffer, Any]) -> None:
        """It was dispatched."""
        place = self._plan.mesh, index
        found = telling(self._plan.instructions[index], self._waited.get(place, ()), buffers)
        if found:
            self._waiter.put(place, found)

    def end(self) -> Times:
        """All times, when all results are there."""
        self._waiter.end()
        return self.times


class Alone:
    """Notes how long each instruction takes while no actor does anything else."""

    def __init__(self, plan: ActorPlan, order: Turns, exchange: Exchange, step: int) -> None:
        self._plan, self._order = plan, order
        self._exchange, self._step = exchange, step
        self._start = 0.0
        self.seconds: dict[Place, float] = {}

    def before(self, index: int) -> None:
        """Wait for the actor's turn."""
        if index in self._order.awaited:
            actor, number = self._order.awaited[index]
            self._exchange.turn(actor, self._step, TURN | number)
        self._start = time.perf_counter()

    def after(self, index: int, buffers: dict[Buffer, Any]) -> None:
        """Wait for the instruction, and say that it is done."""
        instruction = self._plan.instructions[index]
        if isinstance(instruction, Send):
            self._exchange.wait(self._exchange.tickets[instruction.tag])
        else:
            jax.block_until_ready([buffers[b] for b in instruction.writes if b in buffers])
        passed = time.perf_counter() - self._start
        self.seconds[self._plan.mesh, index] = 0.0 if isinstance(instruction, Free) else passed
        if index in self._order.told:
            actors, number = self._order.told[index]
            for actor in actors:
                self._exchange.give_turn(actor, self._step, TURN | number)

    def end(self) -> dict[Place, float]:
        """The seconds of every instruction."""
        return self.seconds
