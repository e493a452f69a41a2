"""Rows that are compared with what the whole batch makes of them are the same, bit by bit.

A row equals the maximum of the batch, or it does not. Computed again by another program (in a loop,
and before it for all rows), in which it may be rounded otherwise, none might, and the gradient of
the maximum is lost. So the loop is given what the maximum was taken of. Not so inside of a scan's
body, and what `jax.checkpoint` computes again is computed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var

from autopar.passes.graph.graph import variables
from autopar.passes.graph.primitives import CASTS, RESHAPES, STEPS
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
    pairs = [pair for pair in _compared(found, of_batch) if found.states[pair[0]].early]
    if not pairs:
        return frozenset()
    makers = _Makers(found.jaxpr, [var for var, _ in pairs])
    told = _spread(found.jaxpr, {var: makers.of(var) for var in of_batch})
    return frozenset(var for var, other in pairs if makers.own(var) & told.get(other, 0))


def rows_to_compare(before: Forward, rest: Forward, cut: CutStep) -> list[Var]:
    """Rows of the first loop that the rest compares with what follows from the whole batch."""
    later = _spread(rest.jaxpr, dict.fromkeys(cut.held, 1))
    of_batch = {var for var in later if _is_of_batch(rest, var)}
    pairs = [
        (var, other)
        for var, other in _compared(rest, of_batch)
        if var not in cut.held
        and not rest.states[var].early
        and var in before.states
        and before.states[var].kind == "split"
    ]
    makers = _Makers(before.jaxpr, [var for var, _ in pairs])
    kept = dict(zip(cut.held, cut.kept, strict=True))
    told = _spread(rest.jaxpr, {held: makers.of(var) for held, var in kept.items()})
    return list(dict.fromkeys(var for var, other in pairs if makers.own(var) & told.get(other, 0)))


class _Makers:
    """Which of some rows each value of a program is made from: sets of them, as bits of a number.

    What moves a row's elements, or casts them, makes the same rows.
    """

    def __init__(self, jaxpr: Jaxpr, rows: Sequence[Var]) -> None:
        self._same: dict[Var, Var] = {}
        for eqn in jaxpr.eqns if rows else ():
            if eqn.primitive.name in RESHAPES | CASTS and isinstance(eqn.invars[0], Var):
                self._same[eqn.outvars[0]] = self._root(eqn.invars[0])
        self._bits = dict[Var, int]()
        for var in map(self._root, rows):
            self._bits.setdefault(var, 1 << len(self._bits))
        self._of = _spread(jaxpr, self._bits)

    def _root(self, var: Var) -> Var:
        return self._same.get(var, var)

    def own(self, row: Var) -> int:
        """A row's own bit."""
        return self._bits[self._root(row)]

    def of(self, var: Var) -> int:
        """The rows that a value is made from."""
        return self._of.get(var, 0)


def _spread(jaxpr: Jaxpr, sets: Mapping[Var, int]) -> dict[Var, int]:
    """Sets of some values, as bits of a number, and of what is made from these: their unions."""
    found = dict(sets)
    for eqn in jaxpr.eqns if found else ():
        made = 0
        for var in variables(eqn.invars):
            made |= found.get(var, 0)
        for var in eqn.outvars if made else ():
            found[var] = made | found.get(var, 0)
    return found


def _is_of_batch(found: Forward, var: Var) -> bool:
    return found.states[var].kind == "whole" and found.states[var].batch


def _compared(found: Forward, of_batch: Iterable[Var]) -> Iterator[tuple[Var, Var]]:
    """Rows, each with something else that it is compared with and that follows from the batch.

    Integers are the same however often they are computed.
    """
    made = _spread(found.jaxpr, dict.fromkeys(of_batch, 1))
    for eqn in found.jaxpr.eqns if made else ():
        if eqn.primitive.name not in STEPS:
            continue
        for var, other in itertools.permutations(variables(eqn.invars), 2):
            is_float = jnp.issubdtype(var.aval.dtype, jnp.inexact)
            if (
                is_float
                and found.states[var].kind == "split"
                and other in made
                and var is not other
            ):
                yield var, other
