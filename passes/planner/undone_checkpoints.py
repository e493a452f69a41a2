"""What `remat="override"` would undo of a program's own `jax.checkpoint`, by line and operation.

It undoes a checkpoint where the forward pass has computed the same in the same scope, or in a scan
that belongs to the one that computes again; a whole scan that runs again stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping

from jax.extend.core import Jaxpr, JaxprEqn

from autopar.passes.graph.graph import Graph, inner_jaxprs
from autopar.passes.graph.name_stacks import pass_of
from autopar.passes.graph.primitives import CONTROL_FLOW
from autopar.passes.recompute.override import without_checkpoints


def undone_shares(graph: Graph, key: Callable[[JaxprEqn], Hashable]) -> Mapping[Hashable, float]:
    """Of equations with one key that a checkpoint computes again, the share that is undone."""
    asked, left = (_again(x.jaxpr, key, 1) for x in (graph, without_checkpoints(graph)))
    return {name: max(0.0, 1 - left[name] / count) for name, count in asked.items()}


def _again(
    jaxpr: Jaxpr, key: Callable[[JaxprEqn], Hashable], times: int, stack: str = ""
) -> Counter[Hashable]:
    """How often a step runs them."""
    total = Counter[Hashable]()
    for eqn in jaxpr.eqns:
        inner = f"{stack}/{eqn.source_info.name_stack}"
        if eqn.primitive.name in CONTROL_FLOW:
            trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for body in inner_jaxprs(eqn):
                total += _again(body, key, times * trips, inner)
        elif pass_of(inner) == "checkpoint":
            total[key(eqn)] += times
    return total
