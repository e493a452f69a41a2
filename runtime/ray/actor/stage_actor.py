"""The Ray actor of a mesh, or of a part of one: thin, what it does is in `process_step.py`.

Steps run one after the other, in the order in which the driver asked for them. What must not wait
for a step (reading results, asking where the actor is, calling a step off) has threads of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jaxlib.version
import ray
from jax.extend.core import jaxpr_as_fun

from autopar.base.version import __version__
from autopar.runtime.checkpoint_files import LostItem, write_item
from autopar.runtime.ray.actor.messages import Failure, Spot, failure_of, unpacked
from autopar.runtime.ray.actor.process_step import ProcessStep
from autopar.runtime.ray.actor.writer import Writer, WriterProcess
from autopar.runtime.ray.transport import pickling
from autopar.runtime.ray.transport.group import join, reserve_port
from autopar.runtime.ray.transport.offers import Transfers
from autopar.runtime.ray.transport.sockets import Sockets, TransportError
from autopar.runtime.same_plan import compare


@dataclass(frozen=True)
class World:
    """What an actor must know before it uses JAX.

    Args:
      label: the actor's name in logs.
      place: the number of the process in its mesh, and how many processes that has.
      num_devices: how many it has; on CPUs they are virtual.
      platform: "cpu" or "cuda".
      token: of the transport.
      transport: "sockets" or "transfer".
      is_local: whether the cluster is this machine alone.
    """

    label: str
    actor: int
    place: tuple[int, int]
    num_devices: int
    platform: str
    jax_config: Mapping[str, Any]
    environment: Mapping[str, str]
    token: bytes
    transport: str
    is_local: bool


class Hello(NamedTuple):
    """What a started actor says.

    It listens for messages at its address, and can do so for the other processes of its mesh, if it
    has any, at that of the coordinator.
    """

    address: tuple[str, int]
    coordinator: str | None
    pid: int
    versions: tuple[tuple[str, str], ...]


def versions() -> tuple[tuple[str, str], ...]:
    """What must be the same in all processes."""
    return (
        ("Python", ".".join(map(str, sys.version_info[:2]))),
        ("jax", jax.__version__),
        ("jaxlib", jaxlib.version.__version__),
        ("autopar", __version__),
    )


class StageActor:
    """A process of one mesh."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._step: Any = None
        self._transfers: Transfers | None = None
        self._broken_from: int | None = None

    def __repr__(self) -> str:  # Ray puts it before every line that the actor prints
        return self._world.label

    def start(self) -> Hello:
        """Prepare JAX and listen."""
        world = self._world
        os.environ.update(world.environment)
        jax.config.update("jax_platforms", world.platform)
        if world.platform == "cpu":
            keep_freed_memory()
            jax.config.update("jax_num_cpu_devices", world.num_devices)
        for name, value in world.jax_config.items():
            jax.config.update(name, value)
        host = "127.0.0.1" if world.is_local else ray.util.get_node_ip_address()
        self._writer = Writer(WriterProcess() if world.place[1] > 1 else write_item)
        self._transport = Sockets(world.actor, host, world.token)
        coordinator = None
        if world.place[1] > 1:
            self._reserved = reserve_port(host)
            coordinator = f"{host}:{self._reserved.getsockname()[1]}"
        return Hello(self._transport.address, coordinator, os.getpid(), versions())

    def load(
        self,
        data: bytes,
        addresses: Mapping[int, tuple[str, int]],
        coordinator: str | None,
        deadline: float,
    ) -> Failure | float:
        """Connect to the others and compile; the seconds that it took.

        The data are the actor's part of the plan, and constants. The processes of its mesh meet at
        the coordinator; None: it is the only one. Connecting, and any wait in a step, may take as
        many seconds as the deadline.
        """
        start = time.perf_counter()
        try:
            if coordinator is not None:
                join(coordinator, *self._world.place, deadline)
                self._reserved.close()
            plan, constants = pickling.loads(data)
            if coordinator is not None:
                own, count = self._world.place
                facts = {"program": plan.content_hash, **dict(versions())}
                compare(f"mesh {plan.mesh}", facts, range(count), own, deadline)
            peers = {peer: addresses[peer] for peer in plan.peers}
            self._transport.connect(peers, deadline)
            if self._world.transport == "transfer":
                self._transfers = Transfers(self._transport.address[0])
            self._step = ProcessStep(plan, constants, self._transport, deadline, self._transfers)
            give_back()
        except Exception as error:
            return failure_of(error, self._spot("compiling"))
        return time.perf_counter() - start

    def step(self, message: Any) -> Failure | None:
        """Run a step. After one that failed, none runs before `reset`."""
        message = unpacked(message)
        if self._broken_from is not None:
            self._step.skip(message)
            return Failure("aborted", self._step.spot(), message.step)
        failure: Failure | None = self._step.run(message)
        if failure is not None:
            self._broken_from = message.step
        return failure

    def reset(self, step: int, lost: tuple[int, int]) -> None:
        """Go on after a failure: steps begin again at `step`, keys between `lost` are gone."""
        self._transport.reset(step)
        if self._transfers is not None:
            self._transfers.renew()
        self._step.arrays.store.lose(*lost)
        self._broken_from = None

    def on_arrays(self, method: str, *arguments: Any) -> Any:
        """What a method of `ActorArrays` gives."""
        return getattr(self._step.arrays, method)(*arguments)

    def save(self, folder: str, items: Sequence[tuple[str, int, Any]]) -> None:
        """Begin to write arrays, as (name, key, box), as they are after the steps so far."""

        def copies() -> dict[str, Any]:
            arrays = self._step.arrays.copies([(key, box) for _, key, box in items])
            if arrays is None:
                raise LostItem
            return dict(zip([name for name, *_ in items], arrays, strict=True))

        self._writer.begin(folder, copies)

    def reach(self, addresses: Mapping[int, tuple[str, int]], deadline: float) -> Failure | None:
        """Connect to actors to which no array goes."""
        try:
            self._transport.connect(addresses, deadline)
        except TransportError as error:
            return Failure("error", self._spot("connecting"), 0, error.detail)
        return None

    def times(self) -> Any:
        """What was noted of the last step."""
        return self._step.times

    def make(self, function: bytes, wanted: Sequence[Any]) -> Failure | None:
        """See `ActorArrays.make`."""
        try:
            closed, arguments = pickling.loads(function)
            # In a thread of its own: where jax.random is traced, JAX (0.10.2) no longer looks for
            # NaNs in what compiled programs give, whatever jax_debug_nans says.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(
                    self._step.arrays.make, jaxpr_as_fun(closed), arguments, wanted
                ).result()
        except Exception as error:
            return failure_of(error, self._spot("initialize"))
        return None

    def _spot(self, doing: str) -> Spot:
        return Spot(self._world.actor, self._world.label, None, doing)

    @ray.method(concurrency_group="aside")
    def saved(self, folder: str) -> None:
        """See `Writer.wait`."""
        self._writer.wait(folder)

    @ray.method(concurrency_group="control")
    def where(self) -> tuple[Spot | None, float]:
        """What it is doing, and for how many seconds."""
        step = self._step
        return (None, 0.0) if step is None else (step.spot(), time.monotonic() - step.since)

    @ray.method(concurrency_group="control")
    def clock(self) -> float:
        """The seconds that times are given in."""
        return time.perf_counter()

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        """Call off the running step."""
        self._transport.abort()

    @ray.method(concurrency_group="control")
    def describe(self, what: str) -> Any:
        """What was compiled: "text", "memory" or "cost" of every piece, or "sent" bytes so far."""
        if what == "sent":
            return self._transport.sent_bytes
        found = {}
        for (name, _), compiled in self._step.variants.items():
            if what == "text":
                found[name] = compiled.as_text()
            elif what == "cost":
                found[name] = compiled.cost_analysis()
            else:
                analysis = compiled.memory_analysis()
                found[name] = {
                    name: getattr(analysis, name)
                    for name in dir(analysis)
                    if name.endswith("_in_bytes")
                }
        return found


GROUPS = {"aside": 4, "control": 1}
"""Concurrency groups and their threads."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
_KEPT = (1 << 31) - 1
_MMAP_THRESHOLDS = _KEPT, 32 << 20  # glibc before 2.35 refuses more than 32 MiB


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next allocation, rather than give it back.

    What one piece leaves to the next (activations, gradients) is of the same size in every
    microbatch. Given back, it is mapped and cleared anew each time: of a GPT of 12 layers, some
    80,000 page faults in a step, which took a tenth of its CPU time. An arena keeps up to 2 GiB at
    its end; outside the main thread, blocks of more than 64 MiB are given back all the same. Other
    C libraries do as they like, and so does glibc where it is configured (`MALLOC_*`,
    `GLIBC_TUNABLES`).
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        # The second alone would keep the first from growing by itself.
        if any(mallopt(_MMAP_THRESHOLD, bytes_) for bytes_ in _MMAP_THRESHOLDS):
            mallopt(_TRIM_THRESHOLD, _KEPT)


def give_back() -> None:
    """Return what is free now, such as what compiling took."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
