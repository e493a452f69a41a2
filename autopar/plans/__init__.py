"""`Plan`, what `autopar.plan` returns, and the plain records of which it consists."""

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
from autopar.base.records import Differences

from .plan import Plan

__all__ = [
    "Candidate", "Collective", "Differences", "Estimates", "NodeStrategy", "OutputCertificate",
    "PipelinePlan", "Plan", "SolverSummary", "StagePlan", "StageTransfer", "TensorPlan", "check",
]  # fmt: skip
