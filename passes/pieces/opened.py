"""A stage's lowered program opened at its loop, and what links change at its boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from autopar.passes.pieces.wiring import made_by, needed, read_by
from autopar.passes.sharding.layout import (
    Layout,
    divides,
    without_partial,
    without_replicas,
)
from autopar.passes.sharding.reshard import reshard_steps
from autopar.passes.sharding.scopes import aval_shape
from autopar.passes.sharding.spmd_program import (
    Instruction,
    Loop,
    Relayout,
    ShardedValue,
    SpmdProgram,
    is_literal,
    writes,
)
from autopar.passes.slicing.stage_graphs import StageGraph

Instructions: TypeAlias = tuple[Instruction, ...]
Pairs: TypeAlias = Sequence[tuple[ShardedValue, ShardedValue]]


@dataclass(frozen=True)
class LoopEdge:
    """Where the loop's body meets what is around it: pairs of an outer and an inner version."""

    constants: Pairs = ()
    carry: Pairs = ()
    slices: Pairs = ()
    carry_results: Pairs = ()
    stacks: Pairs = ()

    @property
    def inputs(self) -> tuple[ShardedValue, ...]:
        """What the body reads."""
        return tuple(inner for _, inner in (*self.constants, *self.carry, *self.slices))

    @property
    def results(self) -> Pairs:
        """What the loop makes."""
        return (*self.carry_results, *self.stacks)


class Exchanged(NamedTuple):
    """What crosses a stage's boundary: a version of the loop's body (`inside`), or an outer one."""

    inside: bool
    version: ShardedValue


@dataclass(frozen=True)
class OpenStage:
    """A stage's program, as it was lowered from `graph`, in three parts that meet at `edge`.

    The parts are the instructions before the loop over the microbatches (all, if the stage has no
    loop), in it and after it. Links take what is `sent`, by the graph's output, and bring what is
    `received`, by its input.
    """

    number: int
    graph: StageGraph
    program: SpmdProgram
    before: Instructions
    body: Instructions = ()
    after: Instructions = ()
    edge: LoopEdge = LoopEdge()
    sent: Mapping[int, Exchanged] = field(default_factory=dict)
    received: Mapping[int, Exchanged] = field(default_factory=dict)

    @property
    def outer_outputs(self) -> list[ShardedValue]:
        """The program's outputs, but for those that the body sends."""
        sent = {position for position, what in self.sent.items() if what.inside}
        return [v for i, v in enumerate(self.program.block.outputs) if i not in sent]

    @property
    def body_outputs(self) -> set[ShardedValue]:
        """What leaves the body."""
        results = {inner for _, inner in self.edge.results if not is_literal(inner)}
        return results.union(what.version for what in self.sent.values() if what.inside)

    @property
    def stacked_inputs(self) -> Pairs:
        """The loop's stacks, but for those that are received microbatch by microbatch."""
        received = {what.version.atom for what in self.received.values() if what.inside}
        return tuple(pair for pair in self.edge.slices if pair[1].atom not in received)


def open_stage(number: int, graph: StageGraph, program: SpmdProgram) -> OpenStage:
    """A lowered stage as its loop divides it."""
    outer = program.block.instructions
    if graph.loop is None:
        return OpenStage(number, graph, program, outer)
    scan = graph.loop.scan
    loop = next(x for x in outer if isinstance(x, Loop) and x.eqn is scan)
    operands = tuple(zip(loop.operands, loop.body.inputs, strict=True))
    results = tuple(zip(loop.results, loop.body.outputs, strict=True))
    parts = graph.loop.parts
    edge = LoopEdge(*parts.operands(operands), *parts.results(results))
    place = outer.index(loop)
    before, after = outer[:place], outer[place + 1 :]
    return OpenStage(number, graph, program, before, loop.body.instructions, after, edge)


