"""What is read as a buffer: by a product or another kernel that computes nothing of it itself."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import JaxprEqn, Var

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import variables
from autopar.passes.graph.primitives import REDUCTIONS, RESHAPES, UNFUSED

_WHOLE = UNFUSED - REDUCTIONS
_VIEWS = RESHAPES - {"broadcast_in_dim"}  # a transpose is one: products read either order


def read_whole(eqns: Sequence[JaxprEqn]) -> frozenset[Var]:
    """The values that equations, in order, read so; also through views of them."""
    found = set[Var]()
    for eqn in reversed(eqns):
        is_view = eqn.primitive.name in _VIEWS and not found.isdisjoint(eqn.outvars)
        if is_view or (eqn.primitive.name in _WHOLE and not is_barrier(eqn)):
            found.update(variables(eqn.invars))
    return frozenset(found)
