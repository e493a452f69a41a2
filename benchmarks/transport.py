"""What carries arrays from actor to actor, beside bare sockets: GB/s between two processes.

    python benchmarks/transport.py --json
    python benchmarks/transport.py --sizes 64 --rounds 20

One process sends, another one receives and says so; both have a device. In every round all ways
take their turn, so that they meet the same machine:

- bare: what sockets of Python give: bytes in memory that are sent over one connection, or over as
  many as the transport has, into memory that is there already; the better of the two. Their buffers
  are as the system has them, or as large as `--buffers` says;
- arrays: an array on one device becomes one on the other, as `Send` and `Recv` do it on CPUs: as a
  whole out of the device, then sent, then as a whole into the other;
- in chunks: as they do it on devices with memory of their own: chunks are copied out and in beside
  (on CPUs these copies are work for the same cores).

Of each, the median and the best over the rounds, and the median of the CPU milliseconds that both
processes take, which tells more where others use the cores. `share` is that of what `Send` and
`Recv` do here over `bare`: the median over the rounds and its quartiles, and that of the best
rounds, which is what others on the machine disturb least. The last line is then a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from autopar.runtime.ray.transport.chunks import LANES, fill, send_all
from autopar.runtime.ray.transport.host_tiles import taken
from autopar.runtime.ray.transport.pinned import PinnedMemory, has_pinned
from autopar.runtime.ray.transport.routes import Move, Tile
from autopar.runtime.ray.transport.sockets import Sockets
from autopar.runtime.ray.transport.staged import Landing, copied_out, cut_out

DEADLINE = 60.0
MB = 1 << 20
WAYS = ("bare 1", "bare lanes", "arrays", "in chunks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.0625, 1, 8, 64], help="MB")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--lanes", type=int, default=LANES)
    parser.add_argument("--pieces", type=float, help="MB that are copied out and in at once")
    parser.add_argument("--buffers", type=int, help="bytes of the bare sockets' buffers")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        receive(options)
        return
    found = measure(options)
    Console().print(table(found))
    if options.json:
        print(json.dumps({"options": vars(options), "rows": found}))


class End:
    """One of the two processes: a device, connections, and what it sends or receives."""

    def __init__(self, number: int, lanes: int, pieces: float | None) -> None:
        self.staged = {} if pieces is None else {"piece_bytes": int(pieces * MB)}
        self.transport = Sockets(number, "127.0.0.1", bytes(32), lanes)
        self.device = jax.devices()[0]
        self.pinned = PinnedMemory(self.device, **self.staged) if has_pinned(self.device) else None
        self.bare: list[socket.socket] = []

    def prepare(self, way: str) -> None:
        """Into what memory the next message comes."""
        self.transport.pinned = self.pinned if way == "in chunks" else None

    def connect(self, peer: int, port: int) -> None:
        self.transport.connect({peer: ("127.0.0.1", port)}, DEADLINE)

    def move(self, num_bytes: int) -> Move:
        box = ((0, num_bytes // 4),)
        return Move(0, box, 0, box)

    def send(self, way: str, step: int, array: jax.Array, host: np.ndarray) -> None:
        if way.startswith("bare"):
            in_parts(self.used(way), host, lambda to, part: send_all(to, [part]))
            return
        moves, devices = [self.move(array.nbytes)], {self.device: 0}

        def data() -> Any:
            if way == "arrays":
                return taken(array, moves, devices)
            return copied_out(cut_out(array, moves, devices, **self.staged))

        ticket = self.transport.send(1, step, 0, array.nbytes, data)
        self.transport.wait(ticket, DEADLINE)

    def receive(self, way: str, step: int, memory: np.ndarray) -> jax.Array | None:
        if way.startswith("bare"):
            in_parts(self.used(way), memory, fill)
            return None
        mesh = Mesh(np.asarray([self.device]), ("x",))
        move = self.move(memory.size)
        landing = Landing(
            {0: Tile(move.shape, (0,))},
            move.shape,
            np.dtype("float32"),
            NamedSharding(mesh, PartitionSpec()),
            is_staged=way != "arrays",
            **self.staged,
        )
        arrival = self.transport.arriving(0, step, 0, DEADLINE)

        def until(stop: int) -> None:
            self.transport.wait_until(arrival, stop, 0, DEADLINE)

        landing.take_of(move, arrival, 0, until)
        until(arrival.size)
        self.transport.done(0, step, 0)
        return jax.block_until_ready(landing.array())

    def used(self, way: str) -> list[socket.socket]:
        return self.bare[:1] if way == "bare 1" else self.bare


def in_parts(connections: list[socket.socket], data: np.ndarray, do: Any) -> None:
    """Give every connection an equal part of the bytes."""
    parts = np.array_split(data, len(connections))
    others = [
        threading.Thread(target=do, args=pair)
        for pair in zip(connections[1:], parts[1:], strict=True)
    ]
    for thread in others:
        thread.start()
    do(connections[0], parts[0])
    for thread in others:
        thread.join()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    end = End(0, options.lanes, options.pieces)
    with socket.create_server(("127.0.0.1", 0)) as server:
        if options.buffers is not None:  # connections have what it has
            fit(server, options.buffers)
        arguments = ["--receive", str(server.getsockname()[1]), "--lanes", str(options.lanes)]
        if options.pieces is not None:
            arguments += ["--pieces", str(options.pieces)]
        child = subprocess.Popen([sys.executable, __file__, *arguments])
        try:
            server.settimeout(DEADLINE)
            control = lines(server.accept()[0])
            end.connect(1, int(control.readline()))
            end.bare = [server.accept()[0] for _ in range(options.lanes)]
            return [row(end, control, int(mb * MB), options.rounds) for mb in options.sizes]
        finally:
            child.kill()
            child.wait()
            end.transport.close()


def fit(connection: socket.socket, num_bytes: int) -> None:
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, buffer, num_bytes)


def row(end: End, control: Any, size: int, rounds: int) -> dict[str, Any]:
    host = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    array = jax.device_put(host.view(np.float32), end.device)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu_seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 2):  # the first ones are slower
        for way in WAYS:
            step = end.transport.sent_bytes
            print(json.dumps([way, step, size]), file=control, flush=True)
            assert control.readline() == "ready\n"
            start, cpu = time.perf_counter(), time.process_time()
            end.send(way, step, array, host)
            there = control.readline()
            if number >= 2:
                seconds[way].append(time.perf_counter() - start)
                cpu_seconds[way].append(time.process_time() - cpu + float(there))
    speeds = {way: size / statistics.median(taken) / 1e9 for way, taken in seconds.items()}
    used = "arrays" if jax.default_backend() == "cpu" else "in chunks"
    shares = [
        min(one, more) / ours
        for one, more, ours in zip(
            seconds["bare 1"], seconds["bare lanes"], seconds[used], strict=True
        )
    ]
    low, middle, high = np.percentile(shares, [25, 50, 75])
    best = {way: size / min(taken) / 1e9 for way, taken in seconds.items()}
    return {
        "bytes": size,
        "gb_per_second": speeds,
        "best_gb_per_second": best,
        "cpu_ms": {way: 1e3 * statistics.median(taken) for way, taken in cpu_seconds.items()},
        "share_of_best": best[used] / max(best["bare 1"], best["bare lanes"]),
        "share": float(middle),
        "share_quartiles": [float(low), float(high)],
    }


def lines(connection: socket.socket) -> Any:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection.makefile("rw")


def receive(options: argparse.Namespace) -> None:
    """Do what the other process asks for, until it is gone."""
    server = "127.0.0.1", int(options.receive)
    control = lines(socket.create_connection(server))
    end = End(1, options.lanes, options.pieces)
    print(end.transport.address[1], file=control, flush=True)
    end.bare = [socket.create_connection(server) for _ in range(options.lanes)]
    memory = np.zeros(0, np.uint8)
    for line in control:
        way, step, size = json.loads(line)
        memory = memory if memory.size == size else np.ones(size, np.uint8)
        end.prepare(way)
        print("ready", file=control, flush=True)
        cpu = time.process_time()
        array = end.receive(way, step, memory)
        print(time.process_time() - cpu, file=control, flush=True)
        if array is not None:
            assert math.isclose(array.size * 4, size)


def table(found: list[dict[str, Any]]) -> Table:
    made = Table("MB", *WAYS, "share (quartiles), of the best")
    for x in found:
        low, high = x["share_quartiles"]
        pairs = ((x["gb_per_second"][way], x["best_gb_per_second"][way]) for way in WAYS)
        speeds = (f"{usual:.3g} ({best:.3g})" for usual, best in pairs)
        share = f"{x['share']:.2f} ({low:.2f} to {high:.2f}), {x['share_of_best']:.2f}"
        made.add_row(f"{x['bytes'] / MB:g}", *speeds, share)
        made.add_row("CPU ms", *(f"{x['cpu_ms'][way]:.3g}" for way in WAYS), "")
    return made


if __name__ == "__main__":
    main()
