"""Gathers and scatters of whole rows, by one index for each, read from their equations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from autopar.passes.experts.row_by_row import puts_rows, takes_rows
from autopar.passes.graph.graph import Atom
from autopar.passes.primitives.shardings import shape_of


@dataclass(frozen=True)
class RowIndices:
    """The rows that an equation picks, and which of them there are.

    Those that are not there are row 0 here. If it `clips` they are the first or the last row;
    else a gather has `fill` in their place.
    """

    rows: Any
    are_rows: Any
    clips: bool
    fill: Any = 0


def gathered_rows(eqn: JaxprEqn, read: Callable[[Atom], Any]) -> RowIndices | None:
    """What `x[indices]` picks of the rows of x; None if an equation is not of this form."""
    if eqn.primitive.name != "gather" or not takes_rows(eqn):
        return None
    params, shape = eqn.params, shape_of(eqn.invars[0])
    fill = params["fill_value"]
    if fill is None:
        dtype = eqn.outvars[0].aval.dtype
        fill = jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else _most(dtype)
    return _indices(read(eqn.invars[1]), shape[0], params["mode"], fill)


def scattered_rows(eqn: JaxprEqn, read: Callable[[Atom], Any]) -> RowIndices | None:
    """Where `x.at[indices].add(rows)` adds; None if an equation is not of this form."""
    if eqn.primitive.name != "scatter-add" or not puts_rows(eqn):
        return None
    return _indices(read(eqn.invars[1]), shape_of(eqn.invars[0])[0], eqn.params["mode"], 0)


def _indices(indices: Any, rows: int, mode: Any, fill: Any) -> RowIndices:
    index = indices[:, 0]
    inside = (index >= 0) & (index < rows)
    if mode == GatherScatterMode.FILL_OR_DROP:
        return RowIndices(jnp.where(inside, index, 0).astype(jnp.int32), inside, False, fill)
    clipped = jnp.clip(index, 0, rows - 1).astype(jnp.int32)
    return RowIndices(clipped, jnp.ones_like(inside), True)


def _most(dtype: Any) -> Any:
    """What JAX fills arrays of integers with: the least signed number, the largest unsigned one."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    bounds = jnp.iinfo(dtype)
    return bounds.min if jnp.issubdtype(dtype, jnp.signedinteger) else bounds.max
