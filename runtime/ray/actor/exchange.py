"""What one process of a mesh sends to others in a step, and gets from them.

Threads of the transport send what is computed. The *tickets* of what is under way say when it may
be overwritten.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.passes.pipeline.instructions import Buffer, Send
from autopar.runtime.ray.actor.actor_plan import PASSED_ON, ActorPlan
from autopar.runtime.ray.transport.host_tiles import as_bytes, numbers, taken
from autopar.runtime.ray.transport.offers import OFFER_BYTES, Transfers, copy
from autopar.runtime.ray.transport.pinned import PinnedMemory, takes_bytes
from autopar.runtime.ray.transport.routes import Move, Way
from autopar.runtime.ray.transport.sockets import Sockets, Ticket, TransportError
from autopar.runtime.ray.transport.staged import Landing, copied_out, cut_out, parts_of
from autopar.runtime.stage_programs import StagePrograms


class Exchange:
    """The messages of one process in a step; a wait may take as many seconds as the deadline.

    Attributes:
      tickets: of the `Send`s that are under way, by tag.
      handed_on: of the leaves that were handed on to other meshes and may still be read.
    """

    def __init__(
        self,
        plan: ActorPlan,
        programs: StagePrograms,
        devices: Mapping[jax.Device, int],
        transport: Sockets,
        deadline: float,
        transfers: Transfers | None = None,
    ) -> None:
        self._plan, self._programs, self._devices = plan, programs, devices
        self._transport, self._deadline = transport, deadline
        self._transfers = transfers
        # The memory of CPUs is the host's: there is nothing to copy.
        self._is_staged = jax.default_backend() != "cpu"
        first = next(iter(devices))
        if self._is_staged and transfers is None and takes_bytes(first):
            transport.pinned = PinnedMemory(first)
        self.tickets: dict[int, list[Ticket]] = {}
        self.handed_on: list[Ticket] = []
        self._passed_on: list[Ticket] = []

    def wait(self, tickets: Sequence[Ticket]) -> None:
        """Wait until what is sent may be overwritten.

        Raises:
          TransportError: it cannot be sent, or not in time.
        """
        for ticket in tickets:
            self._transport.wait(ticket, self._deadline)

    def wait_for_all(self) -> None:
        """Wait for everything that is under way."""
        for tickets in (*self.tickets.values(), self.handed_on, self._passed_on):
            self.wait(tickets)

    def clear(self) -> None:
        """The step is over."""
        self.tickets.clear()
        self.handed_on.clear()
        self._passed_on.clear()

    def turn(self, actor: int, step: int, tag: int) -> None:
        """Wait until an actor says that this one may go on."""
        self._transport.receive(actor, step, tag, self._deadline)

    def give_turn(self, actor: int, step: int, tag: int) -> None:
        """Say to an actor that it may go on."""
        self._transport.send(actor, step, tag, 1, lambda: [_DONE])

    def send(
        self, mesh: int, step: int, tag: int, arrays: Sequence[Any], ways: Sequence[Way]
    ) -> list[Ticket]:
        """Send to each process of another mesh what it gets from this one."""
        tickets = []
        itemsizes = [numbers(array).dtype.itemsize for array in arrays]
        for process, actor in enumerate(self._plan.processes[mesh]):
            moves = [way.moves[process] for way in ways]
            size = _num_bytes(moves, itemsizes)
            if size:
                data = self._departing(arrays, moves)
                tickets.append(self._sent(actor, step, tag, size, data))
        return tickets

    def _departing(
        self, arrays: Sequence[Any], moves: Sequence[Sequence[Move]]
    ) -> Callable[[], Any]:
        """What gives the bytes of moves, or what they take on its devices, when it is there."""
        pairs = list(zip(arrays, moves, strict=True))
        if self._is_staged and self._transfers is None:
            # Of what is cut, no more is held than the pieces.
            pieces = [x for pair in pairs for x in cut_out(*pair, self._devices)]

            def of_pieces() -> Iterable[np.ndarray]:
                jax.block_until_ready(pieces)
                return copied_out(pieces)

            return of_pieces

        def data() -> Iterable[np.ndarray] | list[jax.Array]:
            jax.block_until_ready(arrays)
            if self._transfers is not None:
                return [copy(x) for pair in pairs for x in parts_of(*pair, self._devices)]
            return itertools.chain.from_iterable(taken(*pair, self._devices) for pair in pairs)

        return data

    def _sent(self, actor: int, step: int, tag: int, size: int, data: Callable[[], Any]) -> Ticket:
        """Send what `data` gives: bytes, or arrays that the other one pulls."""
        transfers = self._transfers
        if transfers is None:
            return self._transport.send(actor, step, tag, size, data)

        def offer() -> list[np.ndarray]:
            arrays = jax.block_until_ready(data())
            self._transport.sent_bytes += size
            return [transfers.offer(arrays)]

        return self._transport.send(actor, step, tag, OFFER_BYTES, offer)

    def send_buffers(
        self, x: Send, ways: Sequence[Way], buffers: dict[Buffer, Any], step: int
    ) -> None:
        """What a `Send` says."""
        arrays = [buffers[buffer] for buffer in x.buffers]
        self.tickets[x.tag] = self.send(x.to, step, x.tag, arrays, ways)

    def receive(
        self,
        mesh: int,
        tag: int,
        items: Sequence[tuple[Buffer, Way]],
        buffers: dict[Buffer, Any],
        step: int,
    ) -> None:
        """Receive from each process of another mesh; exchange with those of this one."""
        plan = self._plan
        ways = [way for _, way in items]
        dtypes = [plan.numbers_of(buffer.value)[1] for buffer, _ in items]
        landings = [self._landing(buffer, way) for buffer, way in items]

        def take(actor: int, tag: int, moves: Sequence[Sequence[Move]]) -> None:
            size = _num_bytes(moves, [dtype.itemsize for dtype in dtypes])
            if not size:
                return
            if self._transfers is not None:
                self._pull(actor, step, tag, list(zip(landings, moves, strict=True)))
                return
            arrival = self._transport.arriving(actor, step, tag, self._deadline)

            def until(stop: int) -> None:
                self._transport.wait_until(arrival, stop, actor, self._deadline)

            start = 0
            for landing, own, dtype in zip(landings, moves, dtypes, strict=True):
                for move in own:
                    landing.take_of(move, arrival, start, until)
                    start += _num_bytes([[move]], [dtype.itemsize])
            until(size)
            self._transport.done(actor, step, tag)

        for process, actor in enumerate(plan.processes[mesh]):
            take(actor, tag, [way.moves[process] for way in ways])
        others = [pair for pair in enumerate(plan.siblings) if pair[0] != plan.process]
        for process, actor in others:
            passed: list[Any] = [
                piece
                for landing in landings
                for move, part in landing.parts
                if process in move.processes
                for piece in (part if isinstance(part, list) else [part])
            ]
            size = sum(piece.nbytes for piece in passed)
            if size:
                parts = passed if self._transfers is not None else list(map(as_bytes, passed))
                data: Callable[[], list[Any]] = functools.partial(list, parts)
                self._passed_on.append(self._sent(actor, step, tag | PASSED_ON, size, data))
        for process, actor in others:
            take(actor, tag | PASSED_ON, [way.passed_on[process] for way in ways])
        for (buffer, _), landing in zip(items, landings, strict=True):
            buffers[buffer] = landing.array()

    def _pull(
        self, actor: int, step: int, tag: int, items: Sequence[tuple[Landing, Sequence[Move]]]
    ) -> None:
        """Take what an actor offers, straight into the devices that want it."""
        assert self._transfers is not None
        offer = self._transport.receive(actor, step, tag, self._deadline)
        pairs = [(landing, move) for landing, own in items for move in own]
        arrays = self._transfers.pull(offer, [landing.shape_of(move) for landing, move in pairs])

        def is_there() -> bool:
            return all(array.is_ready() for array in arrays)  # type: ignore[attr-defined]

        self._transport.poll(is_there, actor, self._deadline)
        try:
            jax.block_until_ready(arrays)
        except jax.errors.JaxRuntimeError as error:
            raise TransportError("lost", actor, str(error)) from error
        for (landing, move), array in zip(pairs, arrays, strict=True):
            landing.put(move, array)

    def _landing(self, buffer: Buffer, way: Way) -> Landing:
        aval = self._plan.pieces.versions[buffer.value].atom.aval
        place = self._programs.places[buffer.value]
        shape = tuple(aval.shape) if place.partial == 1 else (place.partial, *aval.shape)
        return Landing(way.tiles, shape, aval.dtype, place.sharding, is_staged=self._is_staged)


def _num_bytes(moves: Sequence[Sequence[Move]], itemsizes: Sequence[int]) -> int:
    return sum(
        math.prod(move.shape) * itemsize
        for own, itemsize in zip(moves, itemsizes, strict=True)
        for move in own
    )


_DONE = np.zeros(1, np.uint8)
