"""Other programs of a step that are planned beside it: loops padded, experts in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.base.cluster import Cluster
from autopar.base.errors import InexactMicrobatchError
from autopar.base.methods import BATCH_METHODS, WHOLE_PARAMETERS
from autopar.base.options import Options
from autopar.passes.experts.blocks import in_blocks, most_blocks, num_groups
from autopar.passes.experts.by_example import by_example
from autopar.passes.graph.casts_after import with_casts_after
from autopar.passes.graph.casts_ahead import with_casts_ahead
from autopar.passes.graph.graph import Graph
from autopar.passes.graph.sunk_constants import with_sunk_constants
from autopar.passes.graph.vector_products import with_sums_for_vectors
from autopar.passes.padding.pad import padded_graph
from autopar.passes.padding.uneven import loops_to_pad
from autopar.passes.planner.asked_loops import with_asked_loops
from autopar.passes.planner.layouts import asked_layout, logical_meshes, submesh
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.populate import populate
from autopar.passes.recompute.override import without_checkpoints
from autopar.passes.recompute.scan_stacks import with_lean_stacks
from autopar.passes.sharding.compiler_rules import rules_of
from autopar.passes.slicing.cheapest_cut import prices_on


@dataclass(frozen=True)
class Rewriting:
    """How a program is written: sizes of loops that are padded, and blocks of experts (0: none)."""

    padding: tuple[tuple[int, int], ...] = ()
    expert_blocks: int = 0

    def __str__(self) -> str:
        parts = [f"{size} padded to {more}" for size, more in self.padding]
        if self.expert_blocks:
            parts.append(f"rows sent to {self.expert_blocks} blocks of experts")
        return ", ".join(parts) or "nothing changed"


AS_WRITTEN = Rewriting()
IN_BLOCKS = "they are sent to blocks of experts"


@dataclass(frozen=True)
class RewrittenStep:
    """A step, written otherwise."""

    graph: Graph
    rewriting: Rewriting

    def __str__(self) -> str:
        return f"the step with {self.rewriting}"


def planned_graphs(graph: Graph, options: Options, cluster: Cluster) -> tuple[Graph, Graph | None]:
    """A traced step as it is planned, and the one whose rows may be sent to blocks of experts.

    Where parameters may be stored cut, they are cast so; rows are sorted for each example. None:
    that changes nothing.
    """
    if rules_of(cluster.device.name).adds_for_vectors:
        graph = with_sums_for_vectors(graph)
    graph = with_sunk_constants(graph)
    if options.remat == "override":
        graph = without_checkpoints(graph)
    if options.remat != "none":
        graph = with_lean_stacks(graph, prices_on(rules_of(cluster.device.name).backend))
    made = by_example(graph)
    kept = [made]
    if made.jaxpr is not graph.jaxpr:
        sorts = (replace(sort, reason=sort.reason or IN_BLOCKS) for sort in made.row_sorts)
        kept.append(replace(graph, row_sorts=tuple(sorts)))
    if not options.methods.issubset(WHOLE_PARAMETERS):
        kept = [*map(with_casts_ahead, kept)]
    if rules_of(cluster.device.name).gathers_read_buffers:
        kept = [*map(with_casts_after, kept)]
    return kept[0], kept[1] if len(kept) > 1 else None


def rewritten_steps(
    graph: Graph,
    rules: Rules,
    options: Options,
    cluster: Cluster,
    sorted_whole: Graph | None = None,
) -> Iterator[RewrittenStep]:
    """The programs that are worth planning as well."""
    if options.methods.issubset(BATCH_METHODS):
        return
    devices = math.lcm(*asked_layout(options, cluster).devices)
    if options.logical_mesh:
        devices = math.prod(options.logical_mesh)
    for loops in loops_to_pad(graph, rules, devices):
        padding = tuple((loop.size, loop.padded) for loop in loops)
        dims = {place: size for loop in loops for place, size in loop.dims.items()}
        yield RewrittenStep(padded_graph(graph, rules, dims), Rewriting(padding))
    blocks = _expert_blocks(sorted_whole or graph, options, cluster)
    if 1 < blocks <= most_blocks(sorted_whole or graph):
        if sorted_whole is not None:
            whole_rules = populate(sorted_whole.jaxpr)
            graph = with_asked_loops(sorted_whole, whole_rules, options, cluster)
        yield RewrittenStep(in_blocks(graph, blocks), Rewriting(expert_blocks=blocks))


def _expert_blocks(graph: Graph, options: Options, cluster: Cluster) -> int:
    """One block for each device that can have experts; at most 1: it is not worth it.

    Where experts are asked for and not all devices can, these are the devices of the last axis.
    """
    groups = num_groups(graph)
    wants = options.methods & {"auto", "shard", "expert"}
    if groups < 2 or not wants or options.microbatches not in ("auto", 1):
        return 0
    layout = asked_layout(options, cluster)
    part = submesh(cluster, math.gcd(*layout.devices))
    (mesh, *_) = logical_meshes(options, part, graph, of_stage=layout.is_pipeline)
    blocks = math.gcd(groups, math.prod(mesh))
    if "expert" in wants and blocks % math.prod(mesh):
        return mesh[-1] if groups % mesh[-1] == 0 else 0
    return blocks


def check_splits(rewriting: Rewriting, count: int) -> None:
    """Refuse microbatches of a program that sorts the rows of the whole batch.

    Raises:
      InexactMicrobatchError: rows are sent to experts, and there are several microbatches.
    """
    if rewriting.expert_blocks and count > 1:
        raise InexactMicrobatchError(
            "Rows are sent to blocks of experts for the whole batch.",
            why=f"they are sorted by expert, which {count} microbatches would do for each.",
            hint="use microbatches=1.",
        )
