"""Gathers and scatters of whole rows, by one index for each, read from their equations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

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
    if eqn.primitive.name != "gather":
        return None
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    shape, indices = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    rank = len(shape)
    is_rows = (
        numbers.collapsed_slice_dims == (0,)
        and numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.offset_dims) == tuple(range(1, rank))
        and tuple(params["slice_sizes"]) == (1, *shape[1:])
        and len(indices) == 2
    )
    if not is_rows:
        return None
    fill = params["fill_value"]
    if fill is None:
        dtype = eqn.outvars[0].aval.dtype
        fill = jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else _most(dtype)
    return _indices(read(eqn.invars[1]), shape[0], params["mode"], fill)


def scattered_rows(eqn: JaxprEqn, read: Callable[[Atom], Any]) -> RowIndices | None:
    """Where `x.at[indices].add(rows)` adds; None if an equation is not of this form."""
    if eqn.primitive.name != "scatter-add":
        return None
    numbers = eqn.params["dimension_numbers"]
    shape, indices, rows = map(shape_of, eqn.invars)
    is_rows = (
        numbers.inserted_window_dims == (0,)
        and numbers.scatter_dims_to_operand_dims == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.update_window_dims) == tuple(range(1, len(shape)))
        and rows[1:] == shape[1:]
        and len(indices) == 2
    )
    return _indices(read(eqn.invars[1]), shape[0], eqn.params["mode"], 0) if is_rows else None


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
