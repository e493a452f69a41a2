"""Between what the integers of a program are: indices of the largest, of places, of choices."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var
from jax.lax import GatherScatterMode

from autopar.passes.graph.graph import Atom
from autopar.passes.graph.primitives import RESHAPES
from autopar.passes.primitives.shardings import shape_of

Bounds = Callable[[Atom], tuple[int, int] | None]
_SAME = RESHAPES | {"concatenate", "copy", "gather", "name", "rev", "slice", "stop_gradient"}
"""Their results have elements of their operands, or of the first."""


def bounds_of(eqn: JaxprEqn, bounds: Bounds) -> dict[Var, tuple[int, int]]:
    """Of integers that an equation makes: the least that there can be, and one more than the most.

    Args:
      eqn: any equation.
      bounds: of its operands, as far as they are known.
    """
    name = eqn.primitive.name
    if name in ("top_k", "argmax", "argmin"):
        axis = eqn.params["axis"] if name == "top_k" else eqn.params["axes"][0]
        return {eqn.outvars[-1]: (0, shape_of(eqn.invars[0])[axis])}
    if name == "iota":
        return {eqn.outvars[0]: (0, eqn.params["shape"][eqn.params["dimension"]])}
    if name in ("sort", "optimization_barrier"):
        pairs = zip(eqn.outvars, map(bounds, eqn.invars), strict=True)
        return {var: found for var, found in pairs if found is not None}
    if len(eqn.outvars) != 1:
        return {}
    (var,) = eqn.outvars
    if not jnp.issubdtype(getattr(var.aval, "dtype", np.float32), jnp.integer):
        return {}
    operands = eqn.invars[1:] if name == "select_n" else eqn.invars
    if name == "gather":
        if eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP:
            return {}
        operands = eqn.invars[:1]
    found = [bounds(atom) for atom in operands]
    known = [x for x in found if x is not None]
    if not known or len(known) < len(found):
        return {}
    if name in ("max", "min"):
        pick = max if name == "max" else min
        return {var: (pick(x[0] for x in known), pick(x[1] for x in known))}
    if name in _SAME or name == "select_n":
        return {var: (min(x[0] for x in known), max(x[1] for x in known))}
    if name == "convert_element_type":
        info = jnp.iinfo(var.aval.dtype)
        fits = info.min <= known[0][0] and known[0][1] - 1 <= info.max
        return {var: known[0]} if fits else {}
    if name == "clamp":
        low, value, high = known
        least = min(max(low[0], value[0]), high[0])
        return {var: (least, min(max(low[1], value[1]), high[1]))}
    if name == "rem" and known[0][0] >= 0 and known[1][0] > 0:
        return {var: (0, min(known[0][1], known[1][1] - 1))}
    return {}
