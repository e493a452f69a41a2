"""Barriers: JAX puts one before what it computes again, so that XLA does compute it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat


def passed_by_barrier(
    operands: Sequence[Var | Literal], info: Any, eqns: list[JaxprEqn]
) -> list[Var | Literal]:
    """Rematerialized code reads its inputs after a barrier, as JAX's own lowering does."""
    invars = [atom for atom in operands if not isinstance(atom, Literal)]
    outvars = [jax_compat.new_var(var.aval) for var in invars]
    if invars:
        barrier = jax_compat.optimization_barrier_primitive()
        eqns.append(jex_core.new_jaxpr_eqn(invars, outvars, barrier, {}, jex_core.no_effects, info))
    results = iter(outvars)
    return [atom if isinstance(atom, Literal) else next(results) for atom in operands]


def is_barrier(eqn: JaxprEqn) -> bool:
    """Whether an equation passes every operand on unchanged, and XLA merges nothing across it."""
    return eqn.primitive.name == "optimization_barrier"


def part_of_barrier(eqn: JaxprEqn, places: Sequence[int]) -> JaxprEqn:
    """A barrier for some of its operands."""
    if len(places) == len(eqn.invars):
        return eqn
    invars, outvars = ([atoms[i] for i in places] for atoms in (eqn.invars, eqn.outvars))
    return eqn.replace(invars=invars, outvars=outvars)
