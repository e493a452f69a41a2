"""What carries bytes between the processes of a pipeline.

A message has the number of its step, the tag of its `Send`, and bytes. Nothing is sent before the
array is computed, and whoever sends never waits: a thread for each peer does. Whoever receives
waits, never longer than a deadline, and learns at once when the peer is gone or the step was
called off. Large messages go in chunks over several connections (`chunks.py`).
"""

from __future__ import annotations

import hmac
import ipaddress
import queue
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.runtime.ray.transport.chunks import (
    FRAME,
    LANES,
    Arrival,
    Lanes,
    PeerGone,
    aligned,
    fill,
    hang_up,
    read_frame,
    thread,
)
from autopar.runtime.ray.transport.pinned import PinnedMemory

Address = tuple[str, int]
Bytes = Callable[[], Iterable[np.ndarray]]
"""Waits for arrays and gives their bytes, as arrays of uint8.

What raises should do so before the first of them: nothing is sent then, not even in part.
"""


class TransportError(Exception):
    """A wait that will not end well.

    Args:
      reason: "late" (the deadline has passed), "lost" (the peer is gone), "aborted" (the step was
        called off) or "failed" (what was to be sent could not be computed).
      peer: the actor on the other side.
      detail: for people.
    """

    def __init__(self, reason: str, peer: int, detail: str = ""):
        super().__init__(reason, peer, detail)
        self.reason, self.peer, self.detail = reason, peer, detail


@dataclass(eq=False)
class Ticket:
    """A `Send` that is under way: what it reads must stay until `is_read`."""

    peer: int
    is_read: bool = False
    error: TransportError | None = None


_HELLO = struct.Struct("<32sQ")
HELLO_SECONDS = 10.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 5e-5, 2e-3
LOOPBACK_BYTES = 256 << 10
"""What a connection over loopback may have sent that is not read. Linux lets it grow to several
times as much, which no longer is in a cache when it is read, and there is no network to bridge.
"""


def _fit(connection: socket.socket) -> None:
    if ipaddress.ip_address(connection.getsockname()[0]).is_loopback:
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, buffer, LOOPBACK_BYTES)


