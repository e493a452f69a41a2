"""One mesh's share of a step, in one process: compiled pieces, a list of instructions, a store.

The list is dispatched in its order. JAX runs what is dispatched asynchronously, threads of the
transport send what is computed, and the dispatching thread waits at a `Recv` until its message is
there. At the end of a step it waits for everything that the step computed, so that an error
belongs to the step that made it.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from autopar.passes.logical import no_mesh
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
from autopar.runtime import stages
from autopar.runtime.ray.failures import Failure, Spot
from autopar.runtime.ray.parts import FIRST_OWN_TAG, MeshPart, held_shape
from autopar.runtime.ray.routes import Route
from autopar.runtime.ray.tiles import from_host, placed, plain, taken, to_host
from autopar.runtime.ray.transport import Sockets, Ticket, TransportError
from autopar.runtime.stages import Pace, StagePrograms, donated_numbers

Action = Callable[[dict[Buffer, Any], int], None]
"""An instruction, as a function of buffers and the step's number."""


@dataclass(frozen=True)
class Message:
    """What an actor is told of one step.

    Args:
      step: its number.
      given: for every slot: the key of an array in the store, an array of the leaf's (or its
        rows') numbers, or None: its home hands it on.
      consumed: keys that the store gives up when the step begins.
      forgotten: keys that nobody holds any more.
      outputs: (value, key) of what goes to the store.
    """

    step: int
    given: tuple[Any, ...]
    consumed: tuple[int, ...]
    forgotten: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]


class Missing(Exception):
    """A key that the store does not have."""


class Store:
    """Arrays that outlive a step, by key; readers may come before the array does."""

    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._lost: list[tuple[int, int]] = []

    def __getitem__(self, key: int) -> Any:
        with self._changed:
            if key not in self._arrays:
                raise Missing(f"key {key}")
            return self._arrays[key]

    def wait(self, key: int) -> Any:
        """The array, when it is there: the driver watches that its step goes on.

        Raises:
          Missing: it was lost.
        """
        with self._changed:
            while key not in self._arrays:
                if any(first <= key < last for first, last in self._lost):
                    raise Missing(f"key {key}")
                self._changed.wait()
            return self._arrays[key]

    def put(self, key: int, array: Any) -> None:
        with self._changed:
            self._arrays[key] = array
            self._changed.notify_all()

    def drop(self, keys: Sequence[int]) -> None:
        with self._changed:
            for key in keys:
                self._arrays.pop(key, None)

    def lose(self, first: int, last: int) -> None:
        """Say that keys from `first` to `last` (left out) will not come, and drop those there."""
        with self._changed:
            for key in [key for key in self._arrays if first <= key < last]:
                del self._arrays[key]
            self._lost.append((first, last))
            self._changed.notify_all()


