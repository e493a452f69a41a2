"""A Ray of the tests' own: on the loopback interface, with few CPUs, and gone afterwards."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO

import jax
import pytest
import ray

from autopar.runtime.ray.driver.ray_cluster import start_local


@contextlib.contextmanager
def cluster(num_cpus: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Actors compile as this process does (`conftest.py`): they inherit it from Ray.
        optimizes = jax.config.values["jax_disable_most_optimizations"]
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(optimizes))
        start_local(num_cpus, num_gpus=0, logging_level="error", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def said(stream: IO[str], mark: str) -> str:
    """The rest of the first line that begins with a mark; Ray may say something before."""
    for line in stream:
        if line.startswith(mark):
            return line.removeprefix(mark).strip()
    raise AssertionError(f"it ended before it said {mark!r}")


def is_running(pid: int) -> bool:
    """Whether a process is there and not only its exit code."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: Sequence[int], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while any(map(is_running, pids)):
        assert time.monotonic() < end, f"still running: {[p for p in pids if is_running(p)]}"
        threading.Event().wait(0.05)
