"""`confirm=`: a plan is taken when its target's compiler has fitted it into a device's memory.

What a program needs of a device is up to the compiler's fusions and the order that it chooses,
which the planner estimates. Here the compiler is asked: what needs more than a device has is
planned again within less memory, by what the compiler needed beside the estimate; and before a step
is refused for want of memory, the smallest plan there is, is compiled.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from autopar.base.cluster import Cluster
from autopar.base.confirmation import CompiledTry, Confirmation
from autopar.base.errors import AutoparError, MemoryLimitError
from autopar.base.options import Options
from autopar.base.progress import Progress
from autopar.base.units import format_bytes
from autopar.base.user_code import warn

# What plans and compiles is imported when it is used: importing this module stays light.
if TYPE_CHECKING:
    from autopar.passes.planner.compiler import Compiled
    from autopar.passes.trace.trace import Traced
    from autopar.report.verification_report import Verification
    from autopar.runtime.verification.targets import Target

MOST_TRIES = 6  # plans that are compiled
FALSE_ALARM = 1.5  # times a device's memory: what is estimated to need more is not compiled
GRAIN = 1.001  # times what is needed: within how much it is planned again
UNKNOWN_EXCESS = 0.02  # of a device's memory, where a compiler that ran out of it does not say more

_EXCESS = re.compile(r"[Ee]xceeded \w+ capacity by ([\d.]+[KMGT]?)")
_OF = re.compile(r"\(([\d.]+[KMGT]?)\) exceeds available \w+ \(([\d.]+[KMGT]?)\)")
"""How XLA:TPU says it, when it has placed all buffers and before."""

Planner = Callable[[Options], "Compiled"]


def plan_confirmed(
    traced: Traced, options: Options, cluster: Cluster, planner: Planner, progress: Progress
) -> Compiled:
    """A plan that fits by the compiler of `options.confirm`.

    Args:
      traced: the step.
      options: what was asked for.
      cluster: the devices to plan for.
      planner: plans the step with options.
      progress: of both.

    Raises:
      MemoryLimitError: the compiler fits nothing that was planned into a device.
      OptionError, AutoparError, DeviceError: as `Plan.verify` of the target.

    Warns where the compiler failed, or was interrupted, and the plan is not confirmed.
    """
    from autopar.passes.planner.stage_shardings import memory_limit_of
    from autopar.runtime.verification.targets import target_for, with_memory

    target = target_for(options.confirm, cluster)
    target.require(cluster.num_devices)
    limit = memory_limit_of(options, cluster)
    limit = min(limit, target.memory_bytes or limit)
    if target.memory_bytes and limit < target.memory_bytes:
        target = with_memory(target, limit)
    within, tries, refusal = limit, list[CompiledTry](), None
    while True:
        try:
            compiled = planner(dataclasses.replace(options, memory_limit=within))
        except MemoryLimitError as error:
            if refusal is not None or not _may_fit(error, limit, tries):
                raise _refused(refusal or error, tries, target, limit) from None
            refusal, within = error, math.ceil(GRAIN * (error.least_bytes or 0))
            continue
        # What was asked for is what the plan says, and a later call asks for the same.
        plan = dataclasses.replace(compiled.plan, options=options.to_dict())
        compiled = dataclasses.replace(compiled, plan=plan)
        planned = max(stage.peak_bytes_per_device for stage in plan.stages)
        progress.report(f"compiling it for {target.name}")
        seen = _verified(traced, compiled, target, progress)
        taken, share = _needs(seen, planned, limit)
        if taken is None:
            _warn_of_failure(seen)
            return compiled
        tries.append(CompiledTry(within, planned, taken))
        if taken <= limit:
            found = Confirmation(target.name, target.compiler, limit, tuple(tries))
            plan = dataclasses.replace(compiled.plan, confirmed=found)
            return dataclasses.replace(compiled, plan=plan)
        if refusal is not None or len(tries) == MOST_TRIES:
            raise _refused(refusal, tries, target, limit)
        within = min(int(share * limit), planned - 1)
        progress.report(
            f"{target.name} needs {format_bytes(taken)} a device: planning within "
            f"{format_bytes(within)}"
        )


def _verified(
    traced: Traced, compiled: Compiled, target: Target, progress: Progress
) -> Verification:
    from autopar.runtime.verification.checking import verify_step
    from autopar.runtime.verification.known_findings import default_folder

    return verify_step(
        compiled.plan,
        compiled.runnable,
        traced.graph,
        traced.signature.shapes,
        target,
        microbatched=compiled.graph,
        folder=default_folder(),
        report=progress.report,
    )


def _may_fit(error: MemoryLimitError, limit: int, tries: list[CompiledTry]) -> bool:
    """Whether the compiler is asked for the smallest plan before a step is refused."""
    most = min([FALSE_ALARM * limit, *(x.planned_bytes / GRAIN - 1 for x in tries)])
    return error.least_bytes is not None and error.least_bytes <= most


def _needs(seen: Verification, planned: int, limit: int) -> tuple[int | None, float]:
    """What the device needs that needs most, and the least share of it that a stage planned.

    None: the compiler failed, but for want of memory.
    """
    compiled = [x.compiled_bytes for x in seen.stages if x.compiled_bytes is not None]
    shares = [x.ratio for x in seen.stages if x.ratio is not None]
    if len(compiled) < len(seen.stages):
        over = [_excess(words, limit) for words in seen.failures.values()]
        known = [size for size in over if size is not None]
        if seen.interrupted or not over or len(known) < len(over):
            return None, 0
        compiled.append(limit + max(known))
        shares.append(min(planned, limit) / compiled[-1])
    return max(compiled), min(shares)


def _excess(words: str, limit: int) -> int | None:
    """The bytes that a compiler which ran out of memory had too few; None: it failed otherwise.

    >>> _excess("Used 16.5G of 15.7G hbm. Exceeded hbm capacity by 512.0M.", 0)
    536870912
    >>> _excess("required for HLO temporaries (17.5G) exceeds available HBM (15.0G)", 0)
    2684354560
    >>> _excess("RESOURCE_EXHAUSTED: no more", 1000), _excess("Mosaic failed", 1000)
    (20, None)
    """
    if said := _EXCESS.search(words):
        return max(_size(said[1]), 1)
    if said := _OF.search(words):
        return max(_size(said[1]) - _size(said[2]), 1)
    return math.ceil(UNKNOWN_EXCESS * limit) if "RESOURCE_EXHAUSTED" in words else None


def _size(text: str) -> int:
    """The bytes of "15.7G"."""
    power = " KMGT".find(text[-1])
    return int(float(text) if power < 1 else float(text[:-1]) * 1024**power)


def _refused(
    refusal: MemoryLimitError | None, tries: list[CompiledTry], target: Target, limit: int
) -> AutoparError:
    """The planner's refusal, or what the compiler made of plans."""
    if not tries:
        assert refusal is not None
        return refusal
    sizes = " and ".join(
        f"{format_bytes(x.compiled_bytes)} of what was planned with {format_bytes(x.planned_bytes)}"
        for x in tries
    )
    hint = "use more devices, a smaller batch, remat='override' or offload='auto'."
    # What was found for another limit, or with more memory, says nothing of this one.
    said = refusal.would_fit if refusal else ()
    changes = [x for x in said if not x.startswith(("memory_limit=", "devices of "))]
    if changes:
        hint = f"would fit by autopar's estimate: {'; or '.join(changes)}."
    return MemoryLimitError(
        f"No plan that was tried takes at most {limit:,} bytes per device when it is compiled.",
        where=f"confirm={target.name!r}",
        why=f"{target.compiler} takes {sizes}; a device has {format_bytes(limit)}.",
        hint=hint,
        least_bytes=min(x.compiled_bytes for x in tries),
        largest_tensors=refusal.largest_tensors if refusal else (),
        least_plan=refusal.least_plan if refusal else "",
        would_fit=changes,
    )


def _warn_of_failure(seen: Verification) -> None:
    piece, words = next(iter(seen.failures.items()), ("", "it was interrupted"))
    warn(
        f"The plan is not confirmed: {seen.compiler.splitlines()[0]} did not compile it.",
        where=f"confirm={seen.target!r}",
        why=f"{piece}: {words}".removeprefix(": ").splitlines()[0][:400] + ".",
        hint="plan.verify(...) has all that it said; this is the plan that it was to compile.",
    )
