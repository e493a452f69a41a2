"""autopar: automatic parallelization for JAX.

An ordinary train step, written for one device, is traced, split exactly into microbatches, sharded
by an integer linear program and run on every device of a cluster:

    import autopar

    @autopar.parallelize
    def train_step(state, batch): ...

`parallelize` decorates a step, `compile` prepares one ahead of time, `plan` decides without any
device, `scaling` compares clusters, `verify` asks the compiler of devices that are not there,
`verify_numerics` compares a plan's numbers with the plain function's, and `Checkpoints` keeps
states in files. `tracing_for` traces what only the devices of a cluster can run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import lazy as _lazy

if TYPE_CHECKING:
    from . import errors
    from .absent_devices import tracing_for
    from .api import compile, parallelize, plan
    from .base.cluster import Cluster
    from .base.errors import AutoparError
    from .base.ray_options import Ray
    from .base.stage_request import Stage
    from .base.version import __version__
    from .checkpoints import Checkpoints
    from .executable import Executable
    from .followers import follow
    from .interruption import interruptible
    from .local_checks import check_rule
    from .local_functions import local
    from .plans.plan import Plan
    from .scaling_study import scaling
    from .step_numerics import verify_numerics
    from .step_verification import verify
else:
    __getattr__, __dir__ = _lazy.exports(
        __name__,
        {
            "AutoparError": ".base.errors",
            "Checkpoints": ".checkpoints",
            "Cluster": ".base.cluster",
            "Executable": ".executable",
            "Plan": ".plans.plan",
            "Ray": ".base.ray_options",
            "Stage": ".base.stage_request",
            "__version__": ".base.version",
            "compile": ".api",
            "check_rule": ".local_checks",
            "errors": ".errors",
            "follow": ".followers",
            "interruptible": ".interruption",
            "local": ".local_functions",
            "parallelize": ".api",
            "plan": ".api",
            "scaling": ".scaling_study",
            "tracing_for": ".absent_devices",
            "verify": ".step_verification",
            "verify_numerics": ".step_numerics",
        },
    )

__all__ = [
    "AutoparError", "Checkpoints", "Cluster", "Executable", "Plan", "Ray", "Stage", "__version__",
    "check_rule", "compile", "errors", "follow", "interruptible",
    "local", "parallelize", "plan", "scaling", "tracing_for",
    "verify", "verify_numerics",
]  # fmt: skip
