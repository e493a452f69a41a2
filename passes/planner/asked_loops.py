"""The kinds of a program's loops, where a method asks for them."""

from __future__ import annotations

from autopar.base.cluster import Cluster
from autopar.base.methods import LOOP_METHODS
from autopar.base.options import Options
from autopar.passes.graph.graph import Graph
from autopar.passes.planner.layouts import asked_layout, logical_meshes, submesh
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.sharding.loop_methods import with_loops


def with_asked_loops(graph: Graph, rules: Rules, options: Options, cluster: Cluster) -> Graph:
    """The graph, with the kinds of its loops where a method asks for them."""
    if options.methods.isdisjoint(LOOP_METHODS):
        return graph
    layout = asked_layout(options, cluster)
    for number in range(len(options.stages_by_hand) or 1):
        own = options.of_stage(number)
        if own.method in LOOP_METHODS:
            part = submesh(cluster, layout.devices[number])
            (mesh, *_) = logical_meshes(own, part, graph, of_stage=layout.is_pipeline)
            graph = with_loops(graph, rules, own.method, mesh[-1])
    return graph
