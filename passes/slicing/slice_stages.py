"""`slice_stages`: one graph per pipeline stage from a microbatched program."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.passes.graph.graph import makers_of, variables
from autopar.passes.graph.microbatched import Microbatched
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.populate import populate
from autopar.passes.slicing.accumulators import find_terms
from autopar.passes.slicing.anatomy import Anatomy, dissect
from autopar.passes.slicing.assemble import assemble
from autopar.passes.slicing.backward_scans import split_backward_scans
from autopar.passes.slicing.conditionals import split_conditionals
from autopar.passes.slicing.layer_scans import LayerScan, find_layer_scans
from autopar.passes.slicing.layering import boundaries_of, layers_of, number_of_stages
from autopar.passes.slicing.placed import build
from autopar.passes.slicing.placement import place
from autopar.passes.slicing.received import read_received
from autopar.passes.slicing.runs import cut_scans
from autopar.passes.slicing.stage_graphs import (
    Boundaries,
    Layers,
    LeafRows,
    Rows,
    StageGraph,
    Stages,
)
from autopar.passes.slicing.transfers import find_exchange


class LayersOfStep(NamedTuple):
    """A microbatched program taken apart, and the layers of its loop."""

    parts: Anatomy
    found: Layers


def slice_stages(
    step: Microbatched,
    rules: Rules,
    stages: Boundaries,
    *,
    split_backward: bool = False,
    known: LayersOfStep | None = None,
) -> Stages:
    """Cut a microbatched program into pipeline stages.

    Args:
      step: a program with a loop over microbatches (`autopar.passes.microbatch.split`).
      rules: the factor rules of its equations.
      stages: how many stages, which then have about the same FLOPs; or boundaries in layers; or
        what each stage has.
      split_backward: whether weight gradients are a task of their own, W: no stage waits for it.
      known: what `find_layers` found of the same program, if that is known.

    Returns:
      The stages' graphs, which together compute what `step` computes: bit for bit, except that the
      terms of a sum that are made on several stages are added up in another order, and so are sums
      over the layers of a scan that is cut.

    Raises:
      OptionError: the program has no loop over microbatches, or fewer layers than stages, or
        the boundaries are out of order or out of range.
    """
    parts = known.parts if known else dissect(split_conditionals(step))
    if split_backward:
        step = split_backward_scans(parts)
        if step is not parts.step:
            rules, known = populate(step.graph.jaxpr), None
            parts = dissect(step)
    if known is not None and len(known.found.layers) >= number_of_stages(stages):
        found = known.found
    else:
        found = layers_of(parts, rules, at_least=number_of_stages(stages))
    boundaries = boundaries_of(found, stages)
    parts, rules, cut_of, leaves, results = _cut(parts, rules, found, boundaries)
    whole = parts
    parts, stage_of = read_received(parts, cut_of)
    if parts is not whole:
        rules = populate(parts.graph.jaxpr)
    terms = find_terms(parts)
    program = build(parts, terms, place(parts, terms, stage_of, len(boundaries) + 1))
    exchange = find_exchange(program, len(boundaries) + 1)
    graphs, links = assemble(program, exchange, split_backward=split_backward)
    return Stages(
        graphs=graphs,
        links=links,
        forward_only=not any(task != "F" for stage in graphs for task in stage.tasks),
        layers=found,
        boundaries=boundaries,
        whole=parts.step,
        rules=rules,
        leaves=leaves,
        results=results,
    )


def find_layers(step: Microbatched, rules: Rules) -> LayersOfStep:
    """The layers of a microbatched program's loop, as `slice_stages` finds them.

    Raises:
      OptionError: the program has no loop over microbatches.
    """
    parts = dissect(split_conditionals(step))
    return LayersOfStep(parts, layers_of(parts, rules))


def one_stage(step: Microbatched, rules: Rules) -> Stages:
    """A whole program as the only stage, as it is: it needs no loop, and has no layers."""
    graph = step.graph
    leaves, results = tuple(range(len(graph.inputs))), tuple(range(len(graph.outputs)))
    return Stages(
        graphs=(StageGraph(step, leaves, results),),
        links=(),
        forward_only=False,
        layers=Layers(()),
        boundaries=(),
        whole=step,
        rules=rules,
        leaves=_whole(leaves),
        results=_whole(results),
    )


def _whole(leaves: Sequence[object]) -> Rows:
    """Leaves that are where they were."""
    return tuple((LeafRows(number),) for number in range(len(leaves)))


def _cut(
    parts: Anatomy, rules: Rules, found: Layers, boundaries: Sequence[int]
) -> tuple[Anatomy, Rules, dict[int, int], Rows, Rows]:
    """Cut the scans over layers that several stages have a part of.

    Returns the program whose equations can be placed, its rules, the stages of the body's forward
    equations, and where leaves and results are.
    """
    ends = (0, *boundaries, len(found.layers))
    stage_of: dict[int, int] = {}
    rows: dict[int, dict[int, tuple[int, int]]] = {}  # of scans in several stages, by stage
    for stage, (first, last) in enumerate(itertools.pairwise(ends)):
        for layer in found.layers[first:last]:
            stage_of.update((index, stage) for index in layer.equations)
            for index, start, stop in layer.iterations:
                before = rows.setdefault(index, {}).get(stage, (start, stop))
                rows[index][stage] = (min(before[0], start), max(before[1], stop))
    rows = {index: by_stage for index, by_stage in rows.items() if len(by_stage) > 1}
    if not rows:
        graph = parts.graph
        return parts, rules, stage_of, _whole(graph.inputs), _whole(graph.outputs)
    scans = find_layer_scans(parts)
    starts: dict[int, dict[int, int]] = {}  # of cut scans, the stage at each run's first iteration
    sizes: dict[int, tuple[int, ...]] = {}
    for index, places in _places(scans, rows).items():
        by_stage = rows.get(index) or {stage_of[index]: (0, scans[index].length)}
        starts[index] = {
            start: next(stage for stage, (a, b) in by_stage.items() if a <= start < b)
            for start in places
        }
        ends = (*places, scans[index].length)
        sizes[index] = tuple(b - a for a, b in itertools.pairwise(ends))
    made = cut_scans(parts, rules, sizes)
    step = split_conditionals(made.step)  # runs of layers can be updated apart now
    rules = populate(step.graph.jaxpr)
    new = dissect(step)
    assert len(new.body.eqns) == len(made.sources)
    stages: dict[int, int] = {}
    made_by = makers_of(new.body.eqns)
    for index in new.trunk():
        equation, iteration = made.sources[index]
        in_run = equation in starts
        stage = starts[equation][iteration] if in_run else stage_of.get(equation, 0)
        reads = variables(new.body.eqns[index].invars)
        stages[index] = max(stage, *(stages.get(made_by.get(var, -1), 0) for var in reads), 0)
    return new, rules, stages, made.inputs, made.outputs


def _places(
    scans: Mapping[int, LayerScan], rows: Mapping[int, Mapping[int, tuple[int, int]]]
) -> dict[int, list[int]]:
    """Where scans are cut, from the first iteration: those over the same leaves are cut alike."""
    found: dict[int, list[int]] = {}
    for index, scan in scans.items():
        family, leaves = {index}, set(scan.leaves)
        while True:
            more = {i for i, other in scans.items() if i not in family and other.leaves & leaves}
            if not more:
                break
            family |= more
            leaves |= {leaf for i in more for leaf in scans[i].leaves}
        alike = [i for i in family if scans[i].length == scan.length and i in rows]
        if alike:
            found[index] = sorted({0, *(start for i in alike for start, _ in rows[i].values())})
    return found
