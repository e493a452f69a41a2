"""What was compiled for accelerators, and needs more memory than they have, is planned again.

Their compiler has been asked by then, and says before the first step what would end in an error of
its allocator. (`confirm=` asks before anything is refused, of devices that need not be there.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from autopar.base.confirmation import CompiledTry, Confirmation
from autopar.base.errors import MemoryLimitError
from autopar.base.progress import Progress
from autopar.base.units import format_bytes

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

    Where none is found, that of the last plan: it may run all the same, for a device has a little
    more than a plan may use.

    Args:
      make: compiles a plan.
      compiled: the plan.
      planner: plans the step within so many bytes of a device.
      limit: what a device has for programs.
      device: one of them.
      progress: of all.
    """
    tries, within = list[CompiledTry](), limit
    while True:
        made = make(compiled)
        planned = [stage.peak_bytes_per_device for stage in compiled.plan.stages]
        needs = made.peak_bytes()
        taken = max(needs)
        tries.append(CompiledTry(within, max(planned), taken))
        if taken <= limit or len(tries) == MOST_TRIES:
            break
        share = min(p / needs[s.mesh] for p, s in zip(planned, compiled.plan.stages, strict=True))
        within = min(int(share * limit), max(planned) - 1)
        progress.report(
            f"it needs {format_bytes(taken)} of a device: planning within {format_bytes(within)}"
        )
        try:
            compiled = planner(within)
        except MemoryLimitError:
            break
    if len(tries) > 1:
        found = Confirmation("here", f"XLA for {device.device_kind}", limit, tuple(tries))
        made.plan = dataclasses.replace(made.plan, confirmed=found)
    return made