def with_sent(stage: OpenStage, position: int, *, per_microbatch: bool) -> tuple[OpenStage, Layout]:
    """The stage sending an output: complete, and made by the body if it is sent per microbatch.

    Returns:
      The stage, and the layout in which the value is sent.
    """
    version, body = stage.program.block.outputs[position], stage.body
    if per_microbatch:
        inner = _inner(stage.edge.stacks, version)
        # A stack that the plan cuts along itself never exists.
        version = ShardedValue(inner.atom, Layout(version.layout.dims[1:]))
        if version != inner and version not in made_by(body).union(stage.edge.inputs):
            steps = reshard_steps(inner.layout, version.layout, stage.program.mesh)
            body = (*body, Relayout(inner, version, steps, "activation", ""))
    else:
        stage = _brought_early(stage, version)
    sent = {**stage.sent, position: Exchanged(per_microbatch, version)}
    return replace(stage, body=body, sent=sent), version.layout


def with_received(
    stage: OpenStage, position: int, layout: Layout, *, per_microbatch: bool
) -> OpenStage:
    """The stage taking an input, sent in `layout`, over in one that sends every tile once.

    The rest of the way to the planned layout happens on the stage.
    """
    planned, mesh = stage.program.block.inputs[position], stage.program.mesh
    if per_microbatch:
        planned = _inner(stage.edge.slices, planned)
    version = ShardedValue(planned.atom, _arriving(planned, layout, mesh))
    received = {**stage.received, position: Exchanged(per_microbatch, version)}
    stage = replace(stage, received=received)
    if version == planned:
        return stage
    before, body, after = (
        tuple(x for x in part if version not in writes(x))
        for part in (stage.before, stage.body, stage.after)
    )
    steps = reshard_steps(version.layout, planned.layout, mesh)
    if per_microbatch:
        body = (Relayout(version, planned, steps, "activation", ""), *body)
    else:
        before = (Relayout(version, planned, steps, "state", ""), *before)
    return replace(stage, before=before, body=body, after=after)


def pruned(stage: OpenStage) -> OpenStage:
    """The stage without what nothing depends on."""
    after = needed(stage.after, stage.outer_outputs)
    operands = (*stage.edge.constants, *stage.edge.carry, *stage.stacked_inputs)
    wanted = (*stage.outer_outputs, *read_by(after), *(outer for outer, _ in operands))
    before, body = needed(stage.before, wanted), needed(stage.body, stage.body_outputs)
    return replace(stage, before=before, body=body, after=after)


def _brought_early(stage: OpenStage, version: ShardedValue) -> OpenStage:
    """The stage in which what it sends does not wait for its loop, where only copies make it.

    A leaf in the hosts' memory is copied again after the loop, and the other stage's loop reads it.
    """
    made = {v: x for x in stage.after for v in writes(x)}
    early = list[Instruction]()
    while (instruction := made.get(version)) is not None:
        if not isinstance(instruction, Relayout):
            return stage
        early.insert(0, instruction)
        version = instruction.source
    if any(outer == version for outer, _ in stage.edge.results):
        return stage
    after = tuple(x for x in stage.after if not any(x is other for other in early))
    return replace(stage, before=(*stage.before, *early), after=after)


def _inner(pairs: Pairs, stack: ShardedValue) -> ShardedValue:
    """The body's side of a stack that crosses between stages: around the loop it is laid out."""
    sides = [inner for outer, inner in pairs if outer.atom is stack.atom]
    assert sides, f"what crosses for every microbatch is made or read around the loop: {stack}"
    return sides[0]


def _arriving(version: ShardedValue, sent: Layout, mesh: Sequence[int]) -> Layout:
    """The sender's cuts, where only replicas are left to be made here; else ours."""
    shape, target = aval_shape(version.atom), version.layout
    alike = len(sent.dims) == len(shape) and all(axis < len(mesh) for axis in sent.used)
    if alike and divides(shape, sent, mesh):
        theirs = without_replicas(shape, without_partial(sent), mesh)
        if all(step.kind == "all-gather" for step in reshard_steps(theirs, target, mesh)):
            return theirs
    return without_replicas(shape, without_partial(target), mesh)
