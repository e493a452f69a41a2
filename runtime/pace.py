"""Keeps a program on virtual CPU devices from running so far ahead that XLA deadlocks.

XLA's CPU client lets 32 programs be in flight on a device, and whoever enqueues one more waits for
a place. For a program on several devices that is a thread of the very pool that runs programs,
which has as many threads as there are devices. So when a loop calls a step without looking at its
results, all devices but one may wait in an all-reduce for the last, whose thread waits for a place
that only the end of this all-reduce would free; after a minute XLA ends the process. (Seen with
jaxlib 0.10.2 on two cores, also with `jax.jit` alone: 8 devices, 500 calls of a step of 30 ms.)

Accelerators have queues in order and no such pool: there nothing waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from autopar.runtime.ahead import AroundCompiled, CalledByJit

CALLS = 8
"""After so many calls, of all steps together, one waits: 24 places are left for other programs."""

_calls = itertools.count(1)  # its next() is atomic


class Paced(AroundCompiled):
    """A compiled program that waits for its own results every few calls.

    Its results are a list.
    """

    def __call__(self, *args: Any) -> Any:
        results = self._compiled(*args)
        _wait_in_turn(results)
        return results


def _wait_in_turn(results: Sequence[Any]) -> None:
    if next(_calls) % CALLS == 0 and results:
        results[0].block_until_ready()


def keep_pace(results: Sequence[Any], mesh: Mesh) -> None:
    """After a call of a program on a mesh: wait for its results if it is its turn to wait."""
    if _is_paced(mesh):
        _wait_in_turn(results)


def _is_paced(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu" and mesh.size > 1


def paced(
    compiled: jax.stages.Compiled | CalledByJit, mesh: Mesh
) -> jax.stages.Compiled | AroundCompiled:
    """The program, paced if it runs on several virtual CPU devices."""
    return Paced(compiled) if _is_paced(mesh) else compiled
