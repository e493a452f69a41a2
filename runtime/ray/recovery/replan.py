"""Another plan of a step, for the part of its cluster that a loss has left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from autopar.base.cluster import Cluster
from autopar.base.errors import AutoparError, ClusterError
from autopar.base.options import Options
from autopar.passes.graph.graph import Graph
from autopar.passes.graph.logical import no_mesh
from autopar.passes.planner.compiler import Compiled, compile_graph
from autopar.passes.planner.edited_plans import with_pins_of
from autopar.passes.planner.layouts import submesh
from autopar.runtime.ray.transport.routes import num_processes


def replan(
    graph: Graph,
    options: Options,
    cluster: Cluster,
    compiled: Compiled,
    num_actors: int,
    report: Callable[[str], None],
) -> Compiled:
    """A plan as it was asked for, with no more processes than can run.

    A number of stages among the options is an upper bound here. The cluster is the whole one, and
    what is compiled the plan for it.

    Raises:
      AutoparError: no plan fits these processes and what the user asked for.
    """
    options = with_pins_of(compiled.plan, options)  # of a plan whose file was edited
    devices = max(cluster.num_devices * num_actors // _num_actors(compiled, cluster), 1)
    if devices > cluster.devices_per_node:
        devices -= devices % cluster.devices_per_node  # whole nodes
    part = submesh(cluster, devices)
    if isinstance(options.stages, int):
        options = _with_fewer_stages(options, options.stages, num_actors, devices)
    report("planning for what is left")
    try:
        with no_mesh():
            found = compile_graph(graph, options, part, None, report)
    except AutoparError as error:
        error.add_note(f"Planned again for {devices} of {cluster.num_devices} devices.")
        raise
    after = _num_actors(found, part)
    if after > num_actors:
        raise ClusterError(
            f"A plan with {after} actors cannot run on what is left of the Ray cluster.",
            where=f"stages={options.stages!r}",
            why="every mesh is a process, or one for each node, and there is room for "
            f"{num_actors}.",
            hint="with a number of stages, or 'auto', a plan may have fewer of them.",
        )
    return found


def _num_actors(compiled: Compiled, cluster: Cluster) -> int:
    """How many processes a plan for a cluster has."""
    runnable = compiled.runnable
    schedule, programs = runnable.program.schedule, runnable.pieces.programs
    return sum(num_processes(schedule, programs, cluster.devices_per_node))


def _with_fewer_stages(options: Options, stages: int, num_actors: int, devices: int) -> Options:
    """The options, with at most as many stages as so many processes and devices can have."""
    chunks = options.num_chunks if isinstance(options.num_chunks, int) else 1
    most = min(stages, num_actors * chunks)
    # Meshes are equal, and each has as many stages as there are chunks.
    possible = [n for n in range(chunks, most + 1, chunks) if devices % (n // chunks) == 0]
    fewer: dict[str, Any] = {"stages": max(possible, default=1)}
    if fewer["stages"] == 1:  # what only several stages can have
        fewer.update(schedule="auto", num_chunks="auto", remat="auto")
    return dataclasses.replace(options, **fewer)
