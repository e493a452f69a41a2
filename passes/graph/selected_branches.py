"""A `cond` of little work as what it is for a compiler that cuts: both results, and a choice.

An optimizer that skips steps (`optax.apply_if_finite`, `optax.MultiSteps`, a loss scale that
backs off) is a `cond` around all of its leaves. As one equation it would be on one stage, with one
account of memory for everything that it reads. As selections each leaf has a layout, a stage and a
buffer of its own, and numbers are the same: what is not chosen has no part in the result, not even
where it is NaN. `jax.vmap` writes such a choice so, and XLA where branches are small; on a GPU no
host waits for the condition. Where the update isn't chosen, it is computed all the same: a pass
over memory, which is why only branches without heavy work are taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from autopar.passes.graph import jax_compat, primitives
from autopar.passes.graph.held_constants import closed_bodies

_PASSES = frozenset({"bitcast_convert_type", "dot_general", "iota", "random_unwrap", "random_wrap"})
_PASSES |= primitives.ELEMENTWISE | primitives.RESHAPES | primitives.REDUCTIONS
MOST_PASSES = 16
"""How many values both branches may compute for each before and after them; AdamW some 6."""
DRAWN = 8  # what a random number counts
_SMALL = 1024
"""Elements of what any equation without a body may work on."""


def are_selected(eqn: JaxprEqn, branches: Sequence[ClosedJaxpr], most_flops: int = 0) -> bool:
    """Whether both branches of a `cond` are computed, and one is chosen.

    Args:
      eqn: any control flow.
      branches: its bodies, flat.
      most_flops: that their products may take, as those of Muon do (Jordan et al. 2024).
    """
    if eqn.primitive.name != "cond" or len(branches) != 2 or eqn.effects:
        return False
    if eqn.params.get("branches_platforms") is not None:  # one of them is there when it is compiled
        return False
    bodies = [branch.jaxpr for branch in branches]
    atoms = [*eqn.invars[1:], *eqn.outvars, *(var for body in bodies for var in body.constvars)]
    largest = max([_SMALL, *map(_elements, atoms)])
    if sum(map(product_flops, bodies)) > most_flops:
        return False
    passed = max(_SMALL, sum(map(_elements, {id(atom): atom for atom in atoms}.values())))
    if sum(map(_made, bodies)) > MOST_PASSES * passed:
        return False
    return all(_is_light(each, largest) for body in bodies for each in body.eqns)


def product_flops(jaxpr: Jaxpr) -> int:
    """What products of matrices take, floating-point operations; those of kernels do not count."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            sizes = [eqn.invars[0].aval.shape[dim] for dim in contracted]
            total += 2 * math.prod(sizes) * _elements(eqn.outvars[0])
        elif eqn.primitive.name in primitives.CONTROL_FLOW:
            inner = sum(product_flops(body.jaxpr) for body in closed_bodies(eqn))
            total += eqn.params.get("length", 1) * inner
    return total


def _made(jaxpr: Jaxpr) -> int:
    """Elements that are computed, those of loops as often as they run; random ones are dearer."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            total += eqn.params["length"] * _made(eqn.params["jaxpr"].jaxpr)
        else:
            each = DRAWN if eqn.primitive.name in primitives.DRAWS else 1
            total += each * sum(map(_elements, eqn.outvars))
    return total


def _is_light(eqn: JaxprEqn, largest: int) -> bool:
    """Whether an equation is a pass over no array that is larger than what is there anyway.

    Also a product, and a loop of these.
    """
    name = eqn.primitive.name
    if eqn.effects or name not in primitives.TABLE:
        return False
    if name == "scan":
        return all(_is_light(each, largest) for each in eqn.params["jaxpr"].jaxpr.eqns)
    if name in primitives.HEAVY and name != "dot_general":
        return False
    elements = max(map(_elements, (*eqn.invars, *eqn.outvars)), default=0)
    is_pass = name in _PASSES or (name in primitives.DRAWS and name != "random_gamma")
    return elements <= (largest if is_pass else _SMALL)


def _elements(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


def selections(
    eqn: JaxprEqn, index: Any, branches: Sequence[Sequence[Any]]
) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations that choose between the results of two branches.

    Args:
      eqn: the `cond`.
      index: the number of the branch.
      branches: what each results in.

    Returns:
      equations, and the atoms that stand for the results of the `cond`.
    """
    made: list[JaxprEqn] = []

    def add(primitive: Any, operands: Sequence[Any], aval: Any) -> Any:
        result = jax_compat.new_var(aval)
        made.append(
            eqn.replace(primitive=primitive, params={}, invars=list(operands), outvars=[result])
        )
        return result

    zero = jex_core.Literal(np.int32(0), jax_compat.array_type((), np.dtype(np.int32), False))
    second = add(lax.gt_p, [index, zero], jax_compat.array_type((), np.dtype(bool), False))
    results = [
        one if one is two else add(lax.select_n_p, [second, one, two], result.aval)
        for result, one, two in zip(eqn.outvars, *branches, strict=True)
    ]
    return made, results
