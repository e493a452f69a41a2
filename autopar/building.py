"""From a request to a trace, a plan and an executable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from autopar.absent_devices import tracing_for
from autopar.base.cluster import Cluster
from autopar.base.errors import BatchArgumentError, InexactMicrobatchError
from autopar.base.options import Options
from autopar.base.progress import Progress
from autopar.base.ray_options import Ray
from autopar.base.transfer_costs import by_way_of_hosts
from autopar.confirming import as_asked, check_given, plan_confirmed
from autopar.passes.graph import jax_compat
from autopar.passes.trace.graph_objects import objects_apart
from autopar.passes.trace.signature import Convention
from autopar.plans.plan import Plan
from autopar.refitting import is_limited, refitted
from autopar.requests import (
    PlanRequest,
    check_devices,
    for_processes,
    in_brief,
    name_of,
    warn_of_flags,
)

# What traces, plans and runs is imported when it is used: importing this module stays light.
if TYPE_CHECKING:
    from autopar.executable import Executable
    from autopar.passes.planner.compiler import Compiled
    from autopar.passes.trace.trace import Traced


def trace_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    request: PlanRequest,
    cluster: Cluster,
    progress: Progress,
    is_smaller: bool = False,
) -> Traced:
    """The step, traced for a cluster; nobody asks how a smaller batch than planned divides."""
    from autopar.passes.trace.trace import trace

    progress.report("tracing")
    options = request.options
    convention = Convention.of(fn, options.static_argnums)
    with jax_compat.jitted(), tracing_for(cluster), objects_apart(convention, args, kwargs) as call:
        if call is not None:
            fn, args, kwargs = call.pure(fn), call.args, call.kwargs
        return trace(
            fn,
            args,
            kwargs,
            static_argnums=options.static_argnums,
            donate_argnums=options.donate_argnums,
            batch_argnums=options.batch_argnums,
            batch_axes=options.batch_axes,
            microbatches="auto" if is_smaller else options.microbatches,
            method="auto" if is_smaller else options.method,
            constraints=options.constraints,
        )


def plan_traced(
    traced: Traced, request: PlanRequest, cluster: Cluster, made: Plan | None, progress: Progress
) -> Compiled:
    """What a traced step comes to on a cluster: planned, or as a plan that was made."""
    from autopar.passes.graph.logical import no_mesh
    from autopar.passes.planner.compiler import compile_graph
    from autopar.passes.trace.batch_lines import tell_batch

    options = request.options
    if made is not None:
        check_given(made, options)

    def planned(options: Options) -> Compiled:
        return compile_graph(traced.graph, options, cluster, made, progress.report)

    with jax_compat.jitted(), no_mesh():
        try:
            if options.confirm is None or made is not None:
                return planned(options)
            return plan_confirmed(traced, options, cluster, planned, progress)
        except (BatchArgumentError, InexactMicrobatchError) as error:
            graph, said = traced.graph, (options.batch_argnums, options.batch_axes)
            tell_batch(error, graph.jaxpr, graph.inputs, traced.arguments, *said)
            raise


def as_carried(cluster: Cluster, runtime: Ray) -> Cluster:
    """A cluster as a plan for Ray's actors should price it, by what carries arrays between them."""
    is_by_hosts = runtime.devices == "gpu" and runtime.transport == "sockets"
    return by_way_of_hosts(cluster) if is_by_hosts else cluster


def build(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], request: PlanRequest
) -> Executable:
    """The step planned, or as a plan that was made, and compiled.

    Raises:
      AutoparError: see `autopar.compile`.
    """
    with jax_compat.jitted(), Progress(f"compiling {name_of(fn)}", request.progress) as progress:
        cluster, made = request.load()
        runtime = request.options.runtime
        if not isinstance(runtime, Ray):
            check_devices(cluster, made, request.devices)
            request = for_processes(request, made, name_of(fn))
        elif made is None:
            cluster = as_carried(cluster, runtime)
        traced = trace_step(fn, args, kwargs, request, cluster, progress)
        compiled = plan_traced(traced, request, cluster, made, progress)
        progress.conclude(in_brief(compiled.plan))
        if isinstance(runtime, Ray):
            from autopar.ray_executable import RayExecutable
            from autopar.runtime.ray.recovery.replan import replan

            def again(traced: Traced, compiled: Compiled, num_actors: int) -> Compiled:
                with Progress(f"planning {name_of(fn)} again", request.progress) as progress:
                    return replan(
                        traced.graph,
                        request.options,
                        cluster,
                        compiled,
                        num_actors,
                        progress.report,
                    )

            return RayExecutable(fn, traced, compiled, progress, runtime, again)
        return _loaded_here(fn, traced, compiled, request, cluster, progress)


def _loaded_here(
    fn: Callable[..., Any],
    traced: Traced,
    compiled: Compiled,
    request: PlanRequest,
    cluster: Cluster,
    progress: Progress,
) -> Executable:
    """A step on the devices of this process; what does not fit them is planned again."""
    from autopar.compiled_only import CompiledOnly, executable_for
    from autopar.passes.planner.stage_shardings import memory_limit_of

    kind = executable_for(request.devices)
    if kind is not CompiledOnly:
        warn_of_flags(compiled.plan, request.devices)

    def load(compiled: Compiled) -> Executable:
        return kind(fn, traced, compiled, progress, request.devices)

    device = (request.devices or jax.devices())[0]
    if request.plan is not None or not is_limited(device):
        return load(compiled)
    options = request.options

    def within(limit: int) -> Compiled:
        less = replace(request, options=replace(options, memory_limit=limit, confirm=None))
        return as_asked(plan_traced(traced, less, cluster, None, progress), options)

    limit = memory_limit_of(options, cluster)
    return refitted(load, compiled, within, limit, device, progress)
