"""How long the transfers of a pipelined program take on the links between its meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.base.cluster import Cluster
from autopar.base.transfer_costs import MeshLinks
from autopar.passes.pipeline.emit import origins_of
from autopar.passes.pipeline.instructions import PipelineProgram, Send, ValueTransfer


def transfer_times(
    program: PipelineProgram,
    transfers: Sequence[ValueTransfer],
    sizes: Sequence[int],
    cluster: Cluster,
) -> Callable[[Send], float]:
    """Seconds from the end of a `Send` to its arrival.

    A value crosses once: where one of the two meshes holds it without replicas, that is what its
    devices hold together.

    Args:
      program: its meshes lie one after another on the cluster's devices.
      transfers: which values other stages receive.
      sizes: devices of every mesh.
      cluster: all devices.
    """
    values, sizes = program.value_of, list(sizes)
    received = {
        (origin, program.mesh_of(target)): values[target].bytes_per_device
        for target, origin in origins_of(transfers).items()
    }
    busy = [
        (program.mesh_of(origin), mesh)
        for origin, mesh in received
        if values[origin].per_microbatch and program.mesh_of(origin) != mesh
    ]
    links = MeshLinks(cluster, sizes, busy)
    known: dict[tuple[int, ...], float] = {}

    def crossing(number: int, source: int, target: int) -> int:
        held = values[number].bytes_per_device * sizes[source]
        there = received.get((number, target))
        return held if there is None else min(held, there * sizes[target])

    def seconds(send: Send) -> float:
        numbers = tuple(buffer.value for buffer in send.buffers)
        key = (send.to, *numbers)
        if key not in known:
            home = program.mesh_of(numbers[0])
            size = sum(crossing(number, home, send.to) for number in numbers)
            known[key] = links.seconds(home, send.to, size)
        return known[key]

    return seconds
