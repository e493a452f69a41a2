"""Programs that a user traces under a mesh of their own, as the same programs on logical shapes.

`jax.set_mesh` puts a mesh into the context: values then carry it in their types, with Explicit axes
even a sharding, and operations prescribe shardings. None of that changes a number, and here it all
goes: how a program is sharded is what autopar decides.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.sharding import AbstractMesh, AxisType

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import inner_jaxprs, map_inner_jaxprs

_SHARDING_PARAMS = {"sharding", "out_sharding"}


def logical_shapes() -> AbstractContextManager[Any]:
    """Within it, all axes of a mesh that the user has set are Auto: types hold no sharding.

    The mesh itself stays, so that `with_sharding_constraint(x, P("data"))` finds its axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return nullcontext()
    auto = AbstractMesh(mesh.axis_sizes, mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names))
    return jax.sharding.use_abstract_mesh(auto)


def no_mesh() -> AbstractContextManager[Any]:
    """Within it, there is no mesh in the context."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def without_mesh(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose types hold no mesh and whose operations prescribe no sharding."""
    if jax.sharding.get_abstract_mesh().empty and not _holds_mesh(closed.jaxpr):
        return closed
    with no_mesh():
        return ClosedJaxpr(_without_mesh(closed.jaxpr), closed.consts)


def _without_mesh(jaxpr: Jaxpr) -> Jaxpr:
    env: dict[Var, Var] = {}

    def define(var: Var) -> Var:
        if not isinstance(var, jex_core.DropVar):
            env[var] = jax_compat.new_var(_logical(var.aval))
        return env.get(var, var)

    def use(atom: Any) -> Any:
        if isinstance(atom, jex_core.Literal):
            return jex_core.Literal(atom.val, _logical(atom.aval))
        return env[atom]

    constvars = [define(v) for v in jaxpr.constvars]
    invars = [define(v) for v in jaxpr.invars]
    eqns = []
    for eqn in jaxpr.eqns:
        params = map_inner_jaxprs(eqn.params, _without_mesh)
        params |= dict.fromkeys(_SHARDING_PARAMS & params.keys())
        operands = [use(v) for v in eqn.invars]
        results = [define(v) for v in eqn.outvars]
        eqns.append(eqn.replace(invars=operands, outvars=results, params=params))
    outvars = [use(v) for v in jaxpr.outvars]
    return jaxpr.replace(constvars=constvars, invars=invars, eqns=eqns, outvars=outvars)


def _holds_mesh(jaxpr: Jaxpr) -> bool:
    """Whether a constant of a program or of what it calls lies on a mesh."""
    if any(_has_mesh(var.aval) for var in jaxpr.constvars):
        return True
    return any(_holds_mesh(body) for eqn in jaxpr.eqns for body in inner_jaxprs(eqn))


def _has_mesh(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


def _logical(aval: Any) -> Any:
    if not _has_mesh(aval):
        return aval
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
