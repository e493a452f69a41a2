"""`Plan`, what `autopar.plan` returns, and the plain records of which it consists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.base import lazy as _lazy

if TYPE_CHECKING:
    from autopar.base.plan_records import (
        Candidate,
        Collective,
        Estimates,
        NodeStrategy,
        OutputCertificate,
        PipelinePlan,
        SolverSummary,
        StagePlan,
        StageTransfer,
        TensorPlan,
        check,
    )

    from .plan import Differences, Plan
else:
    _RECORDS = (
        "Candidate Collective Estimates NodeStrategy OutputCertificate PipelinePlan SolverSummary "
        "StagePlan StageTransfer TensorPlan check"
    )
    __getattr__, __dir__ = _lazy.exports(
        __name__,
        dict.fromkeys(_RECORDS.split(), "autopar.base.plan_records")
        | {"Differences": ".plan", "Plan": ".plan"},
    )

__all__ = [
    "Candidate",
    "Collective",
    "Differences",
    "Estimates",
    "NodeStrategy",
    "OutputCertificate",
    "PipelinePlan",
    "Plan",
    "SolverSummary",
    "StagePlan",
    "StageTransfer",
    "TensorPlan",
    "check",
]
