"""A message in chunks: how it leaves over several connections, and how it comes together again.

A message of many bytes is a pipeline: while one chunk is on its way, the next one is copied out of
a device, and the receiver copies the one before into its devices. The connections to one peer
(*lanes*) each take the next chunk when they are free, so chunks arrive in any order. Here no
thread is woken for a single chunk, and who waits for a message is not woken for each of its chunks:
that took a tenth of the time.
"""

from __future__ import annotations

import collections
import contextlib
import math
import queue
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from autopar.runtime.ray.transport.pinned import PinnedMemory

CHUNK_BYTES = 2 << 20
"""What goes over a connection at once, of most messages: smaller ones cost turns, larger ones
overlap less."""
LARGE_MESSAGE_BYTES = 32 << 20
"""From what size chunks of a message are twice as large: there are turns enough for every lane."""
LANES = 4
"""Connections to each peer: one alone is held up by one core, here and at the peer."""
_ALIGNMENT = 64
"""Where XLA on CPUs takes an array of NumPy as it is; elsewhere it makes a copy."""
_MOST_PARTS = 512  # `sendmsg` takes no more than 1024

FRAME = struct.Struct("<QQQQQ")
"""Step, tag and size of the message; where in it a chunk begins, and how long it is."""


class PeerGone(Exception):
    """Nothing more can be sent to a peer."""


