"""What all scopes of one lowering share."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Literal, Var

from autopar.passes.graph.graph import Atom
from autopar.passes.graph.microbatched import Task
from autopar.passes.sharding.compiler_rules import SAME_BUFFER
from autopar.passes.sharding.layout import Layout, replicated
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.scopes import aval_shape, itemsize
from autopar.passes.sharding.strategy_graph import StrategyGraph

SMALL_BYTES = 2**16
"""What is no larger, whole, stays whole behind a barrier: scales and biases."""

OTHER_FORMS = SAME_BUFFER | {"convert_element_type", "reduce_precision"}
"""What makes of a parameter another form of it."""


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

    def purpose(self, atom: Atom, source: Layout, forms: Mapping[Var, Atom]) -> str:
        """For what a value is moved.

        Args:
          atom: the value.
          source: where it is.
          forms: values that are other forms of values, and of which.
        """
        while not isinstance(atom, Literal) and atom in forms:
            atom = forms[atom]
        if isinstance(atom, Literal):
            return "state"
        if self.batch_dims.get(atom):
            return "activation"
        if atom in self.arguments:
            return "parameter"
        if source.partial:
            return "gradient" if aval_shape(atom) else "scalar"
        return "state"


def passing_layout(atom: Atom, home: Layout, versions: Mapping[Var, Collection[Layout]]) -> Layout:
    """How a value passes a barrier: as it lies at home; a small one whole, where it was gathered.

    To keep it costs nothing. Gathered once more it would be waited for, and XLA adds to that
    collective what it finds: a scale's gather, which is a sum on TPUs, was joined with sums of all
    layers' gradients, and what read it, with all that this read, stayed until then.
    """
    if isinstance(atom, Literal):
        return home
    whole = replicated(len(aval_shape(atom)))
    is_small = math.prod(aval_shape(atom)) * itemsize(atom.aval) <= SMALL_BYTES
    return whole if is_small and whole in versions.get(atom, ()) else home
