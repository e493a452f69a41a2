"""What carries bytes between the processes of a pipeline.

A message has the number of its step, the tag of its `Send`, and bytes. Nothing is sent before the
array is computed, and whoever sends never waits: a thread for each peer does. Whoever receives
waits, never longer than a deadline, and learns at once when the peer is gone or the step was
called off.

Tried beside sockets (jaxlib 0.10.2, CPU): `jax.experimental.transfer`. It moves arrays correctly,
at about 6 ms for a pair of small ones on a loaded machine of two cores. But a pull whose
counterpart is never offered can neither be called off nor given a deadline while the other process
lives, and what depends on it blocks inside XLA; so a failed stage would cost the processes of all
others.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Address = tuple[str, int]
Bytes = Callable[[], Iterable[np.ndarray]]
"""Waits for arrays and gives their bytes, as arrays of uint8."""


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


_HEADER = struct.Struct("<QQQ")
_HELLO = struct.Struct("<32sQ")
HELLO_SECONDS = 10.0


class Sockets:
    """Messages between the actors of a pipeline, matched by sender, step and tag.

    They go over TCP: one connection for each ordered pair of actors that talk, which begins with a
    token, 32 bytes that all processes of the pipeline know. The host is the address to listen at,
    and the port is any free one.
    """

    def __init__(self, actor: int, host: str, token: bytes):
        self.actor, self._token = actor, token
        self._inbox: dict[tuple[int, int, int], np.ndarray] = {}
        self._changed = threading.Condition()
        self._lost: set[int] = set()
        self._aborted = False
        self._first_step = 0
        self._closed = False
        self._outboxes: dict[int, queue.SimpleQueue[Any]] = {}
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server((host, 0))
        self.address: Address = self._listener.getsockname()[:2]
        self.sent_bytes = 0
        _thread(self._accept)

    def connect(self, peers: Mapping[int, Address], deadline: float) -> None:
        """Connect to the actors that this one sends to, unless it is connected to them.

        Raises:
          TransportError: one does not answer in time.
        """
        for peer, address in peers.items():
            if peer in self._outboxes:
                continue
            try:
                connection = self._call(address, deadline)
            except OSError as error:
                raise TransportError("lost", peer, f"{address}: {error}") from error
            outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._outboxes[peer] = outbox
            self._sockets.append(connection)
            _thread(self._write, peer, connection, outbox)

    def _call(self, address: Address, deadline: float) -> socket.socket:
        connection = socket.create_connection(address, timeout=deadline)
        try:
            connection.sendall(_HELLO.pack(self._token, self.actor))
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
        key = source, step, tag
        with self._changed:
            self._wait(lambda: key in self._inbox or source in self._lost, source, deadline)
            if key not in self._inbox:
                raise TransportError("lost", source)
            return self._inbox.pop(key)

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
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait there
            each.close()
        for outbox in self._outboxes.values():
            outbox.put(None)

    def _write(self, peer: int, connection: socket.socket, outbox: Any) -> None:
        while (message := outbox.get()) is not None:
            ticket, step, tag, size, data = message
            try:
                parts = list(data())
            except Exception as error:
                ticket.error = TransportError("failed", peer, f"{type(error).__name__}: {error}")
                self._end(ticket)
                continue
            try:
                connection.sendall(_HEADER.pack(step, tag, size))
                for part in parts:
                    connection.sendall(part)
                self.sent_bytes += size
            except OSError as error:
                ticket.error = TransportError("lost", peer, str(error))
            del parts, data, message
            self._end(ticket)

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
            _thread(self._greet, connection)

    def _greet(self, connection: socket.socket) -> None:
        """Who does not know the token is not listened to."""
        try:
            connection.settimeout(HELLO_SECONDS)
            token, source = _HELLO.unpack(_exactly(connection, _HELLO.size).tobytes())
            connection.settimeout(None)
            if not hmac.compare_digest(token, self._token):
                raise ConnectionError("another token")
        except OSError:
            connection.close()
            return
        self._sockets.append(connection)
        with connection:  # `close` may have been before it was there
            self._read(source, connection)

    def _read(self, source: int, connection: socket.socket) -> None:
        try:
            while True:
                step, tag, size = _HEADER.unpack(_exactly(connection, _HEADER.size).tobytes())
                data = _exactly(connection, size)
                with self._changed:
                    if step >= self._first_step:
                        self._inbox[source, step, tag] = data
                        self._changed.notify_all()
        except OSError:
            with self._changed:
                self._lost.add(source)
                self._changed.notify_all()


def _exactly(connection: socket.socket, size: int) -> np.ndarray:
    """So many bytes.

    Raises:
      ConnectionError: the other side has closed before.
    """
    data = np.empty(size, np.uint8)
    view, start = data.data, 0
    while start < size:
        count = connection.recv_into(view[start:])
        if not count:
            raise ConnectionError("closed")
        start += count
    return data


def _thread(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()
