"""How many floating-point operations a kernel takes, from what it says of itself or its body."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from autopar.passes.graph.graph import jaxprs_in
from autopar.passes.primitives.shardings import shape_of


def kernel_flops(eqn: JaxprEqn) -> int:
    """Floating-point operations of one evaluation of a kernel's equation.

    A Pallas kernel takes those of its cost estimate, or those of its body at every place of its
    grid. Of attention by cuDNN, the matrix products count, two of them forward and five backward.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "pallas_call":
        if params["cost_estimate"] is not None:
            return int(params["cost_estimate"].flops)
        grid = [size if isinstance(size, int) else 1 for size in params["grid_mapping"].grid]
        return math.prod(grid) * body_flops(params["jaxpr"])
    if name.startswith("dot_product_attention"):
        query, key = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
        heads_first = params["layout"] == 1
        length = key[2] if heads_first else key[1]
        return (10 if "_bwd" in name else 4) * math.prod(query) * length
    called = params["call"]
    return body_flops(called.jaxpr)


def body_flops(jaxpr: Jaxpr) -> int:
    """Floating-point operations of a kernel's body, loops as often as they run.

    A loop of unknown length is taken to go over what it reads slices of.
    """
    return sum(map(_flops, jaxpr.eqns))


def _flops(eqn: JaxprEqn) -> int:
    name, inner = eqn.primitive.name, jaxprs_in(eqn.params)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left = shape_of(eqn.invars[0])
        depth = math.prod(left[dim] for dim in contracted)
        return 2 * math.prod(shape_of(eqn.outvars[0])) * depth
    bodies = list(map(body_flops, inner))
    if name == "cond":
        return max(bodies, default=0)
    if name == "scan":
        return int(eqn.params["length"]) * sum(bodies)
    if name == "while":
        return max(map(_trips, inner)) * sum(bodies)
    if name == "pallas_call":
        return kernel_flops(eqn)
    if bodies:
        return sum(bodies)
    shapes = [getattr(var.aval, "shape", ()) for var in eqn.outvars]
    return sum(map(math.prod, shapes))


def _trips(body: Jaxpr) -> int:
    """How many slices of one size the references hold that a loop's body reads."""
    found = 1
    for eqn in body.eqns:
        if eqn.primitive.name in ("get", "masked_load"):
            whole = getattr(eqn.invars[0].aval, "shape", ())
            read: Any = shape_of(eqn.outvars[0])
            found = max(found, math.prod(whole) // max(1, math.prod(read)))
    return found