class MeshStep:
    """The compiled share of one mesh.

    Args:
      part: what the mesh runs.
      constants: for every constant that this mesh holds, its value's number and its numbers.
      transport: to the other meshes.
      deadline: seconds that one wait may take.
    """

    def __init__(
        self,
        part: MeshPart,
        constants: Sequence[tuple[int, np.ndarray]],
        transport: Sockets,
        deadline: float,
    ) -> None:
        self.part, self.transport, self.deadline = part, transport, deadline
        self.store = Store()
        devices = jax.local_devices()[: part.num_devices]
        meshes = {stage: _mesh(part, stage, devices) for stage in part.stages}
        self.numbers = {device: number for number, device in enumerate(devices)}
        self.programs = StagePrograms(part.pieces, part.program, meshes)
        with no_mesh():
            self.variants = self.programs.variants()
        self.names = buffer_names(part.program.values)
        self.tickets: dict[int, Ticket] = {}
        self.handed_on: list[Ticket] = []
        self.actions = tuple(self._actions())
        self.index: int | None = None
        self.doing = "idle"
        self.since = time.monotonic()
        self.constants = {
            Buffer(number, None): self._place_host(number, value) for number, value in constants
        }

    # -- a step ----------------------------------------------------------------------------------

    def run(self, message: Message) -> Failure | None:
        """One step; what went wrong, if anything did."""
        try:
            self._run(message)
        except TransportError as error:
            kinds = {"late": "late", "lost": "lost", "aborted": "aborted", "failed": "error"}
            kind: Any = kinds[error.reason]
            spot, tag = self.spot(), self._tag()
            return Failure(kind, spot, message.step, error.detail, "", error.peer, tag)
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            return Failure("error", self.spot(), message.step, _described(error), text)
        finally:
            self.tickets.clear()
            self.handed_on.clear()
            self._at(None, "idle")
        return None

    def _run(self, message: Message) -> None:
        step = message.step
        self._at(None, "the start of the step")
        self.store.drop(message.forgotten)
        buffers = self._inputs(message)
        for index, action in enumerate(self.actions):
            self.index, self.since = index, time.monotonic()
            action(buffers, step)
        self._at(None, "the end of the step")
        for ticket in (*self.tickets.values(), *self.handed_on):
            self.transport.wait(ticket, self.deadline)
        outputs = {value: buffers[Buffer(value, None)] for value, _ in message.outputs}
        consumed = set(message.consumed)
        lasting = {
            slot.value
            for slot, given in zip(self.part.slots, message.given, strict=True)
            if isinstance(given, int) and given not in consumed
        }
        jax.block_until_ready(list(outputs.values()))
        for value, key in message.outputs:
            array = outputs[value]
            if value in lasting:  # an input that is returned as it is, and lives on
                array = jax.device_put(array, array.sharding, may_alias=False)
            self.store.put(key, array)

    def _inputs(self, message: Message) -> dict[Buffer, Any]:
        """The values with which the step begins."""
        part, buffers = self.part, dict(self.constants)
        consumed, taken_over = set(message.consumed), set(part.program.donated)
        resident: set[tuple[int, int]] = set()
        arriving: set[tuple[int, int, int]] = set()
        for slot, given in zip(part.slots, message.given, strict=True):
            buffer = Buffer(slot.value, None)
            if given is None:
                arriving.add((slot.leaf, slot.part, slot.value))
            elif isinstance(given, int):
                array = self.store[given]
                if slot.value in taken_over and given not in consumed:
                    array = jax.device_put(array, array.sharding, may_alias=False)
                buffers[buffer] = array
                resident.add((slot.leaf, slot.part))
            else:
                buffers[buffer] = self._place_host(slot.value, given)
        self.store.drop(message.consumed)
        tag = FIRST_OWN_TAG
        for to, items in part.hand_on.items():
            sent = [x for x in items if (x.leaf, x.part) in resident]
            if sent:
                arrays = [buffers[Buffer(x.value, None)] for x in sent]
                routes = [x.route for x in sent]
                values = [x.value for x in sent]
                self.handed_on.append(self._send(to, message.step, tag, values, arrays, routes))
        for leaf, number, home, value in part.copies:
            if (leaf, number, value) in arriving:
                sharding = self.programs.places[value].sharding
                buffers[Buffer(value, None)] = jax.device_put(
                    buffers[Buffer(home, None)], sharding, may_alias=False
                )
        for source, items in part.handed.items():
            wanted = [x for x in items if (x.leaf, x.part, x.value) in arriving]
            if wanted:
                self._at(None, f"the start of the step, waiting for leaves of actor {source}")
                data = self.transport.receive(source, message.step, tag, self.deadline)
                self._unpack(buffers, data, [(Buffer(x.value, None), x.route) for x in wanted])
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
                yield self._run_action(run, bool(x.donates), part.awaited.get(index, ()))
            elif isinstance(x, Send):
                yield self._send_action(x)
            elif isinstance(x, Recv):
                yield self._recv_action(x)
            elif isinstance(x, Reshard):
                sharding = programs.places[x.target.value].sharding
                yield _local(stages.reshard_action(x, sharding))
            elif isinstance(x, Accumulate):
                yield _local(stages.accumulate_action(x))
            else:
                yield _local(stages.free_action(x))

    def _run_action(self, run: stages.Action, donates: bool, tags: Sequence[int]) -> Action:
        def action(buffers: dict[Buffer, Any], step: int) -> None:
            for tag in tags:
                self.transport.wait(self.tickets[tag], self.deadline)
            if donates and self.handed_on:
                for ticket in self.handed_on:
                    self.transport.wait(ticket, self.deadline)
                self.handed_on.clear()
            run(buffers)

        return action

    def _send_action(self, x: Send) -> Action:
        routes, values = self.part.routes[x.tag], [b.value for b in x.buffers]

        def action(buffers: dict[Buffer, Any], step: int) -> None:
            arrays = [buffers[b] for b in x.buffers]
            self.tickets[x.tag] = self._send(x.to, step, x.tag, values, arrays, routes)

        return action

    def _recv_action(self, x: Recv) -> Action:
        items = list(zip(x.buffers, self.part.routes[x.tag], strict=True))

        def action(buffers: dict[Buffer, Any], step: int) -> None:
            data = self.transport.receive(x.source, step, x.tag, self.deadline)
            self._unpack(buffers, data, items)

        return action

    # -- arrays ----------------------------------------------------------------------------------

    def _send(
        self,
        to: int,
        step: int,
        tag: int,
        values: Sequence[int],
        arrays: Sequence[Any],
        routes: Sequence[Route],
    ) -> Ticket:
        sizes = [self._bytes(value, route) for value, route in zip(values, routes, strict=True)]

        def data() -> Iterator[np.ndarray]:
            for array, route in zip(arrays, routes, strict=True):
                yield from taken(array, route, self.numbers)

        return self.transport.send(to, step, tag, sum(sizes), data)

    def _unpack(
        self,
        buffers: dict[Buffer, Any],
        data: np.ndarray,
        items: Sequence[tuple[Buffer, Route]],
    ) -> None:
        start = 0
        for buffer, route in items:
            size = self._bytes(buffer.value, route)
            version = self.part.pieces.versions[buffer.value]
            stage = self.part.program.value_of[buffer.value].stage
            shape = held_shape(version, self.part.pieces.programs[stage])
            sharding = self.programs.places[buffer.value].sharding
            dtype = version.atom.aval.dtype
            buffers[buffer] = placed(data[start : start + size], route, shape, dtype, sharding)
            start += size

    def _bytes(self, value: int, route: Route) -> int:
        aval = self.part.pieces.versions[value].atom.aval
        return route.size * plain((), aval.dtype)[1].itemsize

    def _place_host(self, value: int, numbers: np.ndarray) -> jax.Array:
        dtype = self.part.pieces.versions[value].atom.aval.dtype
        return from_host(numbers, dtype, self.programs.places[value].sharding)

    # -- between steps ---------------------------------------------------------------------------

    def keep(self, key: int, value: int, numbers: np.ndarray) -> None:
        """Put an array from the driver into the store, where `value` lives."""
        self.store.put(key, self._place_host(value, numbers))

    def duplicate(self, key: int, copy: int) -> None:
        """Put a copy of an array into the store, unless the array is lost."""
        try:
            array = self.store[key]
        except Missing:
            self.store.lose(copy, copy + 1)
            return
        self.store.put(copy, jax.device_put(array, array.sharding, may_alias=False))

    def copies(self, keys: Sequence[int]) -> list[np.ndarray]:
        """The numbers of arrays of the store, in memory that no later step overwrites.

        Raises:
          Missing: one is lost.
        """
        return [np.array(to_host(self.store[key])) for key in keys]

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
        by_stage: dict[int, list[tuple[int, int, int, tuple[slice, ...] | None]]] = {}
        for item in wanted:
            by_stage.setdefault(self.part.program.value_of[item[1]].stage, []).append(item)
        for items in by_stage.values():

            def part(*args: Any, _items: Any = tuple(items)) -> list[Any]:
                made = function(*args)
                return [made[n] if rows is None else made[n][rows] for _, _, n, rows in _items]

            shardings = [self.programs.places[value].sharding for _, value, _, _ in items]
            with no_mesh():
                results = jax.jit(part, out_shardings=shardings)(*arguments)
            jax.block_until_ready(results)
            for (key, *_), result in zip(items, results, strict=True):
                self.store.put(key, result)

    def fetch(self, key: int) -> np.ndarray:
        """The numbers of an array of the store; waits until it is there and computed."""
        return to_host(self.store.wait(key))

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
            return Spot(part.mesh, part.label, None, self.doing)
        x = part.instructions[index]
        stage = _stage(x, part)
        text = x.label
        if not isinstance(x, Run):
            text += ": " + ", ".join(map(self.names, (*x.reads, *x.writes)))
        return Spot(part.mesh, f"stage {stage}", index, text, _microbatch(x))

    def _tag(self) -> int | None:
        x = None if self.index is None else self.part.instructions[self.index]
        return x.tag if isinstance(x, (Send, Recv)) else None


def _local(action: stages.Action) -> Action:
    return lambda buffers, step: action(buffers)


def _stage(x: Instruction, part: MeshPart) -> int:
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


def _mesh(part: MeshPart, stage: int, devices: Sequence[jax.Device]) -> Mesh:
    program = part.pieces.programs[stage]
    own = devices[: int(np.prod(program.mesh))]
    return Mesh(
        np.asarray(own).reshape(program.mesh),
        program.axis_names,
        axis_types=(AxisType.Auto,) * len(program.mesh),
    )
