"""Programs that a user traces under a mesh of their own, as the same programs on logical shapes.

`jax.set_mesh` puts a mesh into the context, and a sharding constraint names one: values then carry
it in their types, with Explicit axes even a sharding, and operations prescribe shardings. None of
that changes a number, and here it all goes: how a program is sharded is what autopar decides. What
the user prescribes for values stays as `constrain` equations (`constraints.py`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import AbstractMesh, AxisType

from autopar.base.errors import ConstraintWarning
from autopar.base.user_code import warn_at_call
from autopar.passes.graph import jax_compat
from autopar.passes.graph.constraints import (
    SHARDING_PARAMS,
    Constraint,
    constrain_p,
    constraints_of,
    of_result,
)
from autopar.passes.graph.graph import inner_jaxprs, map_inner_jaxprs, user_source, walk
from autopar.passes.graph.primitives import IDENTITIES, SHARDING_HINTS


def logical_shapes() -> AbstractContextManager[Any]:
    """Within it, all axes of a mesh that the user has set are Auto: types hold no sharding.

    The mesh itself stays, so that `with_sharding_constraint(x, P("data"))` finds its axes.
    """
    if not _prescribes_types():
        return nullcontext()
    mesh = jax.sharding.get_abstract_mesh()
    auto = AbstractMesh(mesh.axis_sizes, mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names))
    return jax.sharding.use_abstract_mesh(auto)


def on_logical_shapes(
    trace: Callable[[], ClosedJaxpr], *, keep_constraints: bool = True
) -> ClosedJaxpr:
    """What `trace` traces, as `without_mesh` leaves it.

    Under a mesh of Explicit axes, what `jax.sharding.reshard` and others ask for is refused where
    types hold no sharding, and what `jax.sharding.auto_axes` asks for is left out: then it is
    traced again, with the types that the user's mesh gives.
    """
    try:
        with logical_shapes():
            closed = trace()
    except (TypeError, ValueError) as error:
        if not (_prescribes_types() and _OF_MESHES.search(str(error))):
            raise
        closed = trace()
    else:
        asks = keep_constraints and _prescribes_types()
        if asks and any(map(jax_compat.in_auto_axes, walk(closed.jaxpr))):
            closed = trace()
    return without_mesh(closed, keep_constraints=keep_constraints)


_OF_MESHES = re.compile(r"\bAuto\b|context mesh|[Ee]xplicit|out_sharding")


def _prescribes_types() -> bool:
    return AxisType.Explicit in (jax.sharding.get_abstract_mesh().axis_types or ())


def no_mesh() -> AbstractContextManager[Any]:
    """Within it, there is no mesh in the context, neither its axes nor its devices."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    if jax_compat.is_tracing():  # there, JAX lets nobody change the devices
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    without: AbstractContextManager[Any] = jax.set_mesh(None)
    return without


def without_mesh(closed: ClosedJaxpr, *, keep_constraints: bool = True) -> ClosedJaxpr:
    """A program whose types hold no mesh and whose operations prescribe no sharding.

    Args:
      closed: as it was traced.
      keep_constraints: whether what the user prescribes for values stays, as `constrain` equations.
    """
    if jax.sharding.get_abstract_mesh().empty and not _names_mesh(closed.jaxpr):
        return closed
    if keep_constraints:
        _warn_of_parts(closed.jaxpr)
    with no_mesh():
        return ClosedJaxpr(_without_mesh(closed.jaxpr, keep_constraints), closed.consts)


def _warn_of_parts(jaxpr: Jaxpr) -> None:
    """One warning, if a shard_map's body prescribes how the parts of values lie."""
    lost: dict[str, None] = {}
    for outer in walk(jaxpr):
        for body in inner_jaxprs(outer) if outer.primitive.name == "shard_map" else ():
            for eqn in walk(body):
                if any(hint is not None and any(hint.spec) for hint in constraints_of(eqn)):
                    lost[f"- {user_source(eqn)}"] = None
    if lost:
        warn_at_call(
            "These sharding constraints of the step are not kept, because they are inside a "
            "shard_map, where they speak of parts of values:\n"
            + "\n".join(lost)
            + "\nThe numbers are the same. Constrain what the shard_map takes or returns; "
            "constraints='ignore' leaves them out without this warning.",
            ConstraintWarning,
        )


