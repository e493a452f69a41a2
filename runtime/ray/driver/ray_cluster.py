"""The Ray cluster: found or started, asked for CPUs, given back."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from autopar.base.errors import ClusterError


class NoRoom(ClusterError):
    """The cluster has too few CPUs or GPUs, or they do not become free."""


_users = 0
"""Pipelines that use the Ray which this module started, or connected this process to."""
_is_own = False
"""Whether this module started it, for this process alone."""
_counted: tuple[str, str] | None = None
"""The `session` that they use."""
_lock = threading.Lock()


def session() -> tuple[str, str] | None:
    """What tells Ray from one that this process has used before or will use; None: it uses none."""
    if not ray.is_initialized():
        return None
    try:
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_job_id()
    except Exception:  # another thread shuts it down
        return None


OWN_SECONDS = 10.0
"""How long CPUs of a cluster of our own are waited for: what was dropped gives them back."""


class Connection:
    """A use of a Ray cluster.

    It reserves a CPU, and so many GPUs, for each actor (unless told not to: then it only keeps the
    cluster in use), which `close` gives back. With the last use, a cluster that this module started
    ends, and this process leaves one that it connected to. Connecting may take as many seconds as
    the deadline.

    Raises:
      ClusterError: nothing answers at the address, or the cluster has too few CPUs or GPUs.
    """

    def __init__(
        self, address: str | None, gpus: Sequence[int], deadline: float, reserve: bool = True
    ) -> None:
        global _users, _is_own, _counted
        self._is_counted = False
        self._group: PlacementGroup | None = None
        with _lock:
            if ray.is_initialized():
                _check_same(address)
                self._is_counted = _users > 0 and session() == _counted
            else:
                _is_own = address is None and not os.environ.get("RAY_ADDRESS")
                if _is_own:
                    found = {} if any(gpus) else {"num_gpus": 0}  # Ray counts them itself
                    # A second step, or batches of a second size, take turns with the first.
                    start_local(max(os.cpu_count() or 1, 2 * len(gpus)), **found)
                else:
                    _connect(address, deadline)
                _users, self._is_counted, _counted = 0, True, session()
            _users += self._is_counted
            self._session = session()
        try:
            nodes = [node for node in ray.nodes() if node["Alive"]]
            self.is_local = all(n["NodeManagerAddress"] == LOOPBACK for n in nodes)
            if reserve:
                self._reserve(gpus, deadline)
        except BaseException:
            self.close()
            raise

    def _reserve(self, gpus: Sequence[int], deadline: float) -> None:
        count = len(gpus)
        total = ray.cluster_resources().get("CPU", 0)
        if total < count:
            raise NoRoom(
                f"The plan needs {count} actors with a CPU each, and the Ray cluster has "
                f"{total:g} CPUs.",
                why="every mesh of the plan is a process of its own, or one for each node.",
                hint="add nodes, start Ray with more num_cpus, or plan for fewer devices.",
            )
        total_gpus = ray.cluster_resources().get("GPU", 0)
        if total_gpus < sum(gpus):
            raise NoRoom(
                f"The plan needs {sum(gpus)} GPUs, and the Ray cluster has {total_gpus:g}.",
                why='Ray(devices="gpu") gives every device of the plan a GPU.',
                hint='add nodes with GPUs, plan for fewer devices, or use Ray(devices="cpu").',
            )
        self._gpus = tuple(gpus)
        bundles = [{"CPU": 1.0, **({"GPU": float(n)} if n else {})} for n in gpus]
        self._group = placement_group(bundles, strategy="PACK")
        if _is_own and self._is_counted:  # what takes its CPUs is of this process, and stays
            deadline = min(deadline, OWN_SECONDS)
        end = time.monotonic() + deadline
        while not self._group.wait(timeout_seconds=max(min(1.0, deadline), 0.1)):
            if time.monotonic() >= end:
                free = ray.available_resources().get("CPU", 0)
                what = f"{count} CPUs" + (f" and {sum(gpus)} GPUs" if any(gpus) else "")
                raise NoRoom(
                    f"{what} of the Ray cluster did not become free within {deadline:g} seconds.",
                    why=f"it has {total:g} CPUs, of which {free:g} are free.",
                    hint="wait for other work to end, shut down steps that are not used any more "
                    "(step.shutdown()), or add nodes.",
                )

    def actors(
        self, kind: type, arguments: Sequence[Any], names: Sequence[str], groups: dict[str, int]
    ) -> list[Any]:
        """An actor of this class for every argument, each on a CPU that was reserved."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert self._group is not None
        remote = ray.remote(concurrency_groups=groups)(kind)
        return [
            remote.options(
                name=name,
                num_cpus=1,
                num_gpus=self._gpus[number],
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=number
                ),
            ).remote(argument)
            for number, (argument, name) in enumerate(zip(arguments, names, strict=True))
        ]

    @property
    def is_there(self) -> bool:
        """Whether Ray was not shut down meanwhile, also if this process uses another one now."""
        return self._session is not None and self._session == session()

    def close(self) -> None:
        """Give back what was reserved."""
        global _users
        if not self.is_there:
            return
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        with _lock:
            if self._is_counted:
                self._is_counted = False
                _users -= 1
                if not _users:
                    ray.shutdown()


