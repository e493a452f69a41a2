"""`Ray`: how a plan runs under Ray, plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.base.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Ray:
    """Run a plan in several processes: a Ray actor for each node of each of its meshes.

    The plan's `Cluster` says how many devices a node has. The actors of one mesh compute together,
    over Gloo on CPUs and NCCL on GPUs.

    Args:
      devices: "cpu": virtual CPU devices, and a CPU of the Ray cluster for each actor; "gpu": an
        NVIDIA GPU of it for each device as well.
      address: of a running Ray cluster ("auto": the one that Ray finds on this machine,
        "host:port" of its head node). None: the one that this process is connected to or that the
        environment variable RAY_ADDRESS names, else one is started on this machine, which listens
        on the loopback interface and ends with the last step that uses it. Where a cluster asks for
        a token, Ray's own settings (RAY_AUTH_MODE and others) say which.
      deadline: seconds that a single wait may take, for a message of another stage or for the end
        of one instruction, before the step is given up with an error. CPUs of the cluster must
        become free as quickly; an actor that starts or compiles must answer as quickly, but has
        two minutes at the least.
      max_restarts: how often all actors may be started again after one was lost: its process died,
        its host is gone, or it does not answer within the deadline. The new actors get the last
        snapshot and run the steps since then again (what these print is printed again); the arrays
        that the program holds go on as if nothing had happened, bit for bit. An error that the step
        itself raises is no loss. With 0, a loss is an error and the state is gone; nothing is
        copied or written down then.
      snapshot_every: after so many steps, the arrays that are alive are copied from the actors to
        the driver's memory while later steps run. The driver needs memory for two copies of the
        state, and for the batches of as many steps. It counts where `max_restarts` is not 0.
      on_loss: what to do when a lost actor cannot be started again because the cluster no longer
        has the CPUs, and gets no others within the deadline: "error", or "replan": plan the step
        again for the actors that it can have and their share of the devices, and go on there, with
        numbers that are equal to floating-point tolerance. The options are the same, but that a
        number of stages becomes smaller where it must. It needs `max_restarts` of at least 1.
      transport: how arrays go from mesh to mesh. "sockets": over TCP, in chunks; between GPUs by
        way of the hosts' memory. "transfer": by `jax.experimental.transfer`, from device to device
        where JAX can. A transfer that a peer holds up cannot be called off, only its process ended,
        which `max_restarts` takes care of; and its port has no password, so it belongs into a
        network of its own.

    Raises:
      OptionError: a value is not possible.

    >>> Ray(deadline=60).deadline
    60.0
    """

    address: str | None = None
    devices: str = "cpu"
    deadline: float = 300.0
    max_restarts: int = 0
    snapshot_every: int = 100
    on_loss: str = "error"
    transport: str = "sockets"

    def __post_init__(self) -> None:
        address, deadline = self.address, self.deadline
        is_address = address is None or (isinstance(address, str) and bool(address))
        self._check("address", is_address, 'it must be None, "auto" or "host:port".')
        if isinstance(address, str) and "://" in address:
            raise OptionError(
                f"Ray(address={address!r}) is not possible.",
                why="the driver exchanges arrays with the actors, so it must be on a node of the "
                "cluster; Ray's client connections are not supported.",
                hint='use "host:port" of the head node, on a machine of the cluster.',
            )
        is_number = isinstance(deadline, int | float) and not isinstance(deadline, bool)
        is_possible = is_number and 0 < deadline < math.inf
        self._check("deadline", is_possible, "it must be a positive number of seconds.")
        object.__setattr__(self, "deadline", float(deadline))
        self._check("devices", self.devices in ("cpu", "gpu"), 'it must be "cpu" or "gpu".')
        for name, least in (("max_restarts", 0), ("snapshot_every", 1)):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
            self._check(name, is_count, f"it must be an integer of at least {least}.")
        is_transport = self.transport in ("sockets", "transfer")
        self._check("transport", is_transport, 'it must be "sockets" or "transfer".')
        is_choice = self.on_loss in ("error", "replan")
        self._check("on_loss", is_choice, 'it must be "error" or "replan".')
        why = "max_restarts says how often a step may go on after a loss, and it is 0."
        self._check("on_loss", self.on_loss == "error" or self.max_restarts > 0, why)

    def _check(self, name: str, is_possible: bool, why: str) -> None:
        if not is_possible:
            raise OptionError(f"Ray({name}={getattr(self, name)!r}) is not possible.", why=why)