class Arrival:
    """A message that is coming, or is there.

    Args:
      size: its bytes.
      pinned: where they shall lie, if not in ordinary memory.

    Attributes:
      until: how many bytes are there without a gap.
      wanted: how many of them somebody waits for.
    """

    def __init__(self, size: int, pinned: PinnedMemory | None = None) -> None:
        self.size, self.until, self.wanted = size, 0, 0
        self.pinned = pinned.pieces(size) if pinned is not None and size >= _LARGE else []
        self._memory = [x.data for x in self.pinned] or [aligned(size)]
        self._ends: dict[int, int] = {}

    @property
    def is_whole(self) -> bool:
        """Whether all of it is there."""
        return self.until == self.size

    @property
    def data(self) -> np.ndarray:
        """Its bytes, aligned; those before `until` are there."""
        return self._memory[0] if len(self._memory) == 1 else np.concatenate(self._memory)

    def where(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The pieces that have these bytes: number, and from where to where in it."""
        if not self.pinned:
            yield 0, start, stop
            return
        size = self._memory[0].size
        for number in range(start // size, math.ceil(stop / size)):
            begin = number * size
            yield number, max(start - begin, 0), min(stop - begin, self._memory[number].size)

    def views(self, start: int, stop: int) -> list[np.ndarray]:
        """These bytes, where they are or will be."""
        return [self._memory[n][first:last] for n, first, last in self.where(start, stop)]

    def note(self, start: int, count: int) -> None:
        """A chunk has been written to `data`."""
        self._ends[start] = start + count
        while self.until in self._ends and not self.is_whole:
            self.until = self._ends.pop(self.until)


def aligned(size: int) -> np.ndarray:
    """So many bytes of memory, where XLA likes them to begin.

    Large ones are used again when nobody holds them any more: new memory would be cleared first,
    which takes a fifth of the time in which bytes come from another process.
    """
    if size < _LARGE:
        return _begins_well(np.empty(size + _ALIGNMENT, np.uint8))[:size]
    try:
        memory = _idle[size].pop()
    except (KeyError, IndexError):
        memory = np.empty(size + _ALIGNMENT, np.uint8)
    # What is made of this holds `lent`, but not what is behind it.
    lent = np.frombuffer(memory.data, np.uint8)
    weakref.finalize(lent, _give_back, size, memory).atexit = False
    return _begins_well(lent)[:size]


def _begins_well(memory: np.ndarray) -> np.ndarray:
    return memory[-memory.ctypes.data % _ALIGNMENT :]


_LARGE = 1 << 20
_MOST_IDLE = 256 << 20
_idle: dict[int, collections.deque[np.ndarray]] = {}


def _give_back(size: int, memory: np.ndarray) -> None:
    # It may run wherever Python collects garbage, so it takes no lock.
    if sum(size * len(found) for size, found in list(_idle.items())) + size <= _MOST_IDLE:
        _idle.setdefault(size, collections.deque()).append(memory)


def chunks(parts: Iterable[np.ndarray], size: int = CHUNK_BYTES) -> Iterator[list[np.ndarray]]:
    """The bytes of parts in chunks, each as pieces of parts; no chunk is empty.

    >>> [[piece.size for piece in x] for x in chunks([np.zeros(5, np.uint8)] * 2, 4)]
    [[4], [1, 3], [2]]
    """
    chunk: list[np.ndarray] = []
    room = size
    for part in parts:
        start = 0
        while start < part.size:
            piece = part[start : start + room]
            chunk.append(piece)
            start, room = start + piece.size, room - piece.size
            if not room or len(chunk) == _MOST_PARTS:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk


class _Departure:
    """A message that leaves: its chunks, each with its header, for whoever asks next.

    Attributes:
      taken: how many bytes were.
      error: what the parts raised, after which there are no more chunks.
    """

    def __init__(self, step: int, tag: int, size: int, parts: Iterable[np.ndarray]) -> None:
        self._step, self._tag, self._size = step, tag, size
        is_large = size >= LARGE_MESSAGE_BYTES
        self._chunks = chunks(parts, 2 * CHUNK_BYTES if is_large else CHUNK_BYTES)
        self._lock = threading.Lock()
        self.taken = 0
        self.error: Exception | None = None

    def take(self) -> tuple[bytes, list[np.ndarray]] | None:
        """The next chunk, when it is there; None: there is none."""
        with self._lock:
            try:
                chunk = None if self.error is not None else next(self._chunks, None)
            except Exception as error:
                self.error, chunk = error, None
            if chunk is None:
                return None
            start, count = self.taken, sum(piece.size for piece in chunk)
            self.taken += count
            return FRAME.pack(self._step, self._tag, self._size, start, count), chunk


class Lanes:
    """The connections to one peer. One thread sends one message after the other."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._connections = connections
        self._departures: queue.Queue[_Departure | None] = queue.Queue()
        self._error: OSError | None = None
        for connection in connections[1:]:
            thread(self._help, connection)

    def send(self, step: int, tag: int, size: int, parts: Iterable[np.ndarray]) -> None:
        """Send a message; what raises while the parts are made is raised, and nothing more is sent.

        Raises:
          PeerGone: the peer is gone.
        """
        own = self._connections[0]
        if size <= CHUNK_BYTES:  # no other thread need wake up
            self._send(own, FRAME.pack(step, tag, size, 0, size), list(parts))
        else:
            departure = _Departure(step, tag, size, parts)
            first = departure.take()  # others would only wait for it
            for _ in range(min(len(self._connections), math.ceil(size / CHUNK_BYTES)) - 1):
                self._departures.put(departure)
            if first is not None:
                self._send(own, *first)
                del first
            self._carry(own, departure)
            self._departures.join()
            if departure.error is not None:
                raise departure.error
            assert self._error is not None or departure.taken == size, (departure.taken, size)
        if self._error is not None:
            raise PeerGone(str(self._error)) from self._error

    def hang_up(self) -> None:
        """Close the connections: who sends learns it."""
        for connection in self._connections:
            hang_up(connection)

    def end(self) -> None:
        """Let the threads end; only whoever sends may say so."""
        for _ in self._connections[1:]:
            self._departures.put(None)

    def _help(self, connection: socket.socket) -> None:
        while (departure := self._departures.get()) is not None:
            self._carry(connection, departure)
            del departure
            self._departures.task_done()

    def _carry(self, connection: socket.socket, departure: _Departure) -> None:
        while self._error is None and (chunk := departure.take()) is not None:
            self._send(connection, *chunk)
            del chunk

    def _send(self, connection: socket.socket, header: bytes, chunk: list[np.ndarray]) -> None:
        if self._error is not None:
            return
        try:
            send_all(connection, [header, *chunk])
        except OSError as error:
            self._error = error
            self.hang_up()  # without one of them no message is whole


def send_all(connection: socket.socket, parts: Sequence[bytes | np.ndarray]) -> None:
    """Send all bytes of the parts, in few calls."""
    views = [memoryview(part if isinstance(part, bytes) else part.data) for part in parts]
    left = [view for view in views if len(view)]
    while left:
        sent = connection.sendmsg(left[:_MOST_PARTS])
        done = 0
        while done < len(left) and sent >= len(left[done]):
            sent -= len(left[done])
            done += 1
        left = left[done:]
        if sent:
            left[0] = left[0][sent:]


def fill(connection: socket.socket, data: np.ndarray) -> None:
    """Read as many bytes as `data` has.

    Raises:
      ConnectionError: the other side has closed before.
    """
    view, start = data.data, 0
    flags = 0 if connection.gettimeout() else socket.MSG_WAITALL  # return but once
    while start < data.size:
        count = connection.recv_into(view[start:], 0, flags)
        if not count:
            raise ConnectionError("closed")
        start += count


def read_frame(connection: socket.socket, frame: struct.Struct) -> tuple[Any, ...]:
    """The numbers of a header.

    Raises:
      ConnectionError: the other side has closed before.
    """
    data = np.empty(frame.size, np.uint8)
    fill(connection, data)
    return frame.unpack(data.tobytes())


def hang_up(connection: socket.socket) -> None:
    """Close a connection, and wake whoever waits there."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def thread(target: Callable[..., None], *args: Any) -> None:
    """Run a function beside; it does not keep the process alive."""
    threading.Thread(target=target, args=args, daemon=True).start()