def start_local(num_cpus: int, **options: Any) -> None:
    """Start a cluster of this machine alone, on the loopback interface, as `ray.init` does.

    Raises:
      ClusterError: Ray does not start.
    """
    with loopback():
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                _system_config={"worker_niceness": 0},  # they are no background work
                **{"logging_level": "warning", **options},
            )
        except Exception as error:  # Ray has no class of its own for what goes wrong here
            raise ClusterError(
                "Ray cannot be started on this machine.",
                why=f"{type(error).__name__}: {error}",
                hint="look whether the machine is very busy or short of memory, and try again.",
            ) from error


def await_room(gpus: Sequence[int], seconds: float) -> None:
    """Wait until the cluster has a CPU, free or not, and these GPUs for each actor.

    One that has lost a node may get another; it is waited for no longer than so many seconds.
    """
    end = time.monotonic() + seconds
    while _room(ray.cluster_resources(), gpus) < len(gpus) and time.monotonic() < end:
        time.sleep(0.2)


SETTLED_SECONDS = 1.0
"""For so long what is free has not changed, where not all of the cluster is."""


def free_actors(gpus: Sequence[int], seconds: float) -> int:
    """How many of these actors the cluster could have now.

    What a lost node had is counted until Ray notices the loss, and what ended actors had until it
    is given back: as long as there seems to be room for all, or nothing is free, or what is free
    changes, it is asked again, for so many seconds.
    """
    end = time.monotonic() + seconds
    known, since = -1, time.monotonic()
    while True:
        found, total = (_room(f(), gpus) for f in (ray.available_resources, ray.cluster_resources))
        now = time.monotonic()
        known, since = found, since if found == known else now
        is_settled = found == total or (found and now - since >= SETTLED_SECONDS)
        if (found < len(gpus) and is_settled) or now >= end:
            return found
        time.sleep(0.2)


def _room(resources: Mapping[str, float], gpus: Sequence[int]) -> int:
    """For how many actors there is room, if each wants a CPU and the most GPUs of any."""
    found = int(resources.get("CPU", 0))
    most = max(gpus)
    return min(found, int(resources.get("GPU", 0)) // most) if most else found


@contextlib.contextmanager
def loopback() -> Iterator[None]:
    """Let a cluster that starts meanwhile be at 127.0.0.1, where no other machine reaches it.

    Ray (2.60) takes the machine's outward address in place of 127.0.0.1 wherever it is given
    (`ray.init(_node_ip_address=...)`, `ray start`), except where it believes that there are no
    clusters of several nodes, as on macOS. It takes other names of the loopback interface as they
    are (127.0.0.2, ::ffff:127.0.0.1), but then it listens at all interfaces.
    """
    outward: Any = ray.util.get_node_ip_address
    setattr(ray.util, "get_node_ip_address", lambda address=None: LOOPBACK)  # noqa: B010
    os.environ[_CLUSTERS] = "0"  # for the processes that it starts
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own about its future defaults
            yield
    finally:
        setattr(ray.util, "get_node_ip_address", outward)  # noqa: B010
        del os.environ[_CLUSTERS]


LOOPBACK = "127.0.0.1"
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def taken_as_it_is(address: str) -> str:
    """The same address, spelled so that Ray does not replace it by the machine's outward one.

    >>> taken_as_it_is("127.0.0.1:6379"), taken_as_it_is("10.0.0.1:6379")
    ('[::ffff:127.0.0.1]:6379', '10.0.0.1:6379')
    """
    host, _, port = address.rpartition(":")
    return f"[::ffff:{LOOPBACK}]:{port}" if host in (LOOPBACK, "localhost") else address


def _connect(address: str | None, deadline: float) -> None:
    address = address or os.environ["RAY_ADDRESS"]
    host, _, port = address.rpartition(":")
    if host:
        try:
            socket.create_connection((host, int(port)), timeout=min(deadline, 10.0)).close()
        except (OSError, ValueError, OverflowError) as error:
            raise _unreachable(address, str(error)) from error
    spelled = taken_as_it_is(address)
    _try(spelled, address, deadline)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=spelled, logging_level="warning")
    except Exception as error:
        raise _unreachable(address, f"{type(error).__name__}: {error}") from error


TRIAL = """
import sys, ray
ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
ray.shutdown()
"""


def _try(spelled: str, address: str, deadline: float) -> None:
    """Connect in a process that can be ended: `ray.init` may try for many minutes."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRIAL, spelled], capture_output=True, text=True, timeout=deadline
        )
    except subprocess.TimeoutExpired:
        raise _unreachable(
            address, f"what listens there did not answer as Ray does within {deadline:g} seconds."
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["Ray cannot connect."]
        raise _unreachable(address, lines[-1])


def _unreachable(address: str, why: str) -> ClusterError:
    return ClusterError(
        "No Ray cluster can be reached.",
        where=f"address={address!r}",
        why=why,
        hint="give the address of a running head node, or no address to start Ray on this machine.",
    )


def _check_same(address: str | None) -> None:
    """Ray knows one cluster for each process."""
    if address in (None, "auto"):
        return
    connected = ray.get_runtime_context().gcs_address
    if connected not in (address, taken_as_it_is(address)):
        raise ClusterError(
            f"This process is connected to another Ray cluster, at {connected}.",
            where=f"address={address!r}",
            why="a process uses one Ray cluster at a time.",
            hint="leave the address out, or call ray.shutdown() first.",
        )
