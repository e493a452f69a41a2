"""What loops add up: it may stay unreduced until the loop has ended."""

from __future__ import annotations

import math

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph.scans import ScanParts
from autopar.passes.primitives.linearity import linear_operands
from autopar.passes.sharding.scopes import aval_shape


def accumulates(eqn: JaxprEqn, carry: int) -> bool:
    """Whether a scan's carry may stay unreduced: the body adds to it and does nothing else."""
    scan = ScanParts.of(eqn)
    body = scan.body
    var = scan.operands(body.invars)[1][carry]
    result = body.outvars[carry]
    readers = [e for e in body.eqns if any(v is var for v in e.invars)]
    if len(readers) != 1 or isinstance(result, Literal):
        return False
    reader = readers[0]
    position = next(i for i, v in enumerate(reader.invars) if v is var)
    return reader.outvars[0] is result and any(
        position in operands and len(operands) > 1 for operands in linear_operands(reader)
    )


def starts_of_sums(jaxpr: Jaxpr) -> set[Var]:
    """What the jaxpr's loops begin to add to, but for scalars: mostly zeros."""
    found: set[Var] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            _, starts, _ = ScanParts.of(eqn).operands(eqn.invars)
            for carry, atom in enumerate(starts):
                is_array = not isinstance(atom, Literal) and math.prod(aval_shape(atom)) > 1
                if is_array and accumulates(eqn, carry):
                    found.add(atom)
    return found
