"""Several processes that compute together: the actors of one mesh, joined by `jax.distributed`.

What they compute on CPUs goes over Gloo, on GPUs over NCCL. Neither they nor the coordinator ask
for the token of the pipeline, and Gloo listens at the address that the host's name stands for: a
cluster of several machines belongs into a network of its own.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys

import jax


def reserve_port(host: str) -> socket.socket:
    """A socket that keeps a port for the coordinator: others need SO_REUSEPORT, as gRPC sets it.

    It does not listen. Whoever has it closes it when the coordinator listens.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((host, 0))
    return reserved


def join(coordinator: str, process: int, num_processes: int, deadline: float) -> None:
    """Join the others, before JAX is used; waits for them, so many seconds at most.

    The coordinator is "host:port" where process 0 is to listen.

    Raises:
      RuntimeError: they do not come in time, or the port is in use.
    """
    for name, value in _CONFIG.items():
        if hasattr(jax.config, name):
            jax.config.update(name, value)
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process,
        cluster_detection_method="deactivate",
        initialization_timeout=max(int(deadline), 1),
        coordinator_bind_address=coordinator,
    )
    atexit.register(_leave)


def _leave() -> None:
    """End at once: JAX would wait for the others, which end in any order, and abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


_CONFIG = {
    "jax_cpu_collectives_implementation": "gloo",
    # A process that lives on when another has died says what it was doing; the driver ends it.
    # (None lives on without the first, which is the coordinator.)
    "jax_enable_recoverability": True,
    # It would hold back the signal that ends a process.
    "jax_enable_preemption_service": False,
}


def is_of_group(error: BaseException) -> bool:
    """Whether an error says that another process of the group is gone or does not answer."""
    # What is compiled ahead of time raises a ValueError in place of JAX's own.
    is_xla = isinstance(error, (jax.errors.JaxRuntimeError, ValueError))
    return is_xla and bool(_OF_GROUP.search(str(error)))


_OF_GROUP = re.compile(
    r"gloo|nccl|coordination service|connection (reset|closed|refused)", re.IGNORECASE
)
