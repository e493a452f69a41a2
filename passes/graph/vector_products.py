"""Products of vectors, written as the sums that XLA:GPU computes for them.

Where one operand of a product has no dimension of its own (a matrix times a vector, for each row of
a batch), XLA multiplies element by element and adds up, in one kernel that computes its operands
itself; where nothing is added up, it only multiplies. So the weights of a mixture's dispatch meet a
mask of tokens, experts and places that is never in memory. Written so, every pass knows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom, Graph, map_inner_jaxprs, read_atom, with_jaxpr
from autopar.passes.graph.primitives import CONTROL_FLOW

MOST_ELEMENTS = 10_000_000
"""Of a matrix that meets a vector, as XLA counts them: what has more is a product.

Found by compiling for an H100 with jaxlib 0.10.2: 2048 by 4096 are a sum, 3072 by 4096 for each of
four rows and 8192 by 4096 are not; two vectors are one of any length (60 million elements). In XLA
that is `ShouldStrengthReduceDotToReduce`, whose limit is not the same in every version.
"""

_HALVES = (jnp.bfloat16, jnp.float16)
_PLAIN = (*_HALVES, jnp.float32, jnp.float64)


def with_sums_for_vectors(graph: Graph) -> Graph:
    """The same program, whose products of vectors are sums of products of elements."""
    jaxpr = _rewritten(graph.jaxpr)
    return graph if jaxpr is graph.jaxpr else with_jaxpr(graph, jaxpr)


def _rewritten(jaxpr: Jaxpr) -> Jaxpr:
    eqns, env = list[JaxprEqn](), dict[Var, Atom]()
    for eqn in jaxpr.eqns:
        operands = [read_atom(env, atom) for atom in eqn.invars]
        if any(new is not old for new, old in zip(operands, eqn.invars, strict=True)):
            eqn = eqn.replace(invars=operands)
        if eqn.primitive.name in CONTROL_FLOW:
            params = map_inner_jaxprs(eqn.params, _rewritten)
            if any(_changed(params[key], eqn.params[key]) for key in params):
                eqn = eqn.replace(params=params)
        if is_vector_product(eqn):
            made = _inlined(eqn)
            env[eqn.outvars[0]] = made[-1].outvars[0]
            eqns += made
        else:
            eqns.append(eqn)
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=False)):
        return jaxpr
    return jaxpr.replace(eqns=eqns, outvars=[read_atom(env, atom) for atom in jaxpr.outvars])


def _changed(new: Any, old: Any) -> bool:
    """Whether a body of control flow, or one of several, is another."""
    if isinstance(new, tuple):
        return any(map(_changed, new, old))
    if isinstance(new, ClosedJaxpr):
        return new.jaxpr is not old.jaxpr
    return isinstance(new, Jaxpr) and new is not old


def is_vector_product(eqn: JaxprEqn) -> bool:
    """Whether XLA:GPU computes a product element by element.

    >>> product = lambda spec, *shapes: jax.make_jaxpr(lambda x, y: jnp.einsum(spec, x, y))(
    ...     *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).eqns[-1]
    >>> is_vector_product(product("btkc,btk->btc", (2, 8, 6, 4), (2, 8, 6)))
    True
    >>> is_vector_product(product("bik,bkj->bij", (2, 8, 6), (2, 6, 4)))
    False
    """
    if eqn.primitive.name != "dot_general" or eqn.params.get("out_sharding") is not None:
        return False
    if not isinstance(eqn.params.get("precision"), (tuple, lax.Precision, type(None))):
        return False  # an algorithm of its own
    dtypes = [atom.aval.dtype for atom in (*eqn.invars, *eqn.outvars)]
    if not all(dtype in _PLAIN for dtype in dtypes):
        return False
    added, free = _sizes(eqn)
    if not min(added, *free):
        return False
    is_small = added * sum(free) < MOST_ELEMENTS
    return added == 1 or max(free) == 1 or (min(free) == 1 and is_small)


def _dims(eqn: JaxprEqn) -> list[tuple[Sequence[int], Sequence[int], list[int]]]:
    """Of each operand: the dimensions that are added up, those of the batch, and its own."""
    summed, batches = eqn.params["dimension_numbers"]
    return [
        (
            summed[i],
            batches[i],
            [d for d in range(x.aval.ndim) if d not in (*summed[i], *batches[i])],
        )
        for i, x in enumerate(eqn.invars)
    ]


def _sizes(eqn: JaxprEqn) -> tuple[int, list[int]]:
    """How many are added up, and how many elements each operand has of its own, for one row."""
    shapes, kinds = [x.aval.shape for x in eqn.invars], _dims(eqn)
    added = math.prod(shapes[0][dim] for dim in kinds[0][0])
    pairs = zip(shapes, kinds, strict=True)
    return added, [math.prod(shape[dim] for dim in own) for shape, (_, _, own) in pairs]


def _inlined(eqn: JaxprEqn) -> list[JaxprEqn]:
    """The equations that add up, whose last makes a variable of its own."""
    structs = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    traced = jax.make_jaxpr(lambda x, y: _added(eqn, x, y))(*structs).jaxpr
    env: dict[Var, Atom] = dict(zip(traced.invars, eqn.invars, strict=True))
    made = []
    for inner in traced.eqns:
        results = [jax_compat.new_var(var.aval) for var in inner.outvars]
        operands = [read_atom(env, atom) for atom in inner.invars]
        env.update(zip(inner.outvars, results, strict=True))
        info = {"source_info": eqn.source_info, "ctx": eqn.ctx}
        made.append(inner.replace(invars=operands, outvars=results, **info))
    aval = eqn.outvars[0].aval
    if made[-1].outvars[0].aval.weak_type != aval.weak_type:
        cast = lax.convert_element_type_p
        params = {"new_dtype": aval.dtype, "weak_type": aval.weak_type, "sharding": None}
        operands, results = [*made[-1].outvars], [jax_compat.new_var(aval)]
        made.append(
            made[-1].replace(primitive=cast, params=params, invars=operands, outvars=results)
        )
    return made


def _added(eqn: JaxprEqn, *operands: jax.Array) -> jax.Array:
    """A product as a sum over dimensions of the larger operand, in the order that it has."""
    dtype = np.dtype(eqn.outvars[0].aval.dtype)
    added, free = _sizes(eqn)
    wide = jnp.promote_types(dtype, jnp.float32) if added > 1 and dtype in _HALVES else dtype
    values = [lax.convert_element_type(x, wide) for x in operands]
    first = 1 if free[1] > free[0] else 0
    kinds = _dims(eqn)
    summed, batches, own = kinds[first]
    other_summed, other_batches, other_own = kinds[1 - first]
    x, y = values[first], values[1 - first]
    # The dimensions of the product: those of the larger operand, then the other one's own.
    places = dict(zip((*other_summed, *other_batches), (*summed, *batches), strict=True))
    places.update((dim, x.ndim + n) for n, dim in enumerate(other_own))
    shape = (*x.shape, *(y.shape[dim] for dim in other_own))
    order = sorted(range(y.ndim), key=places.__getitem__)
    y = lax.transpose(y, order) if order != [*range(y.ndim)] else y
    y = lax.broadcast_in_dim(y, shape, tuple(places[dim] for dim in order))
    x = lax.broadcast_in_dim(x, shape, tuple(range(x.ndim))) if shape != x.shape else x
    made = lax.reduce(x * y, np.zeros((), wide), lax.add, [*summed]) if summed else x * y
    left = [dim for dim in range(len(shape)) if dim not in summed]
    others = [operands[first].ndim + n for n in range(len(other_own))]
    wanted = [*batches, *(own + others if first == 0 else others + own)]
    turned = [left.index(dim) for dim in wanted]
    made = lax.transpose(made, turned) if turned != [*range(len(turned))] else made
    return lax.convert_element_type(made, dtype)
