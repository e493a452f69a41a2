"""How long a device is busy in a step, and with what kernels, as JAX's profiler has it.

What a plan promises is this: between steps that the host does not wait for, nothing else passes.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

STEPS, PROFILED_STEPS = 10, 3
LARGEST = 20
"""Kernels of which a row tells."""

Step = Callable[[Any, Any], tuple[Any, Any]]


def steps_in_a_row(step: Step, state: Any, batch: Any) -> tuple[Any, float]:
    """The state after several steps, and seconds of one where only the last is waited for."""
    state, loss = step(state, batch)
    jax.block_until_ready((state, loss))
    start = time.perf_counter()
    for _ in range(STEPS):
        state, loss = step(state, batch)
    jax.block_until_ready((state, loss))
    return state, (time.perf_counter() - start) / STEPS


def profiled(step: Step, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The state after steps under the profiler, and what it saw; nothing where there is no GPU.

    `busy_seconds` of a step are those in which a kernel or a copy ran, `kernels` the longest, each
    with its name, how often it ran in a step, and its seconds of a step together.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED_STEPS):
                state, loss = step(state, batch)
            jax.block_until_ready((state, loss))
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        events = [event for file in files for event in _events(file)]
    if not events:
        return state, {}
    spans = sorted((start, start + length) for _, start, length in events)
    counts, seconds = defaultdict[str, int](int), defaultdict[str, float](float)
    for name, _, length in events:
        counts[name] += 1
        seconds[name] += length / 1e9 / PROFILED_STEPS
    longest = sorted(seconds, key=lambda name: (-seconds[name], name))[:LARGEST]
    return state, {
        "busy_seconds": covered(spans) / 1e9 / PROFILED_STEPS,
        "kernels": [[name, counts[name] / PROFILED_STEPS, seconds[name]] for name in longest],
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """What spans in the order of their beginnings cover together, where several overlap once.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, until = 0.0, float("-inf")
    for start, end in spans:
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


def _events(file: Path) -> Iterable[tuple[str, float, float]]:
    """Name, beginning and length in nanoseconds of all that ran on streams of GPUs."""
    for plane in ProfileData.from_file(str(file)).planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    yield from ((x.name, x.start_ns, x.duration_ns) for x in line.events)
