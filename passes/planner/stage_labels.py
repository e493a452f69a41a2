"""Labels of what a stage receives: where the batch is, and the kinds of its dimensions' loops."""

from __future__ import annotations

from dataclasses import replace

from jax.extend.core import Literal, Var

from autopar.passes.graph.graph import Input
from autopar.passes.sharding.batch_dims import BatchDims, batch_dims
from autopar.passes.sharding.loop_kinds import LoopKinds, loop_kinds
from autopar.passes.slicing.stage_graphs import StageGraph, Stages


def label_batch(stages: Stages) -> tuple[StageGraph, ...]:
    """The stages' graphs, with the batch dimension of what they receive."""
    whole = stages.whole.graph
    known, kinds = batch_dims(whole, stages.rules), LoopKinds()
    if any(label.loops for label in whole.inputs):
        kinds = loop_kinds(whole, stages.rules)
    return tuple(_labelled(stage, known, kinds) for stage in stages.graphs)


def _labelled(stage: StageGraph, known: BatchDims, kinds: LoopKinds) -> StageGraph:
    if stage.loop is None:
        return stage
    entering = zip(stage.loop.body.invars, stage.loop.scan.invars, strict=True)
    inner = {outer: v for v, outer in entering if not isinstance(outer, Literal)}

    def labelled(var: Var, label: Input, leaf: int | None) -> Input:
        if leaf is not None:
            return label
        value = inner.get(var, var)
        # What enters the loop as it is has no dimension for the microbatches.
        stacked = len(var.aval.shape) - len(value.aval.shape)
        dims, loops = known.get(value, frozenset()), kinds.of(value)
        label = replace(label, loops=("",) * stacked + loops if any(loops) else ())
        return replace(label, batch_axis=min(dims) + stacked) if dims else label

    inputs = tuple(map(labelled, stage.graph.jaxpr.invars, stage.graph.inputs, stage.inputs))
    graph = replace(stage.graph, inputs=inputs)
    return replace(stage, step=replace(stage.step, graph=graph))
