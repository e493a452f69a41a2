"""What was compiled for accelerators, and needs more memory than they have, is planned again.

Their compiler has been asked by then, and says before the first step what would end in an error of
its allocator. (`confirm=` asks before anything is refused, of devices that need not be there.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from autopar.base.confirmation import Confirmation
from autopar.base.errors import AutoparError
from autopar.base.progress import Progress
from autopar.base.units import format_bytes
from autopar.base.user_code import warn
from autopar.memory_tries import MemoryTries, excess_of

# What plans and compiles is imported when it is used: importing this module stays light.
if TYPE_CHECKING:
    from autopar.executable import Executable
    from autopar.passes.planner.compiler import Compiled

MOST_TRIES = 4  # plans that are compiled


def is_limited(device: jax.Device) -> bool:
    """Whether it has a memory of its own: a CPU's virtual devices share the machine's."""
    return device.platform != "cpu"


def refitted(
    make: Callable[[Compiled], Executable],
    compiled: Compiled,
    planner: Callable[[int], Compiled],
    limit: int,
    device: jax.Device,
    progress: Progress,
) -> Executable:
    """The executable of a plan, or of the first one after it that its compiler fits.

    Where none is found, that which needs least: it may run all the same, for a device has a little
    more than a plan may use.

    Args:
      make: compiles a plan.
      compiled: the plan.
      planner: plans the step within so many bytes of a device.
      limit: what a device has for programs.
      device: one of them.
      progress: of all.

    Raises:
      JaxRuntimeError: the compiler fails; for want of memory, with every plan.

    Warns where what is returned needs more than there is.
    """
    tries, best, least = MemoryTries.of(limit), None, 0
    while True:
        made, failure = None, None
        try:
            made = make(compiled)
        except jax.errors.JaxRuntimeError as error:  # TPUs' compiler fits it, or nothing
            failure = error
            if excess_of(str(error), limit) is None:
                raise
        sizes: list[int | None] = [None] * len(compiled.plan.stages)
        sizes = sizes if made is None else made.peak_bytes()
        found = tries.note(compiled.plan, sizes, str(failure or ""))
        if made is not None and (found is None or tries.fits(found)):
            if found is not None and len(tries.made) > 1:
                name = f"XLA for {device.device_kind}"
                confirmed = Confirmation("here", name, limit, tuple(tries.made))
                made.plan = dataclasses.replace(made.plan, confirmed=confirmed)
            return made
        assert found is not None
        if made is not None and (best is None or found.compiled_bytes < least):
            best, least = made, found.compiled_bytes
        again, why = None, f"none of {MOST_TRIES} plans fits by its compiler"
        if len(tries.made) < MOST_TRIES:
            progress.report(
                f"it needs {format_bytes(found.compiled_bytes)} of a device: planning within "
                f"{format_bytes(tries.within)}"
            )
            again, why = _planned(planner, tries.within, has_other=best is not None)
        if again is None:
            break
        compiled = again
    if best is None:
        from autopar.call_checks import tell_of_memory

        assert failure is not None
        tell_of_memory(failure, "the step", compiled.plan.estimates.peak_bytes_per_device)
        raise failure
    warn(
        f"What was compiled may need more memory than the devices have: {format_bytes(least)}.",
        where="autopar.compile",
        why=f"a {device.device_kind} has {format_bytes(limit)} for programs; {why}.",
        hint="use more devices, a smaller batch, remat='override' or offload='auto'.",
    )
    return best


def _planned(
    planner: Callable[[int], Compiled], limit: int, has_other: bool
) -> tuple[Compiled | None, str]:
    """A plan within so many bytes; or none, and why: there is none, or it is not waited for."""
    try:
        return planner(limit), ""
    except AutoparError as error:
        return None, str(error.what).rstrip(".")
    except KeyboardInterrupt:
        if not has_other:
            raise
        return None, "planning within less was interrupted"
