"""What a plan says of stages and loops that cast, compute or keep otherwise, for their memory."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.base.plan_records import PlanRecord, Recomputation, StagePlan
from autopar.report.summaries import format_stages

_LATER_LOOPS = {
    "keep": "keep what they need of earlier ones",
    "reuse": "reuse what earlier ones compute for themselves",
    "recompute": "compute again what they need of earlier ones",
}


def describe_casts(stages: Sequence[StagePlan]) -> str:
    """Which stages cast parameters in every microbatch; "" where none does."""
    found = [number for number, stage in enumerate(stages) if stage.casts != "once"]
    if not found:
        return ""
    return f"in every microbatch on {_named(found)}, for want of memory to keep the narrow copies"


def describe_recomputed(plan: PlanRecord) -> str:
    """What backward passes compute again; "" where that is only what the step says."""
    if plan.recomputation is not None:
        return str(plan.recomputation)
    full = [number for number, stage in enumerate(plan.stages) if stage.remat != "none"]
    found = [f"all of {_named(full)}"] if full else []
    alike: dict[Recomputation, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        if stage.recomputation is not None:
            alike.setdefault(stage.recomputation, []).append(number)
    found += [f"{_named(n)}: {again.described('the stage')}" for again, n in alike.items()]
    return "; ".join(found)


def describe_later_loops(plan: PlanRecord) -> str:
    """What the later of several loops over the microbatches do; "" where there is one at most."""
    told = _LATER_LOOPS.get(plan.later_loops, plan.later_loops)
    return f"later ones {told}" if told else ""


def _named(numbers: Sequence[int]) -> str:
    return f"stage{'s' * (len(numbers) > 1)} {format_stages(numbers)}"