class Sockets:
    """Messages between the actors of a pipeline, matched by sender, step and tag.

    They go over TCP: `lanes` connections for each ordered pair of actors that talk, which begin
    with a token, 32 bytes that all processes of the pipeline know. The host is the address to
    listen at, and the port is any free one.

    Attributes:
      pinned: the memory into which large messages come; None: ordinary memory.
      sent_bytes: how many were sent.
    """

    def __init__(self, actor: int, host: str, token: bytes, lanes: int = LANES):
        self.actor, self._token, self._num_lanes = actor, token, lanes
        self._inbox: dict[tuple[int, int, int], Arrival] = {}
        self._changed = threading.Condition()
        self._open: Counter[int] = Counter()
        self._lost: set[int] = set()
        self._aborted = False
        self._first_step = 0
        self._closed = False
        self._outboxes: dict[int, queue.SimpleQueue[Any]] = {}
        self._lanes: list[Lanes] = []
        self._accepted: list[socket.socket] = []
        self._listener = socket.create_server((host, 0))
        _fit(self._listener)  # connections have what it has
        self.address: Address = self._listener.getsockname()[:2]
        self.pinned: PinnedMemory | None = None
        self.sent_bytes = 0
        thread(self._accept)

    def connect(self, peers: Mapping[int, Address], deadline: float) -> None:
        """Connect to the actors that this one sends to, unless it is connected to them.

        Raises:
          TransportError: one does not answer in time.
        """
        for peer, address in peers.items():
            if peer in self._outboxes:
                continue
            connections: list[socket.socket] = []
            try:
                connections.extend(self._call(address, deadline) for _ in range(self._num_lanes))
            except OSError as error:
                for connection in connections:
                    hang_up(connection)
                raise TransportError("lost", peer, f"{address}: {error}") from error
            lanes, outbox = Lanes(connections), queue.SimpleQueue[Any]()
            self._lanes.append(lanes)
            self._outboxes[peer] = outbox
            thread(self._write, peer, lanes, outbox)

    def _call(self, address: Address, deadline: float) -> socket.socket:
        connection = socket.create_connection(address, timeout=deadline)
        try:
            connection.sendall(_HELLO.pack(self._token, self.actor))
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _fit(connection)
        except OSError:
            connection.close()
            raise
        return connection

    def send(self, to: int, step: int, tag: int, size: int, data: Bytes) -> Ticket:
        """Start to send; returns at once."""
        ticket = Ticket(to)
        self._outboxes[to].put((ticket, step, tag, size, data))
        return ticket

    def wait(self, ticket: Ticket, deadline: float) -> None:
        """Wait until what is sent may be overwritten.

        Raises:
          TransportError: it cannot be sent, or not in time.
        """
        if not ticket.is_read:
            self._wait(lambda: ticket.is_read, ticket.peer, deadline)
        if ticket.error is not None:
            raise ticket.error

    def receive(self, source: int, step: int, tag: int, deadline: float) -> np.ndarray:
        """Wait for a message, at most `deadline` seconds.

        Raises:
          TransportError: it will not come, or not in time.
        """
        arrival = self.arriving(source, step, tag, deadline)
        self.wait_until(arrival, arrival.size, source, deadline)
        self.done(source, step, tag)
        return arrival.data

    def arriving(self, source: int, step: int, tag: int, deadline: float) -> Arrival:
        """Wait for the beginning of a message, at most `deadline` seconds.

        Raises:
          TransportError: it will not come, or not in time.
        """
        key = source, step, tag
        with self._changed:
            self._wait(lambda: key in self._inbox or source in self._lost, source, deadline)
            if key not in self._inbox:
                raise TransportError("lost", source)
            return self._inbox[key]

    def wait_until(self, arrival: Arrival, stop: int, source: int, deadline: float) -> None:
        """Wait until so many bytes of a message are there, at most `deadline` seconds.

        Raises:
          TransportError: they will not come, or not in time.
        """
        if arrival.until < stop:
            with self._changed:
                arrival.wanted = stop
                is_there = lambda: arrival.until >= stop  # noqa: E731
                self._wait(lambda: is_there() or source in self._lost, source, deadline)
                if not is_there():
                    raise TransportError("lost", source)

    def poll(self, is_there: Callable[[], bool], source: int, deadline: float) -> None:
        """Wait for something else that comes from an actor, and of which nobody tells.

        Raises:
          TransportError: it will not come, or not in time.
        """
        end, pause = time.monotonic() + deadline, _SHORTEST_PAUSE
        while not is_there():
            with self._changed:
                if self._aborted:
                    raise TransportError("aborted", source)
                if source in self._lost:
                    raise TransportError("lost", source)
                if time.monotonic() > end:
                    raise TransportError("late", source)
                self._changed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def done(self, source: int, step: int, tag: int) -> None:
        """Who received a message has all of it."""
        with self._changed:
            self._inbox.pop((source, step, tag), None)

    def _wait(self, is_there: Callable[[], bool], peer: int, deadline: float) -> None:
        end = time.monotonic() + deadline
        with self._changed:
            while self._aborted or not is_there():
                if self._aborted:
                    raise TransportError("aborted", peer)
                left = end - time.monotonic()
                if left <= 0:
                    raise TransportError("late", peer)
                self._changed.wait(left)

    def abort(self) -> None:
        """Call off the running step: who waits raises."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def reset(self, step: int) -> None:
        """Begin anew: whatever belongs to a step before `step` is dropped."""
        with self._changed:
            self._aborted = False
            self._first_step = step
            self._inbox = {key: data for key, data in self._inbox.items() if key[1] >= step}

    def close(self) -> None:
        """Close all connections; who waits for this process learns that it is gone."""
        self._closed = True
        for each in (self._listener, *self._accepted):
            hang_up(each)
        for lanes in self._lanes:
            lanes.hang_up()
        for outbox in self._outboxes.values():
            outbox.put(None)

    def _write(self, peer: int, lanes: Lanes, outbox: Any) -> None:
        while (message := outbox.get()) is not None:
            ticket, step, tag, size, data = message
            try:
                lanes.send(step, tag, size, data())
                self.sent_bytes += size
            except PeerGone as error:
                ticket.error = TransportError("lost", peer, str(error))
            except Exception as error:
                ticket.error = TransportError("failed", peer, f"{type(error).__name__}: {error}")
            del data, message
            self._end(ticket)
        lanes.end()

    def _end(self, ticket: Ticket) -> None:
        with self._changed:
            ticket.is_read = True
            self._changed.notify_all()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread(self._greet, connection)

    def _greet(self, connection: socket.socket) -> None:
        """Who does not know the token is not listened to."""
        try:
            connection.settimeout(HELLO_SECONDS)
            token, source = read_frame(connection, _HELLO)
            connection.settimeout(None)
            if not hmac.compare_digest(token, self._token):
                raise ConnectionError("another token")
        except OSError:
            connection.close()
            return
        self._accepted.append(connection)
        with self._changed:
            self._open[source] += 1
        with connection:  # `close` may have been before it was there
            self._read(source, connection)

    def _read(self, source: int, connection: socket.socket) -> None:
        try:
            while True:
                self._take(source, connection)
        except OSError:
            pass  # the peer is gone, or this end is closed
        finally:
            with self._changed:
                self._open[source] -= 1
                # What the others still bring was sent before the peer was gone.
                if not self._open[source]:
                    self._lost.add(source)
                self._changed.notify_all()

    def _take(self, source: int, connection: socket.socket) -> None:
        """One chunk; whoever waits for the next one holds nothing of it."""
        step, tag, size, start, count = read_frame(connection, FRAME)
        arrival = self._arrival(source, step, tag, size)
        if arrival is None:
            fill(connection, aligned(count))
            return
        for view in arrival.views(start, start + count):
            fill(connection, view)
        with self._changed:
            arrival.note(start, count)
            if arrival.until >= arrival.wanted:
                self._changed.notify_all()

    def _arrival(self, source: int, step: int, tag: int, size: int) -> Arrival | None:
        """The message to which a chunk belongs; None: to a step that is over."""
        key, made = (source, step, tag), None
        while True:
            with self._changed:
                if step < self._first_step:
                    return None
                if made is not None or key in self._inbox:
                    return self._inbox.setdefault(key, made) if made else self._inbox[key]
            made = Arrival(size, self.pinned)  # which may take a while, of pinned memory
