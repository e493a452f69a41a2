"""`confirm=`: a plan is taken when its target's compiler has fitted it into a device's memory.

What a program needs of a device is up to the compiler's fusions and the order that it chooses,
which the planner estimates. Here the compiler is asked: what needs more than a device has is
planned again within less memory, by what the compiler needed beside the estimate; and before a step
is refused for want of memory, the smallest plan there is, is compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from autopar.base.cluster import Cluster
from autopar.base.confirmation import Confirmation
from autopar.base.errors import AutoparError, MemoryLimitError, OptionError
from autopar.base.options import Options
from autopar.base.progress import Progress
from autopar.base.units import format_bytes
from autopar.base.user_code import warn
from autopar.memory_tries import MemoryTries, excess_of
from autopar.plans.plan import Plan

# What plans and compiles is imported when it is used: importing this module stays light.
if TYPE_CHECKING:
    from autopar.passes.planner.compiler import Compiled
    from autopar.passes.trace.trace import Traced
    from autopar.report.verification_report import Verification
    from autopar.runtime.verification.targets import Target

MOST_TRIES = 6  # plans that are compiled
FALSE_ALARM = 1.5  # times a device's memory: what is estimated to need more is not compiled
GRAIN = 1.001  # times what is needed: within how much it is planned again

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
    tries, refusal = MemoryTries.of(limit), None
    while True:
        within = tries.within
        try:
            compiled = as_asked(planner(dataclasses.replace(options, memory_limit=within)), options)
        except MemoryLimitError as error:
            if refusal is not None or not _may_fit(error, tries):
                raise _refused(refusal or error, tries, target) from None
            refusal, tries.within = error, math.ceil(GRAIN * (error.least_bytes or 0))
            continue
        progress.report(f"compiling it for {target.name}")
        seen = _verified(traced, compiled, target, progress)
        sizes = [stage.compiled_bytes for stage in seen.stages]
        by_mesh = dict(zip((stage.mesh for stage in seen.stages), sizes, strict=True))
        failure = "" if seen.interrupted else _failure(seen)
        found = tries.note(compiled.plan, [by_mesh[mesh] for mesh in sorted(by_mesh)], failure)
        if found is None:
            _warn_of_failure(seen)
            return compiled
        if tries.fits(found):
            confirmed = Confirmation(target.name, target.compiler, limit, tuple(tries.made))
            plan = dataclasses.replace(compiled.plan, confirmed=confirmed)
            return dataclasses.replace(compiled, plan=plan)
        if refusal is not None or len(tries.made) == MOST_TRIES:
            raise _refused(refusal, tries, target)
        progress.report(
            f"{target.name} needs {format_bytes(found.compiled_bytes)} a device: planning within "
            f"{format_bytes(tries.within)}"
        )


def check_given(plan: Plan, options: Options) -> None:
    """Refuse to confirm a plan that is given: it is followed as it is.

    Raises:
      OptionError: `confirm` is asked, and the plan was not made with it.
    """
    was = plan.confirmed
    if options.confirm in (None, True if was else None, was.target if was else None):
        return
    raise OptionError(
        f"confirm={options.confirm!r} is not possible with plan=.",
        why="confirm= makes plans until a compiler fits one; a plan that is given is followed as "
        "it is.",
        hint=f"plan.verify({options.confirm!r}) compiles it, or leave plan= out.",
    )


def as_asked(compiled: Compiled, options: Options) -> Compiled:
    """With what was asked for in the plan, not within what it was planned: a call asks the same."""
    plan = dataclasses.replace(compiled.plan, options=options.to_dict())
    return dataclasses.replace(compiled, plan=plan)


def _failure(seen: Verification) -> str:
    """The words of the failure that says least of memory; "": none failed."""
    words = seen.failures.values()
    return max(words, key=lambda x: excess_of(x, 0) is None, default="")


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


def _may_fit(error: MemoryLimitError, tries: MemoryTries) -> bool:
    """Whether the compiler is asked for the smallest plan before a step is refused."""
    known = (x.planned_bytes / GRAIN - 1 for x in tries.made)
    most = min([FALSE_ALARM * tries.limit, *known])
    return error.least_bytes is not None and error.least_bytes <= most


def _refused(refusal: MemoryLimitError | None, tries: MemoryTries, target: Target) -> AutoparError:
    """The planner's refusal, or what the compiler made of plans."""
    if not tries.made:
        assert refusal is not None
        return refusal
    sizes = " and ".join(
        f"{format_bytes(x.compiled_bytes)} of what was planned with {format_bytes(x.planned_bytes)}"
        for x in tries.made
    )
    hint = "use more devices, a smaller batch, remat='override' or offload='auto'."
    # What was found for another limit, or with more memory, says nothing of this one.
    said = refusal.would_fit if refusal else ()
    changes = [x for x in said if not x.startswith(("memory_limit=", "devices of "))]
    if changes:
        hint = f"would fit by autopar's estimate: {'; or '.join(changes)}."
    return MemoryLimitError(
        f"No plan that was tried takes at most {tries.limit:,} bytes per device when compiled.",
        where=f"confirm={target.name!r}",
        why=f"{target.compiler} takes {sizes}; a device has {format_bytes(tries.limit)}.",
        hint=hint,
        least_bytes=min(x.compiled_bytes for x in tries.made),
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
