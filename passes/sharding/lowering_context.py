"""What all scopes of one lowering share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from autopar.passes.graph.microbatched import Task
from autopar.passes.sharding.layout import Layout
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.strategy_graph import StrategyGraph


@dataclass(frozen=True)
class LoweringContext:
    """The nodes with the strategies that they take, and what is known of the program.

    Args:
      built: the nodes.
      assignment: the strategy of each.
      pricing: what resharding costs.
      batch_dims: where the batch is.
      arguments: the program's inputs.
      tasks: by the equations of the loop over microbatches.
    """

    built: StrategyGraph
    assignment: Sequence[int]
    pricing: Pricing
    batch_dims: Mapping[Var, frozenset[int]]
    arguments: frozenset[Var]
    tasks: Mapping[int, Task]

    def task(self, eqn: JaxprEqn) -> Task | None:
        """The task of an equation of the loop over microbatches."""
        return self.tasks.get(id(eqn))

    def layout(self, node: int) -> Layout:
        """The layout that a node decides."""
        return self.built.nodes[node].layouts[self.assignment[node]]
