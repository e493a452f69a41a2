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
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

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
from autopar.runtime.event_times import Place, Times
from autopar.runtime.ray.actor.actor_plan import FIRST_OWN_TAG, PASSED_ON, ActorPlan
from autopar.runtime.ray.actor.failures import Failure, Spot
from autopar.runtime.ray.actor.messages import Message, spelled_out
from autopar.runtime.ray.actor.store import KEYS, Missing, Store
from autopar.runtime.ray.actor.timing import Alone, Together, Turns
from autopar.runtime.ray.transport.group import is_of_group
from autopar.runtime.ray.transport.host_tiles import (
    as_bytes,
    assembled,
    copied,
    is_key,
    numbers,
    placed,
    resharded,
    taken,
    to_host,
    unpacked,
)
from autopar.runtime.ray.transport.routes import Arrival, Box, Departure, Move
from autopar.runtime.ray.transport.sockets import Sockets, Ticket, TransportError
from autopar.runtime.stage_programs import Pace, StagePrograms, donated_numbers

Action = Callable[[dict[Buffer, Any], int], None]
"""An instruction, as a function of buffers and the step's number."""


class ProcessStep:
    """The compiled share of one process.

    Args:
      part: what it runs.
      constants: for every constant that its mesh holds, its value's number, and the numbers that
        the process's devices hold.
      transport: to the other processes.
      deadline: seconds that one wait may take.
    """

    def __init__(
        self,
        part: ActorPlan,
        constants: Sequence[tuple[int, Sequence[np.ndarray]]],
        transport: Sockets,
        deadline: float,
    ) -> None:
        self.part, self.transport, self.deadline = part, transport, deadline
        self.store = Store()
        devices = _devices(part)
        meshes = {stage: _mesh(part, stage, devices) for stage in part.stages}
        self.numbers = {device: number for number, device in enumerate(devices)}
        self.programs = StagePrograms(part.pieces, part.program, meshes)
        with no_mesh():
            self.variants = self.programs.variants()
        self.names = buffer_names(part.program.values)
        self.tickets: dict[int, list[Ticket]] = {}
        self.handed_on: list[Ticket] = []
        self.passed_on: list[Ticket] = []
        self.actions = tuple(self._actions())
        self.index: int | None = None
        self.doing = "idle"
        self.since = time.monotonic()
        self.times: Times | dict[Place, float] | None = None
        self.constants = {
            Buffer(number, None): self._place_host(number, value) for number, value in constants
        }

    # -- a step ----------------------------------------------------------------------------------

    def run(self, message: Message) -> Failure | None:
        """One step; what went wrong, if anything did."""
        message = spelled_out(message, self.part)
        failure = self._outcome(message)
        if failure is not None:
            self.skip(message)
        return failure

    def skip(self, message: Message) -> None:
        """What is left of a step that fails, or is not run: what it takes over is gone."""
        message = spelled_out(message, self.part)
        self.store.drop((*message.forgotten, *message.consumed))

    def _outcome(self, message: Message) -> Failure | None:
        try:
            self._run(message)
        except TransportError as error:
            kinds = {"late": "late", "lost": "lost", "aborted": "aborted", "failed": "error"}
            kind: Any = kinds[error.reason]
            spot, tag = self.spot(), self._tag()
            return Failure(kind, spot, message.step, error.detail, "", error.peer, tag)
        except BaseException as error:
            if len(self.part.siblings) > 1 and is_of_group(error):
                return Failure("group", self.spot(), message.step, str(error))
            text = "".join(traceback.format_exception(error))
            return Failure("error", self.spot(), message.step, _described(error), text)
        finally:
            self.tickets.clear()
            self.handed_on.clear()
            self.passed_on.clear()
            self._at(None, "idle")
        return None

    def _run(self, message: Message) -> None:
        step = message.step
        self._at(None, "the start of the step")
        self.store.drop(message.forgotten)
        buffers = self._inputs(message)
        if message.record is None:
            for index, action in enumerate(self.actions):
                self.index, self.since = index, time.monotonic()
                action(buffers, step)
        else:
            self._run_recorded(message, buffers)
        self._at(None, "the end of the step")
        for tickets in (*self.tickets.values(), self.handed_on, self.passed_on):
            self._wait(tickets)
        outputs = {value: buffers[Buffer(value, None)] for value in self.part.outputs}
        consumed = set(message.consumed)
        lasting = {
            slot.value
            for slot, key in zip(self.part.slots, message.given, strict=True)
            if isinstance(key, int) and key not in consumed
        }
        for value in lasting & outputs.keys():  # inputs that are returned as they are, and live on
            outputs[value] = copied(outputs[value])
        jax.block_until_ready(list(outputs.values()))
        for value, array in outputs.items():
            self.store.put(step * KEYS + value, array)
        self.store.complete(step)

    def _run_recorded(self, message: Message, buffers: dict[Buffer, Any]) -> None:
        recorder = self._recorder(message)
        try:
            for index, action in enumerate(self.actions):
                self._at(None, "a profile, waiting for its turn")
                recorder.before(index)
                self.index, self.since = index, time.monotonic()
                action(buffers, message.step)
                recorder.after(index, buffers)
        finally:
            self.times = recorder.end()

    def _recorder(self, message: Message) -> Together | Alone:
        """What notes the times of a step."""
        if message.record == "together":
            return Together(self.part)
        assert isinstance(message.record, Turns)
        return Alone(
            self.part,
            message.record,
            self.transport,
            message.step,
            self.deadline,
            lambda tag: self.tickets[tag],
        )

    def _wait(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self.transport.wait(ticket, self.deadline)

    def _inputs(self, message: Message) -> dict[Buffer, Any]:
        """The values with which the step begins."""
        part, buffers = self.part, dict(self.constants)
        consumed, taken_over = set(message.consumed), set(part.program.donated)
        resident: set[tuple[int, int]] = set()
        arriving: set[tuple[int, int, int]] = set()
        for slot, found in zip(part.slots, message.given, strict=True):
            buffer = Buffer(slot.value, None)
            if found is None:
                arriving.add((slot.leaf, slot.part, slot.value))
            elif isinstance(found, int):
                array = self.store[found]
                if slot.value in taken_over and found not in consumed:
                    array = copied(array)
                buffers[buffer] = array
                resident.add((slot.leaf, slot.part))
            else:
                buffers[buffer] = self._place_host(slot.value, found)
        self.store.drop(message.consumed)
        tag = FIRST_OWN_TAG + part.mesh
        for to, items in part.hand_on.items():
            sent = [x for x in items if (x.leaf, x.part) in resident]
            if sent:
                arrays = [buffers[Buffer(x.value, None)] for x in sent]
                ways = [x.way for x in sent]
                self.handed_on += self._send(to, message.step, tag, arrays, ways)
        for leaf, number, home, value in part.copies:
            if (leaf, number, value) in arriving:
                sharding = self.programs.places[value].sharding
                array = resharded(buffers[Buffer(home, None)], sharding)
                buffers[Buffer(value, None)] = copied(array)
        for source, items in part.handed.items():
            wanted = [x for x in items if (x.leaf, x.part, x.value) in arriving]
            if wanted:
                self._at(
                    None, f"the start of the step, waiting for leaves of {_actors(part, source)}"
                )
                pairs = [(Buffer(x.value, None), x.way) for x in wanted]
                self._receive(buffers, source, message.step, FIRST_OWN_TAG + source, pairs)
        return buffers

    # -- instructions ----------------------------------------------------------------------------

    def _actions(self) -> Iterator[Action]:
        part, programs = self.part, self.programs
        pace, lasting = Pace(), lasting_writes(part.program)
        for index, x in enumerate(part.instructions):
            if isinstance(x, Run):
                compiled = self.variants[x.piece, donated_numbers(x)]
                waited = programs.waited(x, lasting.get((part.mesh, index), ()))
                run = stages.run_action(compiled, x, pace, waited)
                yield self._run_action(run, x, part.awaited.get(index, ()))
            elif isinstance(x, Send):
                yield self._send_action(x)
            elif isinstance(x, Recv):
                yield self._recv_action(x)
            elif isinstance(x, Reshard):
                yield _local(self._reshard_action(x))
            elif isinstance(x, Accumulate):
                yield _local(stages.accumulate_action(x))
            else:
                yield _local(stages.free_action(x))

    def _run_action(self, run: stages.Action, x: Run, tags: Sequence[int]) -> Action:
        # Where a mesh of CPUs has several processes, dozens of queued programs wait for each other
        # without end (jaxlib 0.10.2); so each is awaited.
        is_awaited = len(self.part.siblings) > 1 and jax.default_backend() == "cpu"

        def action(buffers: dict[Buffer, Any], step: int) -> None:
            for tag in tags:
                self._wait(self.tickets[tag])
            if x.donates and self.handed_on:
                self._wait(self.handed_on)
                self.handed_on.clear()
            run(buffers)
            if is_awaited:
                jax.block_until_ready([buffers[buffer] for buffer in x.writes])

        return action

    def _reshard_action(self, x: Reshard) -> stages.Action:
        sharding = self.programs.places[x.target.value].sharding

        def action(buffers: dict[Buffer, Any]) -> None:
            buffers[x.target] = resharded(buffers[x.source], sharding)

        return action

    def _send_action(self, x: Send) -> Action:
        ways = self.part.ways[x.tag]

        def action(buffers: dict[Buffer, Any], step: int) -> None:
            arrays = [buffers[b] for b in x.buffers]
            self.tickets[x.tag] = self._send(x.to, step, x.tag, arrays, ways)

        return action

    def _recv_action(self, x: Recv) -> Action:
        items = list(zip(x.buffers, self.part.ways[x.tag], strict=True))

        def action(buffers: dict[Buffer, Any], step: int) -> None:
            self._receive(buffers, x.source, step, x.tag, items)

        return action

    # -- arrays ----------------------------------------------------------------------------------

    def _send(
        self,
        mesh: int,
        step: int,
        tag: int,
        arrays: Sequence[Any],
        ways: Sequence[Departure | Arrival],
    ) -> list[Ticket]:
        """Send to each process of another mesh what it gets from this one."""
        tickets = []
        itemsizes = [numbers(array).dtype.itemsize for array in arrays]
        for process, actor in enumerate(self.part.processes[mesh]):
            moves = [way.moves[process] for way in ways]
            size = _num_bytes(moves, itemsizes)

            def data(moves: Sequence[Sequence[Move]] = moves) -> Iterator[np.ndarray]:
                for array, own in zip(arrays, moves, strict=True):
                    yield from taken(array, own, self.numbers)

            if size:
                tickets.append(self.transport.send(actor, step, tag, size, data))
        return tickets

    def _receive(
        self,
        buffers: dict[Buffer, Any],
        mesh: int,
        step: int,
        tag: int,
        items: Sequence[tuple[Buffer, Departure | Arrival]],
    ) -> None:
        """Receive from each process of another mesh; exchange with those of this one."""
        part = self.part
        ways = [way for _, way in items if isinstance(way, Arrival)]
        dtypes = [part.dtype_of(buffer.value) for buffer, _ in items]
        found: list[list[tuple[Move, np.ndarray]]] = [[] for _ in items]

        def receive(actor: int, tag: int, moves: Sequence[Sequence[Move]]) -> None:
            size = _num_bytes(moves, [dtype.itemsize for dtype in dtypes])
            data = self.transport.receive(actor, step, tag, self.deadline) if size else _NOTHING
            start = 0
            for got, own, dtype in zip(found, moves, dtypes, strict=True):
                count = _num_bytes([own], [dtype.itemsize])
                got += unpacked(data[start : start + count], own, dtype)
                start += count

        for process, actor in enumerate(part.processes[mesh]):
            receive(actor, tag, [way.moves[process] for way in ways])
        others = [pair for pair in enumerate(part.siblings) if pair[0] != part.process]
        for process, actor in others:
            bytes_ = [
                as_bytes(value) for got in found for move, value in got if process in move.processes
            ]
            size = sum(each.size for each in bytes_)
            if size:
                data = functools.partial(iter, bytes_)
                ticket = self.transport.send(actor, step, tag | PASSED_ON, size, data)
                self.passed_on.append(ticket)
        for process, actor in others:
            receive(actor, tag | PASSED_ON, [way.passed_on[process] for way in ways])
        for (buffer, _), got, way in zip(items, found, ways, strict=True):
            aval, place = (
                part.pieces.versions[buffer.value].atom.aval,
                self.programs.places[buffer.value],
            )
            shape = tuple(aval.shape) if place.partial == 1 else (place.partial, *aval.shape)
            buffers[buffer] = placed(got, way.tiles, shape, aval.dtype, place.sharding)

    def _place_host(self, value: int, tiles: Sequence[np.ndarray]) -> jax.Array:
        aval, held = self.part.pieces.versions[value].atom.aval, self.part.held(value)
        sharding = self.programs.places[value].sharding
        pairs = zip(tiles, held.values(), strict=True)
        return assembled(pairs, tuple(aval.shape), aval.dtype, sharding)

    # -- between steps ---------------------------------------------------------------------------

    def keep(self, key: int, value: int, tiles: Sequence[np.ndarray]) -> None:
        """Put an array from the driver into the store, where `value` lives."""
        self.store.complete(key // KEYS - 1)
        self.store.put(key, self._place_host(value, tiles))

    def duplicate(self, key: int, copy: int) -> None:
        """Put a copy of an array into the store, unless the array is lost."""
        try:
            array = self.store[key]
        except Missing:
            self.store.lose(copy, copy + 1)
            return
        self.store.put(copy, copied(array))

    def copies(self, wanted: Sequence[tuple[int, Box | None]]) -> list[np.ndarray]:
        """The numbers of arrays, or boxes, in memory that no later step overwrites.

        Raises:
          Missing: one is lost.
        """
        return [np.array(to_host(self.store[key], box)) for key, box in wanted]

    def make(
        self,
        function: Callable[..., Sequence[Any]],
        arguments: Sequence[Any],
        wanted: Sequence[tuple[int, int, int, tuple[slice, ...] | None]],
    ) -> None:
        """Run a function whose results, or rows of them, stay here.

        Args:
          function: of arrays; it is compiled for the mesh of each stage.
          arguments: its arguments.
          wanted: (key, value, number of the result, rows) of what stays.
        """
        implementations = [
            jax.random.key_impl(x) if is_key(getattr(x, "dtype", None)) else None for x in arguments
        ]
        # NumPy's arrays are taken for the same in every process.
        plain_arguments = [np.asarray(numbers(jax.numpy.asarray(x))) for x in arguments]
        by_stage: dict[int, list[tuple[int, int, int, tuple[slice, ...] | None]]] = {}
        for item in wanted:
            by_stage.setdefault(self.part.program.value_of[item[1]].stage, []).append(item)
        for items in by_stage.values():

            def part(*plain: Any, _items: Any = tuple(items)) -> list[Any]:
                args = [
                    x if kind is None else jax.random.wrap_key_data(x, impl=kind)
                    for x, kind in zip(plain, implementations, strict=True)
                ]
                made = function(*args)
                return [made[n] if rows is None else made[n][rows] for _, _, n, rows in _items]

            shardings = [self.programs.places[value].sharding for _, value, _, _ in items]
            with no_mesh():
                results = jax.jit(part, out_shardings=shardings)(*plain_arguments)
            jax.block_until_ready(results)
            for (key, *_), result in zip(items, results, strict=True):
                self.store.put(key, result)

    def fetch(self, key: int, boxes: Sequence[Box | None]) -> list[np.ndarray]:
        """The numbers of an array of the store; waits until it is there and computed."""
        array = self.store.wait(key)
        return [to_host(array, box) for box in boxes]

    def ready(self, key: int) -> None:
        """Wait until an array of the store is there and computed."""
        self.store.wait(key).block_until_ready()

    # -- where it is -----------------------------------------------------------------------------

    def _at(self, index: int | None, doing: str) -> None:
        self.index, self.doing, self.since = index, doing, time.monotonic()

    def spot(self) -> Spot:
        """What is being done."""
        part, index = self.part, self.index
        if index is None:
            return Spot(part.actor, part.label, None, self.doing)
        x = part.instructions[index]
        stage = _stage(x, part)
        text = x.label
        if not isinstance(x, Run):
            text += ": " + ", ".join(map(self.names, (*x.reads, *x.writes)))
        return Spot(part.actor, f"stage {stage}", index, text, _microbatch(x))

    def _tag(self) -> int | None:
        x = None if self.index is None else self.part.instructions[self.index]
        return x.tag if isinstance(x, (Send, Recv)) else None


_NOTHING = np.zeros(0, np.uint8)


def _num_bytes(moves: Sequence[Sequence[Move]], itemsizes: Sequence[int]) -> int:
    return sum(
        math.prod(move.shape) * itemsize
        for own, itemsize in zip(moves, itemsizes, strict=True)
        for move in own
    )


def _actors(part: ActorPlan, mesh: int) -> str:
    found = part.processes[mesh]
    return f"actor{'' if len(found) == 1 else 's'} {', '.join(map(str, found))}"


def _local(action: stages.Action) -> Action:
    return lambda buffers, step: action(buffers)


def _stage(x: Instruction, part: ActorPlan) -> int:
    if isinstance(x, Run):
        return x.stage
    buffers = (*x.reads, *x.writes)
    return part.program.value_of[buffers[0].value].stage if buffers else part.stages[0]


def _microbatch(x: Instruction) -> int | None:
    if isinstance(x, Run):
        return x.microbatch
    found = {buffer.microbatch for buffer in (*x.reads, *x.writes)} - {None}
    return found.pop() if len(found) == 1 else None


def _described(error: BaseException) -> str:
    if type(error).__name__ == "InternalFloatingPointError":  # not meant for users' eyes
        kind = error.args[-1]
        return f"FloatingPointError: {kind} in its results, and jax_debug_{kind}s is set."
    if isinstance(error, Missing):
        return "an array that it needs is no longer there."
    return f"{type(error).__name__}: {error}"


def _devices(part: ActorPlan) -> list[jax.Device]:
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
    if len(found) < part.num_devices:
        raise DeviceError(
            f"{part.label} needs {part.num_devices} devices, and its processes have {len(found)}."
        )
    return found[: part.num_devices]


def _mesh(part: ActorPlan, stage: int, devices: Sequence[jax.Device]) -> Mesh:
    program = part.pieces.programs[stage]
    own = devices[: int(np.prod(program.mesh))]
    return Mesh(
        np.asarray(own).reshape(program.mesh),
        program.axis_names,
        axis_types=(AxisType.Auto,) * len(program.mesh),
    )
