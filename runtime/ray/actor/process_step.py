"""A process's share of a step: compiled pieces, a list of instructions, a store.

The list is dispatched in its order. JAX runs what is dispatched asynchronously, threads of the
transport send what is computed, and the dispatching thread waits at a `Recv` until its message is
there. At the end of a step it waits for everything that the step computed, so that an error
belongs to the step that made it.

The processes of one mesh have joined each other before (`group.py`): all run the same list, and
what they compute together are arrays of which each holds its devices' shards.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from autopar.base.errors import DeviceError
from autopar.passes.graph.logical import no_mesh
from autopar.passes.pipeline.instructions import (
    Accumulate,
    Buffer,
    Instruction,
    Recv,
    Reshard,
    Run,
    Send,
    buffer_names,
)
from autopar.passes.pipeline.lasting import lasting_writes
from autopar.runtime import stage_programs as stages
from autopar.runtime.compiled_pieces import CompileOnce
from autopar.runtime.event_times import Place, Times
from autopar.runtime.ray.actor.actor_arrays import KEYS, ActorArrays
from autopar.runtime.ray.actor.actor_plan import FIRST_OWN_TAG, ActorPlan
from autopar.runtime.ray.actor.compiling import in_turn
from autopar.runtime.ray.actor.exchange import Exchange
from autopar.runtime.ray.actor.messages import Failure, Message, Spot, failure_of, spelled_out
from autopar.runtime.ray.actor.timing import Alone, Together, Turns
from autopar.runtime.ray.transport.group import is_of_group
from autopar.runtime.ray.transport.host_tiles import copied, resharded
from autopar.runtime.ray.transport.offers import Transfers
from autopar.runtime.ray.transport.sockets import Sockets, TransportError
from autopar.runtime.stage_programs import Action, Pace, StagePrograms, donated_numbers


class ProcessStep:
    """The compiled share of one process; a wait may take as many seconds as the deadline.

    The constants are, for each that its mesh holds, its value's number, and the numbers that the
    process's devices hold.
    """

    def __init__(
        self,
        plan: ActorPlan,
        constants: Sequence[tuple[int, Sequence[np.ndarray]]],
        transport: Sockets,
        deadline: float,
        transfers: Transfers | None = None,
    ) -> None:
        self.plan = plan
        devices = _devices(plan)
        programs = plan.pieces.programs
        meshes = {stage: stages.mesh_of(programs[stage], devices) for stage in plan.stages}
        self.programs = StagePrograms(plan.pieces, plan.program, meshes)
        if len(plan.siblings) == 1:  # others compile together
            self.programs.named_by_kind = True
            self.programs.compile_ahead = CompileOnce(in_turn)
        with no_mesh():
            self.variants = self.programs.variants()
        self.names = buffer_names(plan.program.values)
        self.arrays = ActorArrays(plan, self.programs)
        self._store = self.arrays.store
        numbers = {device: number for number, device in enumerate(devices)}
        self._exchange = Exchange(plan, self.programs, numbers, transport, deadline, transfers)
        self.actions = tuple(self._actions())
        self.index: int | None = None
        self.doing = "idle"
        self.since = time.monotonic()
        self.times: Times | dict[Place, float] | None = None
        self.constants = {
            Buffer(number, None): self.arrays.placed(number, value) for number, value in constants
        }

    def run(self, message: Message) -> Failure | None:
        """One step; what went wrong, if anything did."""
        message = spelled_out(message, self.plan)
        failure = self._outcome(message)
        if failure is not None:
            self.skip(message)
        return failure

    def skip(self, message: Message) -> None:
        """What is left of a step that fails, or is not run: what it takes over is gone."""
        message = spelled_out(message, self.plan)
        self._store.drop((*message.forgotten, *message.consumed))

    def _outcome(self, message: Message) -> Failure | None:
        try:
            self._run(message)
        except TransportError as error:
            kind: Any = "error" if error.reason == "failed" else error.reason
            x = None if self.index is None else self.plan.instructions[self.index]
            tag = x.tag if isinstance(x, (Send, Recv)) else None
            return Failure(kind, self.spot(), message.step, error.detail, "", error.peer, tag)
        except BaseException as error:
            if len(self.plan.siblings) > 1 and is_of_group(error):
                return Failure("group", self.spot(), message.step, str(error))
            return failure_of(error, self.spot(), message.step)
        finally:
            self._exchange.clear()
            self._at("idle")
        return None

    def _run(self, message: Message) -> None:
        step = message.step
        self._at("the start of the step")
        self._store.drop(message.forgotten)
        buffers = self._inputs(message)
        recorder: Together | Alone | None = None
        if isinstance(message.record, Turns):
            recorder = Alone(self.plan, message.record, self._exchange, step)
        elif message.record is not None:
            recorder = Together(self.plan)
        try:
            for index, action in enumerate(self.actions):
                if recorder is not None:
                    self._at("a profile, waiting for its turn")
                    recorder.before(index)
                self.index, self.since = index, time.monotonic()
                action(buffers, step)
                if recorder is not None:
                    recorder.after(index, buffers)
        finally:
            if recorder is not None:
                self.times = recorder.end()
        self._at("the end of the step")
        self._exchange.wait_for_all()
        outputs = {value: buffers[Buffer(value, None)] for value in self.plan.outputs}
        consumed = set(message.consumed)
        lasting = {
            slot.value
            for slot, key in zip(self.plan.slots, message.given, strict=True)
            if isinstance(key, int) and key not in consumed
        }
        for value in lasting & outputs.keys():  # inputs that are returned as they are, and live on
            outputs[value] = copied(outputs[value])
        jax.block_until_ready(list(outputs.values()))
        for value, array in outputs.items():
            self._store.put(step * KEYS + value, array)
        self._store.complete(step)

    def _inputs(self, message: Message) -> dict[Buffer, Any]:
        """The values with which the step begins."""
        plan, buffers = self.plan, dict(self.constants)
        consumed, taken_over = set(message.consumed), set(plan.program.donated)
        resident: set[tuple[int, int]] = set()
        arriving: set[tuple[int, int, int]] = set()
        for slot, found in zip(plan.slots, message.given, strict=True):
            buffer = Buffer(slot.value, None)
            if found is None:
                arriving.add((slot.leaf, slot.part, slot.value))
            elif isinstance(found, int):
                array = self._store[found]
                if slot.value in taken_over and found not in consumed:
                    array = copied(array)
                buffers[buffer] = array
                resident.add((slot.leaf, slot.part))
            else:
                buffers[buffer] = self.arrays.placed(slot.value, found)
        self._store.drop(message.consumed)
        tag = FIRST_OWN_TAG + plan.mesh
        for to, items in plan.hand_on.items():
            sent = [x for x in items if (x.leaf, x.part) in resident]
            if sent:
                arrays = [buffers[Buffer(x.value, None)] for x in sent]
                ways = [x.way for x in sent]
                self._exchange.handed_on += self._exchange.send(to, message.step, tag, arrays, ways)
        for leaf, number, home, value in plan.copies:
            if (leaf, number, value) in arriving:
                sharding = self.programs.places[value].sharding
                array = resharded(buffers[Buffer(home, None)], sharding)
                buffers[Buffer(value, None)] = copied(array)
        for source, items in plan.handed.items():
            wanted = [x for x in items if (x.leaf, x.part, x.value) in arriving]
            if wanted:
                actors = plan.processes[source]
                who = f"actor{'' if len(actors) == 1 else 's'} {', '.join(map(str, actors))}"
                self._at(f"the start of the step, waiting for leaves of {who}")
                pairs = [(Buffer(x.value, None), x.way) for x in wanted]
                self._exchange.receive(source, FIRST_OWN_TAG + source, pairs, buffers, message.step)
        return buffers

    def _actions(self) -> Iterator[Action]:
        plan, programs, exchange = self.plan, self.programs, self._exchange
        pace, lasting = Pace(), lasting_writes(plan.program)
        awaited = _awaited(plan.instructions)
        for index, x in enumerate(plan.instructions):
            if isinstance(x, Run):
                compiled = self.variants[x.piece, donated_numbers(x)]
                waited = programs.waited(x, lasting.get((plan.mesh, index), ()))
                run = stages.run_action(compiled, x, pace, waited)
                yield self._run_action(run, x, awaited.get(index, ()))
            elif isinstance(x, Send):
                yield functools.partial(exchange.send_buffers, x, plan.ways[x.tag])
            elif isinstance(x, Recv):
                items = list(zip(x.buffers, plan.ways[x.tag], strict=True))
                yield functools.partial(exchange.receive, x.source, x.tag, items)
            elif isinstance(x, Reshard):
                yield stages.reshard_action(x, programs.places[x.target.value].sharding, resharded)
            elif isinstance(x, Accumulate):
                yield stages.accumulate_action(x)
            else:
                yield stages.free_action(x)

    def _run_action(self, run: Action, x: Run, tags: Sequence[int]) -> Action:
        # Where a mesh of CPUs has several processes, dozens of queued programs wait for each other
        # without end (jaxlib 0.10.2); so each is awaited.
        is_awaited = len(self.plan.siblings) > 1 and jax.default_backend() == "cpu"
        exchange = self._exchange

        def action(buffers: dict[Buffer, Any], step: int) -> None:
            for tag in tags:
                exchange.wait(exchange.tickets[tag])
            if x.donates and exchange.handed_on:
                exchange.wait(exchange.handed_on)
                exchange.handed_on.clear()
            run(buffers, step)
            if is_awaited:
                jax.block_until_ready([buffers[buffer] for buffer in x.writes])

        return action

    def _at(self, doing: str) -> None:
        self.index, self.doing, self.since = None, doing, time.monotonic()

    def spot(self) -> Spot:
        """What is being done."""
        plan, index = self.plan, self.index
        if index is None:
            return Spot(plan.actor, plan.label, None, self.doing)
        x = plan.instructions[index]
        if isinstance(x, Run):
            return Spot(plan.actor, f"stage {x.stage}", index, x.label, x.microbatch)
        buffers = (*x.reads, *x.writes)
        value_of = plan.program.value_of
        stage = value_of[buffers[0].value].stage if buffers else plan.stages[0]
        text = f"{x.label}: {', '.join(map(self.names, buffers))}"
        found = {buffer.microbatch for buffer in buffers} - {None}
        microbatch = found.pop() if len(found) == 1 else None
        return Spot(plan.actor, f"stage {stage}", index, text, microbatch)


def _devices(plan: ActorPlan) -> list[jax.Device]:
    """Those of the mesh, in all its processes."""
    platform = str(jax.config.jax_platforms)  # type: ignore[attr-defined]
    try:
        found = jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(
            f"JAX finds no devices of the platform {platform!r} there.",
            why=str(error) or None,
            hint="install JAX for GPUs (jax[cuda12]) on all nodes." if platform == "cuda" else None,
        ) from error
    if len(found) < plan.num_devices:
        raise DeviceError(
            f"{plan.label} needs {plan.num_devices} devices, and its processes have {len(found)}."
        )
    return found[: plan.num_devices]


def _awaited(instructions: Sequence[Instruction]) -> dict[int, tuple[int, ...]]:
    """Which `Send`s a `Run` must wait for: those that read what it donates.

    After an `Accumulate` or a `Reshard` one array may have two names.
    """
    alias: dict[Buffer, Buffer] = {}

    def root(buffer: Buffer) -> Buffer:
        while buffer in alias:
            buffer = alias[buffer]
        return buffer

    sends: dict[Buffer, list[int]] = {}
    found = {}
    for index, x in enumerate(instructions):
        if isinstance(x, Send):
            for buffer in x.buffers:
                sends.setdefault(root(buffer), []).append(x.tag)
        elif isinstance(x, (Accumulate, Reshard)):
            source = x.addend if isinstance(x, Accumulate) else x.source
            if root(source) != root(x.target):
                sends.setdefault(root(source), []).extend(sends.pop(root(x.target), []))
                alias[root(x.target)] = root(source)
        elif isinstance(x, Run):
            tags = [tag for buffer in x.donates for tag in sends.get(root(buffer), ())]
            if tags:
                found[index] = tuple(dict.fromkeys(tags))
    return found
