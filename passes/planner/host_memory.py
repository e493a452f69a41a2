"""What of a planned step lies in the memory of the hosts, and what it takes to move it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from autopar.base.cluster import Cluster
from autopar.base.plan_records import InHostMemory
from autopar.passes.pipeline.validate import LOOP_KINDS
from autopar.passes.planner.candidates import PlannedStep
from autopar.passes.sharding.reshard import HOST_COPIES, ReshardStep
from autopar.passes.sharding.spmd_program import Block, Branch, Loop, Relayout, waiting_values


def in_host_memory(step: PlannedStep, cluster: Cluster) -> InHostMemory | None:
    """What of a step's state lies in the memory of the hosts between steps; None: nothing."""
    pieces, homes = step.pieces, step.schedule.mesh_of_stage
    there = [
        any(pieces.versions[value].layout.in_host for value in group) for group in pieces.inputs
    ]
    values = sum(len(waiting_values(piece.block)) for piece in pieces.pieces)
    if not any(there) and not values:
        return None
    moved, seconds = defaultdict[int, int](int), defaultdict[int, float](float)
    for piece in pieces.pieces:
        pricing = step.planned[piece.stage].costs(cluster).pricing
        times = step.schedule.num_microbatches if piece.kind in LOOP_KINDS else 1
        for copy, size, each in _copies(piece.block):
            alpha, beta = pricing.step(copy)
            moved[homes[piece.stage]] += times * each * size
            seconds[homes[piece.stage]] += times * each * (alpha + beta * size)
    return InHostMemory(
        arrays=sum(there),
        bytes_per_node=step.host_bytes * cluster.devices_per_node,
        moved_bytes=max(moved.values(), default=0),
        seconds=max(seconds.values(), default=0.0),
        values=values,
    )


def _copies(block: Block, times: int = 1) -> Iterator[tuple[ReshardStep, int, int]]:
    """The copies to and from the hosts, each with its bytes and how often it runs."""
    for instruction in block.instructions:
        if isinstance(instruction, Relayout):
            for step, _, size in instruction.moves():
                if step.kind in HOST_COPIES:
                    yield step, size, times
        elif isinstance(instruction, Loop):
            yield from _copies(instruction.body, times * instruction.eqn.params["length"])
        elif isinstance(instruction, Branch):
            for inner in instruction.blocks:
                yield from _copies(inner, times)
