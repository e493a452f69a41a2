"""`autopar.verify`: a step's plan held against the compiler of devices that need not be there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autopar.base.progress import Progress
from autopar.building import plan_traced, trace_step
from autopar.plan_verification import Verifier
from autopar.requests import ClusterOrName, PlanOrPath, name_of, read_arguments
from autopar.shown_options import shows_options

if TYPE_CHECKING:
    from autopar.report.verification_report import Verification


@shows_options
def verify(
    fn: Callable[..., Any],
    *args: Any,
    target: str,
    plan: PlanOrPath | None = None,
    cluster: ClusterOrName | None = None,
    cache: bool | str | os.PathLike[str] = True,
    processes: int | None = None,
    compile_seconds: float = 1800.0,
    plain: bool = False,
    **options_and_kwargs: Any,
) -> Verification:
    """Compile every distinct piece of a step's plan for a target, and compare with the plan.

    A plan that was made in this process knows its step, and has the same as `Plan.verify`; this
    function also takes one from a file.

    Args:
      fn: as for `autopar.compile`.
      *args: the arguments, or `jax.ShapeDtypeStruct`s in their place.
      target: "cpu", "gpu:h100", "gpu:h200", "gpu:a100", or a slice of TPUs ("tpu:v5e:2x4").
      plan: the plan to verify, or the path of its file; by default one is made.
      cluster: the devices to plan for; by default those of the plan, or all that JAX sees.
      cache: whether what was compiled once is kept in the user's cache folder, or in which folder.
      processes: how many compile at a time; by default as many as there are cores.
      compile_seconds: how long one program may take to compile.
      plain: whether the plain function is compiled as well, by `jax.jit` with the plan's shardings
        of arguments and results, to compare with; of plans for one mesh.
      **options_and_kwargs: what is asked of the plan, as on the page Options; other names are
        the step's own arguments by keyword.

    Returns:
      A `Verification`: see `Plan.verify`.

    Raises:
      OptionError: there is no such target; says which there are.
      AutoparError: the target's compiler is not installed; says what to install.
      DeviceError: the target has fewer devices than the plan needs.
      PlanMismatchError: the plan is for another program or other options.
    """
    fn, request, kwargs = read_arguments(fn, cluster, plan, options_and_kwargs, "verify")
    name = name_of(fn)
    on, made = request.load()
    with Progress(f"planning {name}", request.progress) as progress:
        traced = trace_step(fn, args, kwargs, request, on, progress)
        if made is None:
            made = plan_traced(traced, request, on, None, progress).plan
    verifier = Verifier(traced, request, name)
    given: dict[str, Any] = {"processes": processes, "compile_seconds": compile_seconds}
    return verifier(made, target, cache=cache, plain=plain, **given)
