"""Evaluate one equation on slices of its operands: what a microbatch or a device computes.

`bind_local` takes local operands and how each dimension is cut, rewrites the params that hold
shapes or positions, and binds the primitive: the result is the slice of the global result, or,
where a reduced dimension is cut, its partial sum (maximum, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from autopar.base.errors import AutoparError
from autopar.passes.primitives.cuts import (
    Binder,
    Cuts,
    LocalCall,
    NotLocalError,
    bind_with,
    local_shape,
)
from autopar.passes.primitives.kernels import KERNEL_REWRITES
from autopar.passes.primitives.local_rewrites import REWRITES
from autopar.passes.primitives.shardings import shape_of, whole_dims


def bind_local(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    operand_cuts: Sequence[Cuts],
    result_cuts: Sequence[Cuts],
    binder: Binder = bind_with,
) -> list[Any]:
    """Evaluate an equation on slices.

    Args:
      eqn: the global equation (not control flow).
      operands: its local operands, a literal as its value.
      operand_cuts: how each operand is cut, one entry per dimension.
      result_cuts: how each result shall be cut.
      binder: evaluates it, as it is or with some params changed.

    Returns:
      The local results. Where a reduced dimension is cut, they are partial: combining those of
      all indices with the reduction's monoid gives the whole.

    Raises:
      NotLocalError: these slices do not determine the local results.
    """
    if not any(cut for cuts in (*operand_cuts, *result_cuts) for cut in cuts):
        return binder(eqn, operands, {})
    whole_operands, whole_results = whole_dims(eqn)
    for cuts, dims in zip(
        (*operand_cuts, *result_cuts), (*whole_operands, *whole_results), strict=True
    ):
        if any(cuts[dim] for dim in dims):
            raise NotLocalError(f"{eqn.primitive} needs dimensions {dims} whole: {eqn}")
    name = eqn.primitive.name
    rewrite = REWRITES.get(name) or KERNEL_REWRITES.get(name)
    shapes = [
        local_shape(shape_of(var), cuts) for var, cuts in zip(eqn.outvars, result_cuts, strict=True)
    ]
    try:
        call = LocalCall(eqn, operands, operand_cuts, result_cuts, binder)
        results = call.bind() if rewrite is None else rewrite(call)
    except AutoparError:  # what is wrong there is the user's to know
        raise
    except (TypeError, ValueError) as error:
        raise NotLocalError(f"{eqn.primitive} does not fit these slices: {error}") from error
    for result, shape in zip(results, shapes, strict=True):
        if np.shape(result) != shape:
            raise NotLocalError(f"{eqn.primitive} gives {np.shape(result)} instead of {shape}")
    return results
