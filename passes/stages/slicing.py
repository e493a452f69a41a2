"""`slice_stages`: one graph per pipeline stage from a microbatched program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn

from autopar.passes.factors.rule import FactorRule
from autopar.passes.graph import Graph
from autopar.passes.stages.accumulators import find_terms
from autopar.passes.stages.anatomy import dissect
from autopar.passes.stages.assemble import assemble
from autopar.passes.stages.conditionals import split_conditionals
from autopar.passes.stages.demand import find_demand
from autopar.passes.stages.layering import boundaries_of, layers_of
from autopar.passes.stages.placement import place
from autopar.passes.stages.program import build
from autopar.passes.stages.result import Stages


def slice_stages(
    graph: Graph,
    rules: Mapping[JaxprEqn, FactorRule],
    stages: int | Sequence[int],
    *,
    split_backward: bool = False,
) -> Stages:
    """Cut a microbatched program into pipeline stages.

    Args:
      graph: a program with a loop over microbatches (`autopar.passes.microbatch.split`).
      rules: the factor rules of its equations.
      stages: how many stages, which then have about the same FLOPs; or boundaries in layers.
      split_backward: whether weight gradients are a task of their own, W: no stage waits for it.

    Returns:
      The stages' graphs, which together compute what `graph` computes: bit for bit, except that the
      terms of a sum that are made on several stages are added up in another order.

    Raises:
      OptionError: the program has no loop over microbatches, or fewer layers than stages, or
        the boundaries are out of order or out of range.
    """
    parts = dissect(split_conditionals(graph), rules)
    found = layers_of(parts, rules, at_least=stages if isinstance(stages, int) else 1)
    boundaries = boundaries_of(found, stages)
    terms = find_terms(parts)
    program = build(parts, terms, place(parts, terms, found, boundaries))
    demand = find_demand(program, len(boundaries) + 1)
    graphs, links = assemble(program, demand, split_backward=split_backward)
    return Stages(
        graphs=graphs,
        links=links,
        forward_only=not any(task != "F" for stage in graphs for task in stage.tasks),
        layers=found,
        boundaries=boundaries,
    )
