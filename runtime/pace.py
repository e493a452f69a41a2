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
from typing import Any

import jax
from jax.sharding import Mesh

from autopar.runtime.ahead import AroundCompiled, CalledByJit

CALLS = 8
"""After so many calls, of all steps together, one waits: 24 places are left for other programs."""

_calls = itertools.count(1)  # its next() is atomic


class Paced(AroundCompiled):
    """A compiled program that waits for its own results every few calls.

    Its results are a list, not an empty one.
    """

    def __call__(self, *args: Any) -> Any:
        results = self._compiled(*args)
        if next(_calls) % CALLS == 0:
            results[0].block_until_ready()
        return results


def paced(
    compiled: jax.stages.Compiled | CalledByJit, mesh: Mesh
) -> jax.stages.Compiled | AroundCompiled:
    """The program, paced if it runs on several virtual CPU devices."""
    device = mesh.devices.flat[0]
    return Paced(compiled) if device.platform == "cpu" and mesh.size > 1 else compiled
