"""Equations that say a plain thing in a rare way, as the plain ones that passes know."""

from __future__ import annotations

from collections.abc import Sequence

from jax import lax
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

REDUCTIONS = {"psum": lax.reduce_sum_p, "pmax": lax.reduce_max_p, "pmin": lax.reduce_min_p}
"""What each is where its axes are dimensions of its operand, as `jax.vmap` writes it."""


def plain(eqn: JaxprEqn) -> Sequence[JaxprEqn]:
    """The equations that stand for one; mostly itself.

    A `device_put` of several arrays says of each what a `device_put` of its own would, and no pass
    has to know that none of its results depends on the others' operands. Collectives over axes of
    `jax.vmap` are reductions of dimensions.

    >>> import jax, jax.numpy as jnp
    >>> two = jax.make_jaxpr(lambda x: jax.device_put((x, x + 1)))(jnp.ones(3)).eqns[-1]
    >>> len(two.outvars), [len(one.outvars) for one in plain(two)]
    (2, [1, 1])
    """
    name = eqn.primitive.name
    if name == "device_put" and len(eqn.invars) > 1:
        return _one_by_one(eqn)
    if name in REDUCTIONS and _is_of_dimensions(eqn):
        params = {"axes": tuple(eqn.params["axes"]), "out_sharding": None}
        whole = eqn.replace(primitive=REDUCTIONS[name], params=params, effects=jex_core.no_effects)
        return _one_by_one(whole)
    return (eqn,)


def _is_of_dimensions(eqn: JaxprEqn) -> bool:
    """Whether a collective is over dimensions of its operands, all of each, and no mesh axis."""
    axes, groups = eqn.params["axes"], eqn.params.get("axis_index_groups")
    return groups is None and all(isinstance(axis, int) for axis in axes)


def _one_by_one(eqn: JaxprEqn) -> list[JaxprEqn]:
    """An equation for each operand and its result; of lists in the params, each has its own."""
    count = len(eqn.invars)
    if count == 1:
        return [eqn]
    several = {"devices", "srcs", "copy_semantics"} & eqn.params.keys()
    made = []
    for place, (operand, result) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
        own = {key: (eqn.params[key][place],) for key in several}
        made.append(eqn.replace(invars=[operand], outvars=[result], params={**eqn.params, **own}))
    return made
