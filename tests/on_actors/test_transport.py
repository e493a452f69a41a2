"""Messages between processes, here between two ends in one."""

import functools
import gc
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from autopar.runtime.ray.actor.actor_arrays import KEYS, Missing, Store
from autopar.runtime.ray.transport import pickling, sourced
from autopar.runtime.ray.transport.chunks import CHUNK_BYTES, LARGE_MESSAGE_BYTES
from autopar.runtime.ray.transport.group import is_of_group
from autopar.runtime.ray.transport.sockets import Sockets, TransportError

TOKEN = bytes(range(32))


@pytest.fixture
def ends() -> Iterator[tuple[Sockets, Sockets]]:
    pair = Sockets(0, "127.0.0.1", TOKEN), Sockets(1, "127.0.0.1", TOKEN)
    pair[0].connect({1: pair[1].address}, 10)
    pair[1].connect({0: pair[0].address}, 10)
    yield pair
    for end in pair:
        end.close()


def data(*values: int) -> list[np.ndarray]:
    return [np.array(values, np.uint8)]


def test_messages_are_matched_by_step_and_tag(ends: tuple[Sockets, Sockets]) -> None:
    left, right = ends
    left.send(1, 1, 7, 2, lambda: data(1, 2))
    left.send(1, 1, 8, 0, list)
    left.send(1, 2, 7, 1, lambda: data(9))
    assert right.receive(0, 2, 7, 10).tolist() == [9]
    assert right.receive(0, 1, 8, 10).tolist() == []
    assert right.receive(0, 1, 7, 10).tolist() == [1, 2]


def test_a_large_message_in_parts(ends: tuple[Sockets, Sockets]) -> None:
    left, right = ends
    parts = [np.full(1 << 20, n, np.uint8) for n in range(5)]
    ticket = left.send(1, 1, 1, 5 << 20, lambda: parts)
    np.testing.assert_array_equal(right.receive(0, 1, 1, 30), np.concatenate(parts))
    left.wait(ticket, 30)
    assert left.sent_bytes == 5 << 20


def test_a_message_of_large_chunks(ends: tuple[Sockets, Sockets]) -> None:
    left, right = ends
    numbers = np.random.default_rng(0)
    parts = [numbers.integers(0, 256, size, np.uint8) for size in (3, LARGE_MESSAGE_BYTES, 5)]
    left.send(1, 1, 1, LARGE_MESSAGE_BYTES + 8, lambda: parts)
    np.testing.assert_array_equal(right.receive(0, 1, 1, 30), np.concatenate(parts))


@pytest.mark.parametrize("lanes", [1, 3])
def test_chunks_come_together_in_any_order(lanes: int) -> None:
    left, right = (Sockets(n, "127.0.0.1", TOKEN, lanes) for n in range(2))
    left.connect({1: right.address}, 10)
    numbers = np.random.default_rng(0)
    for step in range(4):
        parts = [numbers.integers(0, 256, size, np.uint8) for size in (3, 0, 7 << 20, 1 << 16, 5)]
        size = sum(part.size for part in parts)
        left.send(1, step, 1, size, functools.partial(iter, parts))
        left.send(1, step, 2, 1, lambda: data(9))
        np.testing.assert_array_equal(right.receive(0, step, 1, 30), np.concatenate(parts))
        assert right.receive(0, step, 2, 30).tolist() == [9]
    left.close()
    assert reason(lambda: right.receive(0, 9, 1, 60)) == "lost"
    right.close()


def test_a_peer_that_is_gone_in_the_middle_of_a_message(ends: tuple[Sockets, Sockets]) -> None:
    left, right = ends
    go_on, size = threading.Event(), 5 * CHUNK_BYTES

    def slowly() -> Iterator[np.ndarray]:
        yield np.zeros(3 * CHUNK_BYTES, np.uint8)
        go_on.wait(30)
        yield np.zeros(2 * CHUNK_BYTES, np.uint8)

    left.send(1, 1, 1, 1, lambda: data(5))
    ticket = left.send(1, 1, 2, size, slowly)
    right.wait_until(right.arriving(0, 1, 2, 30), CHUNK_BYTES, 0, 30)
    left.close()
    go_on.set()
    assert reason(lambda: right.receive(0, 1, 2, 60)) == "lost"
    assert right.receive(0, 1, 1, 60).tolist() == [5]  # what came before is still there
    assert reason(lambda: left.wait(ticket, 30)) == "lost"


