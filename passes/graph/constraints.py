"""Shardings that a user prescribes for values inside a step, as equations of our own.

`jax.lax.with_sharding_constraint`, `jax.sharding.reshard` and `jax.device_put` into a
`NamedSharding` speak of the user's mesh. A `constrain` equation keeps what they say, the names and
sizes of mesh axes for each dimension, and is the identity for every pass but that which chooses
shardings: so it goes through microbatches, stages and scans as any elementwise operation does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex_core
from jax.extend.core import Jaxpr, JaxprEqn
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import inner_jaxprs
from autopar.passes.graph.primitives import CONSTRAIN, SHARDING_HINTS

SHARDING_PARAMS = frozenset({"sharding", "out_sharding"})
# Functions that take an `out_sharding` and make a broadcast.
_BROADCASTS = frozenset(
    {"broadcast", "broadcast_in_dim", "broadcast_to", "empty", "full", "ones", "zeros"}
)


@dataclass(frozen=True)
class Constraint:
    """How a value shall lie on a mesh of the user's.

    Args:
      spec: for each dimension the mesh axes that cut it; None: it is left open.
      mesh: names and sizes of all axes of that mesh that have more than one device, in order.
    """

    spec: tuple[tuple[str, ...] | None, ...]
    mesh: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        entries = ("?" if names is None else "+".join(names) or "-" for names in self.spec)
        sizes = " ".join(f"{name}={size}" for name, size in self.mesh)
        return f"[{'|'.join(entries)}] on {sizes or 'one device'}"


constrain_p = jex_core.Primitive(CONSTRAIN)
constrain_p.def_impl(lambda x, *, constraint: x)
constrain_p.def_abstract_eval(lambda x, *, constraint: x)
mlir.register_lowering(constrain_p, lambda context, x, *, constraint: [x])


def constraints_of(eqn: JaxprEqn) -> tuple[Constraint | None, ...]:
    """What a JAX equation prescribes for each of its results; None: nothing."""
    name, params = eqn.primitive.name, eqn.params
    if name not in SHARDING_HINTS:
        return (None,) * len(eqn.outvars)
    if name == "device_put":
        found = tuple(constraint_of(where, v.aval.shape) for where, v in _targets(eqn))
    elif name == "reshard":
        found = (_of_type(params["dst_sharding"], eqn.outvars[0].aval.shape),)
    else:
        left_open = params.get("unconstrained_dims") or ()
        found = (constraint_of(params["sharding"], eqn.outvars[0].aval.shape, left_open),)
    return found


def of_result(eqn: JaxprEqn) -> Constraint | None:
    """What an operation on a mesh of Explicit axes prescribes for its one result (`out_sharding`).

    What broadcasts say follows from other values' types, but where they were asked for by name, and
    what they make is made in any layout.
    """
    if eqn.primitive.name == "broadcast_in_dim" and jax_compat.called(eqn) not in _BROADCASTS:
        return None
    asked = [eqn.params[name] for name in SHARDING_PARAMS & eqn.params.keys()]
    named = [sharding for sharding in asked if isinstance(sharding, NamedSharding)]
    return _of_type(named[0], eqn.outvars[0].aval.shape) if named else None


def _targets(eqn: JaxprEqn) -> Iterator[tuple[Any, Any]]:
    return zip(eqn.params["devices"], eqn.outvars, strict=True)


def _of_type(sharding: Any, shape: tuple[int, ...]) -> Constraint | None:
    """A sharding that is part of a value's type.

    It says nothing of axes that are not Explicit; and JAX itself inserts reshards to what is not
    cut at all, for the gradients of what enters a step.
    """
    explicit = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    found = constraint_of(sharding, shape)
    if found is None or not any(found.spec):
        return None
    named = (name for names in found.spec for name in names or ())
    return found if all(explicit[name] == AxisType.Explicit for name in named) else None


def constraint_of(sharding: Any, shape: tuple[int, ...], left_open: Any = ()) -> Constraint | None:
    """What a sharding says of a value of this shape; None: nothing."""
    if not isinstance(sharding, NamedSharding) or math.prod(shape) <= 1:
        return None
    sizes = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_sizes, strict=True))
    entries = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]

    def axes(dim: int, entry: Any) -> tuple[str, ...] | None:
        if dim in left_open or entry is sharding.spec.UNCONSTRAINED:
            return None
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        return tuple(str(name) for name in names if sizes[name] > 1)

    spec = tuple(axes(dim, entry) for dim, entry in enumerate(entries))
    if all(names is None for names in spec):
        return None
    return Constraint(spec, tuple((str(n), size) for n, size in sizes.items() if size > 1))


def constrained(jaxpr: Jaxpr, in_while: bool = False) -> Iterator[tuple[JaxprEqn, bool]]:
    """Every `constrain` equation, also of inner bodies, and whether it is inside a while loop."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is constrain_p:
            yield eqn, in_while
        for body in inner_jaxprs(eqn):
            yield from constrained(body, in_while or eqn.primitive.name == "while")
