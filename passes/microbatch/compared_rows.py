"""Rows that are compared with what follows from the whole batch are those that it follows from.

A row equals the maximum of the batch, or it does not. Computed again by another program (in a loop,
and before it for all rows), in which it may be rounded otherwise, none might, and the gradient of
the maximum is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax.numpy as jnp
from jax.extend.core import Var

from autopar.passes.graph.graph import variables
from autopar.passes.graph.primitives import STEPS
from autopar.passes.microbatch.propagate import Forward
from autopar.passes.microbatch.several_loops import CutStep


def compared_rows(found: Forward) -> frozenset[Var]:
    """Rows that a loop takes from before it, where the whole batch is evaluated as well."""
    of_batch = {
        var
        for eqn in found.jaxpr.eqns
        for var in eqn.outvars
        if _is_of_batch(found, var) and any(found.state(x).kind == "split" for x in eqn.invars)
    }
    return frozenset(var for var in _compared(found, of_batch) if found.states[var].early)


def rows_to_compare(before: Forward, rest: Forward, cut: CutStep) -> list[Var]:
    """Rows of the first loop that the rest compares with what follows from the whole batch."""
    of_batch = {var for var in _made_from(rest, cut.held) if _is_of_batch(rest, var)}
    return [
        var
        for var in dict.fromkeys(_compared(rest, of_batch))
        if var not in cut.held
        and not rest.states[var].early
        and var in before.states
        and before.states[var].kind == "split"
    ]


def _is_of_batch(found: Forward, var: Var) -> bool:
    return found.states[var].kind == "whole" and found.states[var].batch


def _made_from(found: Forward, values: Iterable[Var]) -> set[Var]:
    """These values, and what is made from any of them."""
    made = set(values)
    for eqn in found.jaxpr.eqns:
        if not made.isdisjoint(variables(eqn.invars)):
            made.update(eqn.outvars)
    return made


def _compared(found: Forward, of_batch: Iterable[Var]) -> Iterator[Var]:
    """The rows that are compared with something else which is made from values of the batch.

    Integers are the same however often they are computed.
    """
    made = _made_from(found, of_batch)
    for eqn in found.jaxpr.eqns if made else ():
        operands = variables(eqn.invars)
        if eqn.primitive.name not in STEPS or made.isdisjoint(operands):
            continue
        for var in operands:
            is_float = jnp.issubdtype(var.aval.dtype, jnp.inexact)
            others = (x for x in operands if x is not var)
            if is_float and found.states[var].kind == "split" and not made.isdisjoint(others):
                yield var
