"""Arrays that inner jaxprs hold: they become the outermost program's own, passed down as operands.

JAX keeps what a function closes over in the `jit` equation that calls it, at any depth. What is
closed over twice is one array.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.scans import ScanParts, WhileParts


class HeldConstants:
    """The constants of one jaxpr in the making, each array once."""

    def __init__(self, closed: ClosedJaxpr):
        self._known = {
            id(value): (var, value)
            for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True)
        }

    def atom(self, value: Any, aval: Any) -> Any:
        """What stands for a constant: a literal for a number, a variable for an array."""
        if not aval.shape and not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
            return jex_core.Literal(value, aval)
        if id(value) not in self._known:
            self._known[id(value)] = (jax_compat.new_var(aval), value)
        return self._known[id(value)][0]

    def atoms(self, closed: ClosedJaxpr) -> list[Any]:
        """What stands for each constant of an inner jaxpr."""
        pairs = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        return [self.atom(value, var.aval) for var, value in pairs]

    @property
    def variables(self) -> list[Var]:
        return [var for var, _ in self._known.values()]

    @property
    def values(self) -> list[Any]:
        return [value for _, value in self._known.values()]


def closed_bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The bodies of a control-flow equation, of a while loop the condition first."""
    params = eqn.params
    if eqn.primitive.name == "while":
        return [params["cond_jaxpr"], params["body_jaxpr"]]
    return list(params["branches"]) if eqn.primitive.name == "cond" else [params["jaxpr"]]


def passed_down(
    eqn: JaxprEqn, operands: Sequence[Any], bodies: Sequence[ClosedJaxpr], held: HeldConstants
) -> tuple[list[Any], dict[str, Any]]:
    """Operands and params of control flow, where what its bodies hold becomes an operand.

    `bodies` are its new ones, in the order of `closed_bodies`.
    """
    params = dict(eqn.params)
    leading = [held.atoms(body) for body in bodies]
    if eqn.primitive.name == "scan":
        (body,), (arrays,) = map(_opened, bodies), leading
        scan = ScanParts.of(eqn)
        params["jaxpr"] = body
        if arrays:
            num_consts = len(arrays) + scan.num_consts
            params = jax_compat.scan_params(params, body, num_consts, scan.num_carry)
        return [*arrays, *operands], params
    if eqn.primitive.name == "while":
        loop = WhileParts.of(eqn)
        tested, consts, carry = loop.operands(operands)
        condition, body = map(_opened, bodies)
        params |= {
            "cond_jaxpr": condition,
            "body_jaxpr": body,
            "cond_nconsts": len(leading[0]) + loop.num_condition_consts,
            "body_nconsts": len(leading[1]) + loop.num_body_consts,
        }
        return [*leading[0], *tested, *leading[1], *consts, *carry], params
    assert eqn.primitive.name == "cond", eqn
    index, *read = operands
    branches = []
    for body in bodies:  # what one branch holds is an operand of all
        variables = [
            other.jaxpr.constvars
            if other is body
            else [jax_compat.new_var(var.aval) for var in other.jaxpr.constvars]
            for other in bodies
        ]
        branches.append(_opened(body, list(itertools.chain(*variables))))
    return [index, *itertools.chain(*leading), *read], params | {"branches": tuple(branches)}


def _opened(closed: ClosedJaxpr, leading: Sequence[Var] | None = None) -> ClosedJaxpr:
    """A body that takes what it held as its first inputs."""
    jaxpr = closed.jaxpr
    invars = [*(jaxpr.constvars if leading is None else leading), *jaxpr.invars]
    if len(invars) == len(jaxpr.invars):
        return closed
    return ClosedJaxpr(jax_compat.replace_jaxpr(jaxpr, constvars=[], invars=invars), ())
