"""The flags that a run of a plan wants of XLA and JAX, each with its reason and its source.

They follow from the plan. What XLA takes with a program is set when the program is compiled; what
the environment must have before JAX starts is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.base.plan_records import PlanRecord
from autopar.base.records import Record
from autopar.base.units import format_bytes

LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
JAX_FRACTION = 0.75
"""The share of a GPU's memory that JAX takes by itself."""

_TIPS = "JAX, GPU performance tips, https://docs.jax.dev/en/latest/gpu_performance_tips.html"
_MEMORY = "JAX, GPU memory allocation, https://docs.jax.dev/en/latest/gpu_memory_allocation.html"


@dataclasses.dataclass(frozen=True)
class RunFlag(Record):
    """A flag of XLA, or a variable of the environment.

    Args:
      name: of it.
      value: that the plan counts on.
      is_set: autopar sets it when it compiles; else the environment must have it before JAX starts.
      why: the plan wants it.
      source: where its meaning is from.
    """

    name: str
    value: str
    is_set: bool
    why: str
    source: str


def run_flags(plan: PlanRecord) -> tuple[RunFlag, ...]:
    """Those of a plan; none for CPUs and TPUs, whose compiler hides collectives by itself.

    A step's collectives are its own, not the partitioner's, so that XLA's collective matmul
    (`xla_gpu_threshold_for_windowed_einsum_mib`) has nothing to do. The thresholds up to which XLA
    combines collectives stay as XLA has them: higher ones hold what several layers gather at once,
    which the planned memory does not count.
    """
    device = plan.cluster.get("device")
    name = str(device.get("name", "")).lower() if isinstance(device, Mapping) else ""
    if not isinstance(device, Mapping) or "tpu" in name or "cpu" in name:
        return ()
    flags = []
    memory, peak = device.get("memory_bytes"), plan.estimates.peak_bytes_per_device
    share = float(device.get("memory_fraction", 1.0))
    if memory and peak > JAX_FRACTION * memory and share < 1:
        why = f"the plan has up to {format_bytes(peak)} on a device; JAX by itself takes "
        why += f"{JAX_FRACTION:.0%} of {format_bytes(memory)}"
        flags.append(RunFlag(MEMORY_FRACTION, f"{share:g}", False, why, _MEMORY))
    overlap = plan.cluster.get("overlap", 0.0)
    if isinstance(overlap, (int, float)) and overlap > 0:
        why = f"{overlap:.0%} of the collectives of weights and gradients are planned to be hidden"
        flags.append(RunFlag(LATENCY_HIDING, "true", True, why, _TIPS))
    return tuple(flags)


def missing_flags(plan: PlanRecord, environment: Mapping[str, str]) -> tuple[RunFlag, ...]:
    """Those that an environment does not have: less memory than the plan's device needs."""
    found = []
    for flag in run_flags(plan):
        if flag.name != MEMORY_FRACTION:
            continue
        try:
            taken = float(environment.get(MEMORY_FRACTION, JAX_FRACTION))
        except ValueError:  # JAX itself says so
            continue
        memory = plan.cluster["device"]["memory_bytes"]
        if plan.estimates.peak_bytes_per_device > taken * memory:
            found.append(flag)
    return tuple(found)
