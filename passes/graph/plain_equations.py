"""Equations that say a plain thing in a rare way, as the plain ones that passes know."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn, Var

from autopar.passes.graph import jax_compat

REDUCTIONS = {"psum": lax.reduce_sum_p, "pmax": lax.reduce_max_p, "pmin": lax.reduce_min_p}
"""What each is where its axes are dimensions of its operand, as `jax.vmap` writes it."""


def plain(eqn: JaxprEqn) -> Sequence[JaxprEqn]:
    """The equations that stand for one; mostly itself.

    A `device_put` of several arrays says of each what a `device_put` of its own would, and no pass
    has to know that none of its results depends on the others' operands. Collectives over axes of
    `jax.vmap` are reductions of dimensions, before those over axes of a mesh, if both are asked.
    A reshape in another order of its operand's dimensions is a transpose and a reshape: so
    `jax.vmap` brings what it maps over into the features or the batch of a convolution.
    Arrays without elements, of which `jax.lax.associative_scan` leaves some, are made of nothing:
    no result depends on how they came about.

    >>> import jax, jax.numpy as jnp
    >>> two = jax.make_jaxpr(lambda x: jax.device_put((x, x + 1)))(jnp.ones(3)).eqns[-1]
    >>> len(two.outvars), [len(one.outvars) for one in plain(two)]
    (2, [1, 1])
    """
    name = eqn.primitive.name
    reads = any(isinstance(atom, Var) for atom in eqn.invars) and not eqn.effects
    if reads and eqn.outvars and all(map(_is_empty, eqn.outvars)):
        return [_nothing(eqn, result) for result in eqn.outvars]
    if name == "device_put" and len(eqn.invars) > 1:
        return _one_by_one(eqn)
    if name == "reshape" and eqn.params["dimensions"] is not None:
        return _transposed(eqn)
    if name in REDUCTIONS and eqn.params.get("axis_index_groups") is None:
        dims = tuple(axis for axis in eqn.params["axes"] if isinstance(axis, int))
        names = tuple(axis for axis in eqn.params["axes"] if not isinstance(axis, int))
        return _reduced(eqn, dims, names) if dims else (eqn,)
    return (eqn,)


def _is_empty(result: Var) -> bool:
    """Whether an array of numbers has no elements."""
    dtype = result.aval.dtype
    is_plain = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    return is_plain and 0 in result.aval.shape


def _nothing(eqn: JaxprEqn, result: Var) -> JaxprEqn:
    """An equation that makes an array without elements of a number, as `jnp.zeros` does."""
    zero = jax_compat.array_type((), result.aval.dtype, result.aval.weak_type)
    shape = {"shape": result.aval.shape, "broadcast_dimensions": (), "sharding": None}
    return eqn.replace(
        primitive=lax.broadcast_in_dim_p,
        params=shape,
        invars=[jex_core.Literal(np.zeros((), result.aval.dtype), zero)],
        outvars=[result],
    )


def _reduced(eqn: JaxprEqn, dims: tuple[int, ...], names: tuple[object, ...]) -> Sequence[JaxprEqn]:
    """Reductions of dimensions, and what is left of a collective over axes of a mesh."""
    made = [jax_compat.new_var(x.aval) for x in eqn.outvars] if names else list(eqn.outvars)
    params = {"axes": dims, "out_sharding": None}
    primitive = REDUCTIONS[eqn.primitive.name]
    reduced = eqn.replace(
        primitive=primitive, params=params, outvars=made, effects=jex_core.no_effects
    )
    if not names:
        return _one_by_one(reduced)
    left = eqn.replace(invars=made, params={**eqn.params, "axes": names})
    return [*_one_by_one(reduced), left]


def _transposed(eqn: JaxprEqn) -> Sequence[JaxprEqn]:
    """A transpose of the operand, and a reshape of that in its own order."""
    (operand,), order = eqn.invars, tuple(eqn.params["dimensions"])
    plainly = {**eqn.params, "dimensions": None}
    if order == tuple(range(len(order))):
        return [eqn.replace(params=plainly)]
    of = operand.aval
    shape = tuple(of.shape[dim] for dim in order)
    turned = jax_compat.new_var(jax_compat.array_type(shape, of.dtype, of.weak_type))
    transpose = eqn.replace(
        primitive=lax.transpose_p, params={"permutation": order}, outvars=[turned]
    )
    return [transpose, eqn.replace(invars=[turned], params=plainly)]


def _one_by_one(eqn: JaxprEqn) -> list[JaxprEqn]:
    """An equation for each operand and its result, with its own part of what says where to put."""
    count = len(eqn.invars)
    if count == 1:
        return [eqn]
    several = {"devices", "srcs", "copy_semantics"} & eqn.params.keys()
    made = []
    for place, (operand, result) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
        own = {key: (eqn.params[key][place],) for key in several}
        made.append(eqn.replace(invars=[operand], outvars=[result], params={**eqn.params, **own}))
    return made
