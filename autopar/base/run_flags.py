"""The flags that a run of a plan wants of XLA and JAX, each with its reason and its source.

They follow from the plan. What XLA takes with a program is set when the program is compiled; what
the environment must have before JAX starts is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.base.hardware import known_capability
from autopar.base.plan_records import PlanRecord
from autopar.base.records import Record
from autopar.base.units import format_bytes

LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
MEMORY_SCHEDULER = "xla_memory_scheduler"
TPU_FLAGS = "LIBTPU_INIT_ARGS"
MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
JAX_FRACTION = 0.75
"""The share of a GPU's memory that JAX takes by itself."""

_TIPS = "JAX, GPU performance tips, https://docs.jax.dev/en/latest/gpu_performance_tips.html"
_MEMORY = "JAX, GPU memory allocation, https://docs.jax.dev/en/latest/gpu_memory_allocation.html"
_COMBINING = (
    "XLA, xla/service/collective_utils.h, https://github.com/openxla/xla/blob/main/xla/service/"
    "collective_utils.h"
)
_EINSUM = (
    "XLA, xla/debug_options_flags.cc, https://github.com/openxla/xla/blob/main/xla/"
    "debug_options_flags.cc"
)
_ORDER = (
    "XLA, xla/hlo/transforms/simplifiers/hlo_memory_scheduler.h, https://github.com/openxla/xla/"
    "blob/main/xla/hlo/transforms/simplifiers/hlo_memory_scheduler.h"
)
_MAXTEXT = "MaxText, flags of its TPU runs, https://github.com/AI-Hypercomputer/maxtext"

COMBINED_KINDS = ("all_reduce", "all_gather", "reduce_scatter")
COMBINED_BYTES = 30 * 2**20 + 7
"""Up to how many bytes XLA for GPUs makes one collective of neighbouring ones, by itself."""

MEASURED_TABLES = "xla_gpu_enable_analytical_sol_latency_estimator"
"""Times of collectives from tables that were measured, which there are for newer GPUs alone."""
OLDER_CAPABILITY = 8
"""The compute capability of GPUs without such a table (A100)."""

COLLECTIVE_MATMUL = "xla_gpu_threshold_for_windowed_einsum_mib"
NO_COLLECTIVE_MATMUL = 100_000
"""MiB of an operand from which on XLA's partitioner would cut products into steps, by itself."""

OVERLAPPING_TPU_FLAGS = (
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_overlap_compute_collective_tc",
)


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
    """Those of a plan; none for CPUs."""
    device = plan.cluster.get("device")
    name = str(device.get("name", "")).lower() if isinstance(device, Mapping) else ""
    if not isinstance(device, Mapping) or "cpu" in name:
        return ()
    flags = []
    overlap = plan.cluster.get("overlap", 0.0)
    overlap = overlap if isinstance(overlap, (int, float)) else 0.0
    why = f"{overlap:.0%} of the collectives of weights and gradients are planned to be hidden"
    if "tpu" in name:
        ordered = (
            "memory is planned for this order of programs without loops; XLA's own may need more"
        )
        # A loop over microbatches runs in the order that XLA chooses.
        orders = ordered_options() if plan.num_microbatches == 1 else {}
        told = [RunFlag(key, str(x), True, ordered, _ORDER) for key, x in orders.items()]
        if overlap > 0:
            flags_of_tpus = " ".join(f"--{flag}=true" for flag in OVERLAPPING_TPU_FLAGS)
            told.append(RunFlag(TPU_FLAGS, flags_of_tpus, False, why, _MAXTEXT))
        return tuple(told)
    memory, peak = device.get("memory_bytes"), plan.estimates.peak_bytes_per_device
    share = float(device.get("memory_fraction", 1.0))
    if memory and peak > JAX_FRACTION * memory and share < 1:
        short = f"the plan has up to {format_bytes(peak)} on a device; JAX by itself takes "
        short += f"{JAX_FRACTION:.0%} of {format_bytes(memory)}"
        flags.append(RunFlag(MEMORY_FRACTION, f"{share:g}", False, short, _MEMORY))
    if overlap > 0:
        reasons = {
            LATENCY_HIDING: (why, _TIPS),
            COLLECTIVE_MATMUL: (
                "none: a step's collectives are its own, not the partitioner's",
                _EINSUM,
            ),
        }
        combined = "as XLA has it: with more, several layers are gathered at once, which the "
        combined += "planned memory does not count"
        for option, value in overlapped_options().items():
            reason, source = reasons.get(option, (combined, _COMBINING))
            flags.append(RunFlag(option, str(value).lower(), True, reason, source))
    return tuple(flags)


def overlapped_options() -> dict[str, str | bool]:
    """What XLA for GPUs is told with a program whose collectives are planned to be hidden.

    What the environment says of the same is not counted on: XLA takes what comes with a program.
    """
    combining = {
        f"xla_gpu_{kind}_combine_threshold_bytes": str(COMBINED_BYTES) for kind in COMBINED_KINDS
    }
    return {LATENCY_HIDING: True, **combining, COLLECTIVE_MATMUL: str(NO_COLLECTIVE_MATMUL)}


def absent_options(device_name: str) -> dict[str, str | bool]:
    """What XLA is told beside that for a GPU that is not there.

    Its tables of what collectives take have no A100, and it fails without (jaxlib 0.10.2: "Cannot
    find key: sm_80").
    """
    has_table = known_capability(device_name) != OLDER_CAPABILITY
    return {} if has_table else {MEASURED_TABLES: False}


def ordered_options() -> dict[str, str | bool]:
    """What XLA for TPUs is told with programs without loops: a list scheduler's order.

    Memory is planned for that; what XLA chooses by itself may need more (`late_sums.py`).
    """
    return {MEMORY_SCHEDULER: "list"}


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
