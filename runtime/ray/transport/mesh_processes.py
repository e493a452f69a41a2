"""Which processes a mesh has: one, or one for each node whose devices it takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from autopar.passes.schedules.schedule import Schedule
from autopar.passes.sharding.spmd_program import SpmdProgram


def num_processes(
    schedule: Schedule, programs: Sequence[SpmdProgram], devices_per_node: int
) -> tuple[int, ...]:
    """How many processes every mesh has.

    A mesh that does not consist of whole nodes, or whose stages have meshes of different sizes, has
    one process.

    Args:
      schedule: says which stages each mesh has.
      programs: of all stages.
      devices_per_node: of the cluster.
    """
    counts = []
    for mesh in range(schedule.num_meshes):
        sizes = {
            math.prod(programs[stage].mesh)
            for stage, home in enumerate(schedule.mesh_of_stage)
            if home == mesh
        }
        size = max(sizes)
        is_even = len(sizes) == 1 and size % devices_per_node == 0
        counts.append(size // devices_per_node if is_even else 1)
    return tuple(counts)


def actors_of_meshes(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For every mesh, the actors that are its processes.

    >>> actors_of_meshes([1, 2])
    ((0,), (1, 2))
    """
    ends = itertools.accumulate(counts)
    return tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True))


def devices_of_process(num_devices: int, process: int, num_processes: int) -> range:
    """The numbers of a process's devices in its mesh."""
    size = num_devices // num_processes
    return range(process * size, (process + 1) * size)
