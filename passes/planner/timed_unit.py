"""What a unit costs by a plan: first what it takes, and then what it needs, if that is asked for.

To count bytes takes as long as all else, and many plans of units are too slow for that to matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autopar.base.cluster import Cluster
from autopar.passes.pieces.stage_account import StageAccount
from autopar.passes.planner.planned_stage import PlannedStage
from autopar.passes.planner.stage_costs import NOTHING, UnitCost
from autopar.passes.schedules.flight import ONE_IN_FLIGHT
from autopar.passes.sharding.batch_dims import BatchDims
from autopar.passes.sharding.memory_rows import StageMemory
from autopar.passes.sharding.spmd_program import Block, Instruction, Loop, Relayout
from autopar.passes.slicing.stage_graphs import StageGraph


@dataclass(frozen=True)
class TimedUnit:
    """A plan taken apart, and what it takes: the cost of a unit that needs no memory.

    `dims` are the dimensions of its values that hold the batch.
    """

    account: StageAccount
    cost: UnitCost
    dims: BatchDims

    @classmethod
    def of(cls, stage: StageGraph, planned: PlannedStage, part: Cluster) -> TimedUnit:
        """What a unit takes.

        Args:
          stage: its graph.
          planned: the plan.
          part: the devices of its mesh.
        """
        program, prices = planned.program, planned.costs(part)
        block, scan = program.block, None if stage.loop is None else stage.loop.scan
        loops = [x for x in block.instructions if isinstance(x, Loop) and x.eqn is scan]
        others = (x for x in block.instructions if not any(x is loop for loop in loops))
        outside = tuple(x for x in others if not _arrives(x, block))
        account = StageAccount.of(stage, program, StageMemory(ONE_IN_FLIGHT))
        inside, dims = account.loop_seconds(prices), planned.split.dims
        forward = sum(prices.seconds(x.block) for x in account.loop if x.kind == "F")
        rowless = sum(prices.rowless_seconds(piece.block, dims) for piece in account.loop)
        cost = NOTHING._replace(
            seconds=inside,
            forward_seconds=min(forward, inside),
            rowless_seconds=min(rowless, inside),
            once_seconds=prices.seconds(Block(block.inputs, outside, block.outputs)),
        )
        return cls(account, cost, dims)

    @cached_property
    def with_bytes(self) -> UnitCost:
        """The cost with what the unit needs."""
        fixed = sum(self.account.throughout.values())
        kept = sum(self.account.between_tasks.values())
        working = max(self.account.peak({}).bytes - fixed - kept, 0)
        return self.cost._replace(
            bytes_fixed=fixed,
            bytes_per_microbatch=kept,
            bytes_working=working,
            bytes_rowless=min(max(self.account.rowless_bytes(self.dims) - fixed, 0), working),
            bytes_waiting=self.account.waiting_bytes(),
        )


def _arrives(instruction: Instruction, block: Block) -> bool:
    """Whether it cuts what comes from other units: that arrives as it is cut (`opened`)."""
    if not isinstance(instruction, Relayout) or instruction.purpose != "activation":
        return False
    is_cut = all(step.kind == "slice" for step in instruction.steps)
    return is_cut and instruction.source in block.inputs
