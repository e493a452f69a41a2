"""What a plan keeps of its pieces, so that a saved plan can be scheduled and simulated again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.base.cluster import Cluster
from autopar.base.step_model import ModelPiece, ModelValue, StepModel
from autopar.passes.graph.graph import batch_sizes
from autopar.passes.pieces.piece_costs import inner_bytes
from autopar.passes.pieces.pieces import Pieces
from autopar.passes.pipeline.parts import PipelineParts
from autopar.passes.planner.planned_stage import PlannedStage
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.reshard import COLLECTIVES, HOST_COPIES
from autopar.passes.sharding.spmd_program import Block, Branch, Compute, Loop, Relayout


class _Moving(NamedTuple):
    """Seconds of a block's collectives: starting them, activations' bytes, other bytes.

    And those of copies between a device and its host.
    """

    latency: float = 0.0
    activation: float = 0.0
    other: float = 0.0
    host: float = 0.0

    def plus(self, more: _Moving, times: int = 1) -> _Moving:
        return _Moving(*(a + times * b for a, b in zip(self, more, strict=True)))


def step_model(
    split: SplitStep,
    pieces: Pieces,
    parts: PipelineParts,
    planned: Sequence[PlannedStage],
    cluster: Cluster,
) -> StepModel:
    """The values and pieces of a pipelined step, with what the cost model expects of them.

    Args:
      split: the microbatched program.
      pieces: its stages taken apart.
      parts: what they read and write.
      planned: the intra-operator plan of each stage.
      cluster: all devices.
    """
    found = []
    inside = inner_bytes(pieces, [p.peak.bytes for p in planned])
    for piece in pieces.pieces:
        costs = planned[piece.stage].costs(cluster)
        total = planned[piece.stage].seconds(piece, costs)
        moving = _moving(piece.block, costs.pricing)
        if sum(moving) > total:  # parts of a piece are no more than all of it
            moving = _Moving(*(part * total / sum(moving) for part in moving))
        plain = piece.plain()
        found.append(
            ModelPiece(
                name=piece.name,
                stage=piece.stage,
                when=piece.kind,
                reads=plain.reads,
                writes=plain.writes,
                donates=plain.donates,
                compute_seconds=max(total - sum(moving), 0.0),
                latency_seconds=moving.latency,
                activation_seconds=moving.activation,
                other_seconds=moving.other,
                temporary_bytes=inside[piece.name],
                host_seconds=moving.host,
            )
        )
    return StepModel(
        values=tuple(
            ModelValue(v.stage, v.bytes_per_device, v.per_microbatch, v.label)
            for v in pieces.values
        ),
        pieces=tuple(found),
        transfers=tuple((transfer.source, transfer.target) for transfer in pieces.transfers),
        inputs=parts.inputs,
        outputs=parts.outputs,
        donated=parts.donated,
        batch_rows=tuple(sorted(batch_sizes(split.graph))),
    )


def _moving(block: Block, pricing: Pricing) -> _Moving:
    total = _Moving()
    for instruction in block.instructions:
        if isinstance(instruction, Relayout):
            total = total.plus(_resharding(instruction, pricing))
        elif isinstance(instruction, Compute):
            exchanged = pricing.exchange(instruction.eqn, *instruction.layouts)
            total = total.plus(_Moving(*exchanged))
        elif isinstance(instruction, Loop):
            length: int = instruction.eqn.params["length"]
            total = total.plus(_moving(instruction.body, pricing), length)
        elif isinstance(instruction, Branch):
            branches = [_moving(inner, pricing) for inner in instruction.blocks]
            total = total.plus(max(branches, key=sum))
    return total


def _resharding(instruction: Relayout, pricing: Pricing) -> _Moving:
    latency = moved = host = 0.0
    for step, _, size in instruction.moves():
        if step.kind not in (*COLLECTIVES, *HOST_COPIES):  # a device's own work
            continue
        alpha, beta = pricing.step(step)
        latency += alpha
        if step.kind in HOST_COPIES:
            host += beta * size
        else:
            moved += beta * size
    if instruction.purpose == "activation":
        return _Moving(latency, activation=moved, host=host)
    return _Moving(latency, other=moved, host=host)
