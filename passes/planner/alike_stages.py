"""Stages that compute the same: the first of them is planned, the others take its plan over.

The twelve inner stages of a transformer differ in the names of their variables, in the paths of
their parameters and in the scopes of their equations. Where that is all, a later stage is given the
program of the first one, with its own labels: what was decided, lowered and measured for the one
then holds for the other as it stands, but for the names that people read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn

from autopar.base.options import Options
from autopar.passes.graph.alike import pairs_if_alike
from autopar.passes.graph.graph import Graph, Input
from autopar.passes.planner.planned_stage import PlannedStage
from autopar.passes.sharding.pins import pins_of
from autopar.passes.sharding.scopes import Node
from autopar.passes.slicing.stage_graphs import StageGraph, Stages


@dataclass(frozen=True)
class Likeness:
    """The first stage that computes what a stage does: its number, and what the stage calls things.

    `names` has the beginnings of node labels, in the first stage and in this one.
    """

    number: int
    names: dict[str, str]


def first_alike(
    stages: Sequence[StageGraph], sizes: Sequence[int], options: Options
) -> list[Likeness]:
    """For every stage, the first that computes the same; itself if there is none before.

    Args:
      stages: with the labels of their inputs.
      sizes: the devices of each.
      options: with pins; stages that have some are like no other, and so are those that were asked
        for otherwise.
    """
    firsts: dict[object, list[int]] = {}
    found: list[Likeness] = []
    for number, (stage, size) in enumerate(zip(stages, sizes, strict=True)):
        alike = Likeness(number, {})
        if not pins_of(stage.graph, options.pins):
            own = options.of_stage(number)
            asked = own.method, own.logical_mesh, own.remat
            known = firsts.setdefault((asked, _summary(stage, size)), [])
            pairs = ((first, _names(stages[first], stage)) for first in known)
            same = next(((first, names) for first, names in pairs if names is not None), None)
            if same is None:
                known.append(number)
            else:
                alike = Likeness(*same)
        found.append(alike)
    return found


def with_shared_programs(stages: Stages, alike: Sequence[Likeness]) -> Stages:
    """The stages, each with the program of the first that computes the same."""
    graphs = tuple(
        _with_program_of(stages.graphs[like.number], stage)
        for like, stage in zip(alike, stages.graphs, strict=True)
    )
    return dataclasses.replace(stages, graphs=graphs)


def _with_program_of(first: StageGraph, stage: StageGraph) -> StageGraph:
    """A stage with the program of one that computes the same, and with its own labels."""
    if first is stage:
        return stage
    own = stage.graph
    graph = Graph(first.graph.jaxpr, own.inputs, own.outputs, own.constants)
    return dataclasses.replace(stage, step=dataclasses.replace(first.step, graph=graph))


def taken_over(planned: PlannedStage, stage: StageGraph, names: dict[str, str]) -> PlannedStage:
    """The plan of the first of stages that are alike, for a stage that has its program now."""
    paths = [label.path for label in planned.split.graph.inputs]
    own = dict(zip(paths, (label.path for label in stage.graph.inputs), strict=True))
    nodes = [_renamed(node, {**names, **own}) for node in planned.built.nodes]
    alive = tuple((own.get(name, name), size) for name, size in planned.peak.alive)
    return dataclasses.replace(
        planned,
        split=dataclasses.replace(planned.split, step=planned.split.stage(stage).step),
        built=dataclasses.replace(planned.built, nodes=nodes),
        peak=dataclasses.replace(planned.peak, alive=alive),
        unlimited=planned.unlimited and taken_over(planned.unlimited, stage, names),
    )


def _summary(stage: StageGraph, size: int) -> object:
    """What stages must have in common to be compared; cheap."""
    primitives = tuple(eqn.primitive.name for eqn in stage.graph.jaxpr.eqns)
    shape = len(stage.graph.inputs), len(stage.graph.outputs), stage.tasks
    return size, primitives, shape


def _names(first: StageGraph, stage: StageGraph) -> dict[str, str] | None:
    """What the nodes of the first stage are called in another one; None if it is not alike."""
    one, other = first.graph, stage.graph
    if [*map(_unnamed, one.inputs)] != [*map(_unnamed, other.inputs)]:
        return None
    if [x.alias for x in one.outputs] != [x.alias for x in other.outputs]:
        return None
    pairs = pairs_if_alike(one.jaxpr, other.jaxpr)
    if pairs is None:
        return None
    names: dict[str, str] = {}
    consistent = (names.setdefault(a, b) == b for a, b in _called(pairs))
    return names if all(consistent) else None


def _unnamed(label: Input) -> Input:
    return dataclasses.replace(label, path="")


def _called(pairs: Iterable[tuple[JaxprEqn, JaxprEqn]]) -> Iterable[tuple[str, str]]:
    for a, b in pairs:
        called = (f"{x.primitive.name} {x.source_info.name_stack}".strip() for x in (a, b))
        yield next(called), next(called)


def _renamed(node: Node, names: dict[str, str]) -> Node:
    """The node with what comes first in its label renamed; what follows says which part it is."""
    words = node.label.split(" ")
    for count in range(len(words), 0, -1):
        name = names.get(" ".join(words[:count]))
        if name is not None:
            return dataclasses.replace(node, label=" ".join([name, *words[count:]]))
    return node
