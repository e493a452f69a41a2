"""Integers and booleans of rows, computed here as a program would."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.primitives.shardings import shape_of


def lead_after(eqn: JaxprEqn, lead: int, rows: int) -> int | None:
    """How many first dimensions of the result are those of rows; None: it mixes them.

    Args:
      eqn: elementwise, or one that only changes the shape.
      lead: how many first dimensions of the operands are those of rows.
      rows: how many rows.
    """
    name, (result,) = eqn.primitive.name, eqn.outvars
    shape = shape_of(result)
    if name in ELEMENTWISE:
        return lead
    if name == "broadcast_in_dim":
        dims = tuple(eqn.params["broadcast_dimensions"])
        is_kept = dims[:lead] == tuple(range(lead))
        return lead if is_kept and math.prod(shape[:lead]) == rows else None
    if name in ("reshape", "squeeze"):
        rest = math.prod(shape_of(eqn.invars[0])[lead:])
        for after in range(1, len(shape) + 1):
            if math.prod(shape[:after]) == rows and math.prod(shape[after:]) == rest:
                return after
    return None


def evaluated(eqn: JaxprEqn, operands: Sequence[Any], lead: int, rows: int | None) -> Any:
    """An equation on operands with so many rows; None: it is not one of the few kinds.

    Args:
      eqn: elementwise, or one that only changes the shape.
      operands: with one dimension of rows in place of the first `lead`, and with dimensions of
        size 1 where all elements are equal.
      lead: how many dimensions of the equation's are those of rows.
      rows: how many there are; None, with `lead` 0: none.
    """
    name, shape = eqn.primitive.name, shape_of(eqn.outvars[0])
    first = 0 if rows is None else 1
    if name in ELEMENTWISE:
        compute = _COMPUTE.get(name)
        ranks = {np.ndim(x) for x in operands if np.ndim(x)}
        if compute is None or len(ranks) > 1:
            return None
        pairs = zip(operands, eqn.invars, strict=True)
        arrays = [np.asarray(x).astype(atom.aval.dtype, copy=False) for x, atom in pairs]
        is_exact = all(x.dtype.kind in "bui" for x in arrays)
        if not is_exact and name not in _ANY_DTYPE:
            return None
        if not is_exact and eqn.outvars[0].aval.dtype.kind in "iu":
            return None  # XLA rounds and saturates in its own way
        if len(arrays) > MOST_CASES:
            return None
        with np.errstate(over="ignore", divide="ignore"):  # as XLA wraps
            return np.asarray(compute(*arrays)).astype(eqn.outvars[0].aval.dtype, copy=False)
    value = np.asarray(operands[0])
    if name == "broadcast_in_dim":
        dims = [int(d) for d in eqn.params["broadcast_dimensions"]]
        target = [1] * (len(shape) - lead + first)
        if first:
            target[0] = value.shape[0] if value.ndim else 1
        kept = zip(dims[lead:], value.shape[first:] if value.ndim else (), strict=False)
        for dim, size in kept:
            target[dim - lead + first] = size
        return value.reshape(target)
    if name in ("reshape", "squeeze"):
        if math.prod(value.shape[first:]) == 1:
            after = lead if rows is None else lead_after(eqn, lead, _rows_of(eqn, lead))
            ones = (1,) * (len(shape) - (after or 0))
            return value.reshape(*value.shape[:first], *ones)
        if rows is None and value.shape == shape_of(eqn.invars[0]):
            return value.reshape(shape)
    return None


def _rows_of(eqn: JaxprEqn, lead: int) -> int:
    return math.prod(shape_of(eqn.invars[0])[:lead])


def _quotient(x: np.ndarray, y: np.ndarray) -> Any:
    """Rounded towards zero."""
    if np.min(x, initial=0) >= 0 and np.min(y, initial=1) > 0:
        return x // y
    safe = np.where(y == 0, np.ones_like(y), y)
    down = x // safe
    exact = np.where((x % safe != 0) & (down < 0), down + 1, down)
    return np.where(y == 0, -np.ones_like(exact), exact)


def _selected(which: np.ndarray, *cases: np.ndarray) -> Any:
    """One of the cases for each element; of two, as is usual, several times as fast."""
    if which.dtype == bool and len(cases) == 2:
        return np.where(which, cases[1], cases[0])
    return np.choose(which.astype(np.intp), cases)


MOST_CASES = 30
"""Of a selection, as NumPy has it."""

_COMPUTE: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "convert_element_type": lambda x: x,
    "copy": lambda x: x,
    "div": _quotient,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "name": lambda x: x,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.bitwise_not,
    "or": np.bitwise_or,
    "rem": lambda x, y: x - y * _quotient(x, y),
    "select_n": _selected,
    "sign": np.sign,
    "square": np.square,
    "stop_gradient": lambda x: x,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
"""Elementwise operations on integers and booleans, as XLA computes them."""
_ANY_DTYPE = frozenset({"convert_element_type", "copy", "name", "select_n", "stop_gradient"})
