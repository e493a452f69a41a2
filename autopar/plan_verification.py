"""What `Plan.verify` does: a plan that was made here knows its step, and meets compilers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.base.cluster import Cluster
from autopar.base.errors import OptionError
from autopar.base.progress import Progress
from autopar.plans.plan import Plan
from autopar.requests import PlanRequest

if TYPE_CHECKING:
    from autopar.passes.trace.trace import Traced
    from autopar.report.verification_report import Verification


class Verifier:
    """Verifies plans of one traced step; a plan holds it as long as it lives."""

    def __init__(self, traced: Traced, request: PlanRequest, name: str) -> None:
        self.traced, self.request, self.name = traced, request, name

    def __call__(
        self,
        plan: Plan,
        target: str,
        *,
        cache: bool | str | os.PathLike[str],
        processes: int | None,
        compile_seconds: float,
        plain: bool,
    ) -> Verification:
        """See `Plan.verify`."""
        from autopar.passes.graph.logical import no_mesh
        from autopar.passes.planner.compiler import compile_graph
        from autopar.runtime.verification.checking import verify_step
        from autopar.runtime.verification.known_findings import default_folder
        from autopar.runtime.verification.targets import target_named

        known = target_named(target)
        known.require(sum({x.mesh: x.num_devices for x in plan.stages}.values()))
        _check(cache, processes, compile_seconds)
        folder = default_folder() if cache is True else None if cache is False else Path(cache)
        with Progress(f"verifying {self.name} on {known.name}", self.request.progress) as progress:
            with no_mesh():
                compiled = compile_graph(
                    self.traced.graph,
                    self.request.options,
                    Cluster.from_dict(plan.cluster),
                    plan,
                    progress.report,
                )
            return verify_step(
                compiled.plan,
                compiled.runnable,
                self.traced.graph,
                self.traced.signature.shapes,
                known,
                microbatched=compiled.graph,
                folder=folder,
                processes=processes,
                seconds=compile_seconds,
                plain=plain,
                report=progress.report,
            )


def _check(cache: Any, processes: Any, compile_seconds: Any) -> None:
    if not isinstance(cache, bool | str | os.PathLike):
        raise OptionError(
            f"cache={cache!r} is not possible.", why="it must be True, False or a folder."
        )
    is_count = isinstance(processes, int) and not isinstance(processes, bool) and processes >= 1
    if processes is not None and not is_count:
        raise OptionError(
            f"processes={processes!r} is not possible.",
            why="it must be a positive number, or None.",
        )
    if not isinstance(compile_seconds, (int, float)) or compile_seconds <= 0:
        raise OptionError(
            f"compile_seconds={compile_seconds!r} is not possible.",
            why="it must be a positive number of seconds.",
        )