def test_who_waits_for_a_message_is_woken_when_all_of_it_is_there(
    ends: tuple[Sockets, Sockets], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = ends
    go_on, size = threading.Event(), 9 * CHUNK_BYTES

    def slowly() -> Iterator[np.ndarray]:
        yield np.zeros(CHUNK_BYTES, np.uint8)
        go_on.wait(30)
        yield np.ones(8 * CHUNK_BYTES, np.uint8)

    left.send(1, 1, 1, size, slowly)
    arrival = right.arriving(0, 1, 1, 30)
    woken: list[None] = []
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(right.wait_until, arrival, size, 0, 30)
        while arrival.wanted < size:
            time.sleep(0)
        notify = right._changed.notify_all
        monkeypatch.setattr(right._changed, "notify_all", lambda: woken.append(notify()))
        go_on.set()
        waiting.result(30)
    assert len(woken) == 1
    assert arrival.data.sum() == 8 * CHUNK_BYTES


def test_a_message_that_fails_half_way(ends: tuple[Sockets, Sockets]) -> None:
    def fail() -> Iterator[np.ndarray]:
        yield np.zeros(2 * CHUNK_BYTES, np.uint8)
        raise FloatingPointError("nan")

    left, right = ends
    ticket = left.send(1, 1, 1, 3 * CHUNK_BYTES, fail)
    assert reason(lambda: left.wait(ticket, 30)) == "failed"
    assert reason(lambda: right.receive(0, 1, 1, 0.01)) == "late"
    right.reset(2)
    left.send(1, 2, 1, 1, lambda: data(3))
    assert right.receive(0, 2, 1, 30).tolist() == [3]


def test_who_waits_for_an_array_that_is_gone_learns_it() -> None:
    store = Store()
    with ThreadPoolExecutor() as threads:
        early = threads.submit(store.wait, 2 * KEYS + 5)
        store.put(2 * KEYS + 5, "array")
        store.complete(2)
        assert early.result(10) == "array"
        store.drop([2 * KEYS + 5])
        with pytest.raises(Missing):
            threads.submit(store.wait, 2 * KEYS + 5).result(10)
        late = threads.submit(store.wait, 3 * KEYS + 5)
        store.lose(3 * KEYS, 4 * KEYS)
        with pytest.raises(Missing):
            late.result(10)


@pytest.mark.parametrize(
    ("error", "is_of_it"),
    [
        (ValueError("UNKNOWN: Gloo all-reduce failed: [pair.cc:538] Connection closed"), True),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: Failed to reach coordination service"), True),
        (ValueError("compiled for float32[3]"), False),
        (RuntimeError("gloo"), False),
    ],
)
def test_errors_of_a_group(error: Exception, is_of_it: bool) -> None:
    assert is_of_group(error) == is_of_it


def reason(run: object) -> str:
    assert callable(run)
    with pytest.raises(TransportError) as found:
        run()
    return found.value.reason


def test_a_wait_ends_at_its_deadline(ends: tuple[Sockets, Sockets]) -> None:
    assert reason(lambda: ends[1].receive(0, 1, 1, 0.05)) == "late"


def test_a_wait_ends_when_the_peer_is_gone(ends: tuple[Sockets, Sockets]) -> None:
    left, right = ends
    left.wait(left.send(1, 1, 1, 1, lambda: data(5)), 10)
    left.close()
    assert right.receive(0, 1, 1, 60).tolist() == [5]  # what came before is still there
    assert reason(lambda: right.receive(0, 1, 2, 60)) == "lost"


def test_a_wait_ends_when_the_step_is_called_off(ends: tuple[Sockets, Sockets]) -> None:
    left, right = ends
    found: list[str] = []
    waiting = threading.Thread(
        target=lambda: found.append(reason(lambda: right.receive(0, 1, 1, 60)))
    )
    waiting.start()
    right.abort()
    waiting.join(30)
    assert found == ["aborted"]
    left.send(1, 1, 1, 1, lambda: data(1))
    left.send(1, 5, 1, 1, lambda: data(2))
    right.reset(5)
    assert right.receive(0, 5, 1, 60).tolist() == [2]
    assert reason(lambda: right.receive(0, 1, 1, 0.01)) == "late", "of a step that is over"


def test_what_cannot_be_computed_is_not_sent(ends: tuple[Sockets, Sockets]) -> None:
    def fail() -> list[np.ndarray]:
        raise FloatingPointError("nan")

    left, right = ends
    ticket = left.send(1, 1, 1, 1, fail)
    with pytest.raises(TransportError, match="FloatingPointError: nan"):
        left.wait(ticket, 10)
    left.send(1, 1, 2, 1, lambda: data(3))
    assert right.receive(0, 1, 2, 10).tolist() == [3]


def test_strangers_are_not_listened_to(ends: tuple[Sockets, Sockets]) -> None:
    with socket.create_connection(ends[0].address, timeout=10) as stranger:
        stranger.sendall(bytes(40))
        assert stranger.recv(1) == b""
    assert reason(lambda: ends[0].receive(1, 1, 1, 0.01)) == "late"


def test_nobody_there() -> None:
    end = Sockets(0, "127.0.0.1", TOKEN)
    other = Sockets(1, "127.0.0.1", TOKEN)
    other.close()
    assert reason(lambda: end.connect({1: other.address}, 1)) == "lost"
    end.close()


@pytest.mark.filterwarnings("error")
def test_what_is_closed_leaves_neither_threads_nor_sockets() -> None:
    before = set(threading.enumerate())
    for _ in range(20):  # also where a peer's greeting is read after the end
        one, other = Sockets(0, "127.0.0.1", TOKEN), Sockets(1, "127.0.0.1", TOKEN)
        one.connect({1: other.address}, 10)
        other.connect({0: one.address}, 10)
        one.close()
        other.close()
    end = time.monotonic() + 30
    while not set(threading.enumerate()) <= before and time.monotonic() < end:
        time.sleep(0.01)  # one that is about to start cannot be joined
    assert set(threading.enumerate()) <= before
    del one, other
    gc.collect()


class FailsOnce:
    """A source of which a batch can be read the second time that it is asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> np.ndarray:
        self.asked += 1
        if self.asked == 1:
            raise OSError("the network was gone")
        return np.arange(3)


def test_a_batch_that_could_not_be_read_is_read_again() -> None:
    reader = sourced._Reader(pickling.dumps(FailsOnce(), "The source"))
    with pytest.raises(OSError, match="the network was gone"):
        reader.batch(0)
    np.testing.assert_array_equal(reader.batch(0)[0], np.arange(3))
    reader.close()
