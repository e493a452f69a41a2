"""What loops add up: it may stay unreduced until the loop has ended."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph.graph import Atom
from autopar.passes.graph.scans import ScanParts
from autopar.passes.primitives.linearity import linear_operands
from autopar.passes.sharding.scopes import aval_shape


def accumulating(eqn: JaxprEqn) -> tuple[bool, ...]:
    """Which of a scan's carries may stay unreduced: the body adds to them and does nothing else."""
    scan = ScanParts.of(eqn)
    body = scan.body
    carries = scan.operands(body.invars)[1]
    readers: dict[Var, list[JaxprEqn]] = {var: [] for var in carries}
    for inner in body.eqns:
        for var in dict.fromkeys(v for v in inner.invars if not isinstance(v, Literal)):
            if var in readers:
                readers[var].append(inner)
    return tuple(
        len(readers[var]) == 1 and _adds(readers[var][0], var, result)
        for var, result in zip(carries, body.outvars[: len(carries)], strict=True)
    )


def _adds(reader: JaxprEqn, var: Var, result: Atom) -> bool:
    """Whether the one equation that reads a carry gives its result by adding to it."""
    if isinstance(result, Literal) or result not in reader.outvars[:1]:  # a callback has none
        return False
    position = next(i for i, v in enumerate(reader.invars) if v is var)
    return any(position in o and len(o) > 1 for o in linear_operands(reader))


def whole_inside(scan: ScanParts, whole: Sequence[bool]) -> set[Var]:
    """What every device holds whole in a scan's body, of operands that it does so outside.

    Not carries that are made from other operands: a few zeros at the beginning would keep whole
    what takes their place in each trip, a recurrent state or an advantage for each row.
    """
    operands = list(zip(scan.body.invars, whole, strict=True))
    made = {var for var, is_whole in operands if not is_whole and math.prod(aval_shape(var)) > 1}
    carries = scan.operands(scan.body.invars)[1]
    carried = list(zip(carries, scan.results(scan.body.outvars)[0], strict=True))
    count = -1
    while count != len(made):
        count = len(made)
        for eqn in scan.body.eqns:
            if any(not isinstance(v, Literal) and v in made for v in eqn.invars):
                made.update(eqn.outvars)
        made.update(v for v, atom in carried if not isinstance(atom, Literal) and atom in made)
    return {var for var, is_whole in operands if is_whole and not (var in made and var in carries)}


def starts_of_sums(jaxpr: Jaxpr) -> set[Var]:
    """What the jaxpr's loops begin to add to, but for scalars: mostly zeros."""
    found: set[Var] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            _, starts, _ = ScanParts.of(eqn).operands(eqn.invars)
            for atom, is_sum in zip(starts, accumulating(eqn), strict=True):
                is_array = not isinstance(atom, Literal) and math.prod(aval_shape(atom)) > 1
                if is_array and is_sum:
                    found.add(atom)
    return found
