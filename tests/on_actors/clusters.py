"""A Ray of the tests' own: on the loopback interface, with few CPUs, and gone afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import IO

import ray

from autopar.runtime.ray.driver.ray_cluster import start_local


class SharedCluster:
    """One for all files that want no other: to start and end it takes as long as ten small tests.

    It has CPUs for two steps of four actors: one of a whole file, and one of a test.
    """

    NUM_CPUS = 8

    def start(self) -> None:
        """Start it, unless it is there."""
        if not ray.is_initialized():
            start_local(self.NUM_CPUS, num_gpus=0, logging_level="error", log_to_driver=False)

    def end(self) -> None:
        """End it, for tests of other clusters."""
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
