"""What a plan says of parameters that are cast in every microbatch."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.base.plan_records import StagePlan
from autopar.report.summaries import format_stages


def describe_casts(stages: Sequence[StagePlan]) -> str:
    """Which stages cast parameters in every microbatch; "" where none does."""
    found = [number for number, stage in enumerate(stages) if stage.casts != "once"]
    if not found:
        return ""
    where = f"stage{'s' * (len(found) > 1)} {format_stages(found)}"
    return f"in every microbatch on {where}, for want of memory to keep the narrow copies"