def _names_mesh(jaxpr: Jaxpr) -> bool:
    """Whether a value's type or an operation names a mesh."""
    values = (*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars))
    return (
        any(_has_mesh(var.aval) for var in values)
        or any(eqn.primitive.name in SHARDING_HINTS for eqn in jaxpr.eqns)
        or any(_names_mesh(body) for eqn in jaxpr.eqns for body in inner_jaxprs(eqn))
    )


def _without_mesh(jaxpr: Jaxpr, keep_constraints: bool) -> Jaxpr:
    env: dict[Var, Any] = {}

    def define(var: Var) -> Var:
        if not isinstance(var, jex_core.DropVar):
            env[var] = jax_compat.new_var(_logical(var.aval))
        return env.get(var, var)

    def use(atom: Any) -> Any:
        if isinstance(atom, jex_core.Literal):
            return jex_core.Literal(_logical_value(atom.val), _logical(atom.aval))
        return env[atom]

    constvars = [define(v) for v in jaxpr.constvars]
    invars = [define(v) for v in jaxpr.invars]
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        operands = [use(v) for v in eqn.invars]
        hints = constraints_of(eqn)
        if eqn.primitive.name in _SAME_NUMBERS or any(hints):
            for var, operand, hint in zip(eqn.outvars, operands, hints, strict=True):
                env[var] = operand
                if hint is not None and keep_constraints:
                    eqns.append(_constrain(operand, define(var), hint, eqn))
            continue
        primitive, params = _plain(eqn)
        # A body in a shard_map speaks of parts of values.
        keep = keep_constraints and eqn.primitive.name != "shard_map"
        inner = functools.partial(_without_mesh, keep_constraints=keep)
        params = map_inner_jaxprs(params, inner)
        params |= dict.fromkeys(SHARDING_PARAMS & params.keys())
        results = [define(v) for v in eqn.outvars]
        changes: dict[str, Any] = {"params": params, "primitive": primitive}
        changes["ctx"] = _context_without_mesh(eqn.ctx)
        eqns.append(eqn.replace(invars=operands, outvars=results, **changes))
        asked = of_result(eqn) if keep_constraints else None
        if asked is not None:
            eqns.append(_constrain(results[0], define(eqn.outvars[0]), asked, eqn))
    outvars = [use(v) for v in jaxpr.outvars]
    return jaxpr.replace(constvars=constvars, invars=invars, eqns=eqns, outvars=outvars)


def _context_without_mesh(context: Any) -> Any:
    """The settings under which an equation was traced, but for the mesh that it was traced under.

    Whoever evaluates the equation does so under them.
    """
    if context.cur_abstract_mesh.empty:
        return context
    with context.manager, jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        eqn = jex_core.new_jaxpr_eqn([], [], constrain_p, {}, jex_core.no_effects)
        return eqn.ctx


# Inside of a shard_map, types say along which mesh axes values vary. That goes too.
_PLAIN = {"psum_invariant": jax.lax.psum_p, "all_gather_invariant": jax.lax.all_gather_p}
_SAME_NUMBERS = IDENTITIES | {"pvary", "pcast"}


def _plain(eqn: JaxprEqn) -> tuple[Any, dict[str, Any]]:
    """The primitive of an equation and its params, where types do not say what varies."""
    if eqn.primitive.name not in _PLAIN:
        return eqn.primitive, eqn.params
    return _PLAIN[eqn.primitive.name], {**eqn.params, "axis_index_groups": None}


def _constrain(operand: Any, result: Var, hint: Constraint, eqn: JaxprEqn) -> JaxprEqn:
    params, effects = {"constraint": hint}, jex_core.no_effects
    info = eqn.source_info
    return jex_core.new_jaxpr_eqn([operand], [result], constrain_p, params, effects, info)


def _has_mesh(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


def _logical(aval: Any) -> Any:
    if not _has_mesh(aval):
        return aval
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _logical_value(value: Any) -> Any:
    """A literal's number, whose own type may hold a mesh too."""
    parts = jax_compat.typed_array_parts(value)
    return value if parts is None else jax_compat.typed_array(parts[0], _logical(parts[1]))
