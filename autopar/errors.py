"""Every error and warning of autopar, which users catch by name; `autopar.base.errors` has them."""

from autopar.base.errors import (
    AutoparError,
    AutoparWarning,
    BatchArgumentError,
    CheckpointError,
    ClusterError,
    ConstraintWarning,
    DamagedCheckpointError,
    DeviceError,
    DonatedBufferError,
    DonationWarning,
    InexactMicrobatchError,
    KernelWarning,
    LostActorError,
    MemoryLimitError,
    MissingClusterError,
    MissingPlanError,
    OptionError,
    PinError,
    PlanMismatchError,
    ScheduleError,
    StageError,
    TraceError,
    UnknownPrimitiveWarning,
)

__all__ = [
    "AutoparError", "AutoparWarning", "BatchArgumentError", "CheckpointError", "ClusterError",
    "ConstraintWarning", "DamagedCheckpointError", "DeviceError", "DonatedBufferError",
    "DonationWarning",
    "InexactMicrobatchError", "KernelWarning", "LostActorError", "MemoryLimitError",
    "MissingClusterError", "MissingPlanError",
    "OptionError", "PinError", "PlanMismatchError", "ScheduleError", "StageError", "TraceError",
    "UnknownPrimitiveWarning",
]  # fmt: skip
