"""Evaluate steps: the interpreter that runs while the split program is traced.

Values are kept by variable and form, so a whole value, its rows of one microbatch and its partial
sum never take each other's place.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Var

from autopar.passes.graph import jax_compat, source_infos
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import Atom, used_vars
from autopar.passes.graph.scans import ScanParts, WhileParts
from autopar.passes.microbatch.batch_states import IDEMPOTENT, WHOLE, Form
from autopar.passes.microbatch.liveness import ABSENT, Body, PhaseStep
from autopar.passes.primitives.cuts import Cuts, DimCut, take
from autopar.passes.primitives.localize import bind_local

Values = MutableMapping[tuple[Var, Form], Any]


class Env:
    """Values by variable and form, in microbatch `index` of `parts` or outside of the loop.

    `same` names the variable that stands for another one.
    """

    def __init__(
        self,
        values: Values,
        parts: int = 1,
        index: Any = None,
        same: Mapping[Var, Var] = MappingProxyType({}),
    ):
        self.values, self.parts, self.index, self.same = values, parts, index, same

    def read(self, atom: Atom, form: Form) -> Any:
        if isinstance(atom, Literal):
            return self.from_whole(literal_value(atom), atom.aval, form)
        atom = self.same.get(atom, atom)
        if (atom, form) not in self.values:
            self.values[atom, form] = self.from_whole(self.values[atom, WHOLE], atom.aval, form)
        return self.values[atom, form]

    def cuts(self, aval: Any, form: Form) -> Cuts:
        cuts: list[DimCut | None] = [None] * len(aval.shape)
        if isinstance(form, tuple):
            dim, major = form
            cuts[dim] = DimCut(self.parts, self.index, major)
        return tuple(cuts)

    def from_whole(self, value: Any, aval: Any, form: Form) -> Any:
        """A whole value in another form."""
        if form is WHOLE:
            return value
        assert self.index is not None, (aval, form)
        if isinstance(form, tuple):
            return take(value, self.cuts(aval, form))
        if form in IDEMPOTENT:
            return value
        assert isinstance(form, str), form
        # The first microbatch counts it, the others hold the monoid's neutral element.
        neutral = identity(form, aval.shape, aval.dtype)
        first = lax.eq(self.index, np.int32(0))
        return lax.select_n(
            lax.broadcast_in_dim(first, aval.shape, ()), neutral, jnp.asarray(value, aval.dtype)
        )


def literal_value(literal: Literal) -> Any:
    """Its number; one that is a jax.Array would become an array that the program holds."""
    return np.asarray(literal.val) if isinstance(literal.val, jax.Array) else literal.val


def identity(monoid: str, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
    """An array of the monoid's neutral element."""
    if monoid in ("sum", "or"):
        return lax.full(shape, 0, dtype)
    if monoid == "prod":
        return lax.full(shape, 1, dtype)
    if monoid == "and":
        return lax.full(shape, True if dtype == np.bool_ else -1, dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return lax.full(shape, -np.inf if monoid == "max" else np.inf, dtype)
    if dtype == np.bool_:
        return lax.full(shape, monoid == "min", dtype)
    limits = jnp.iinfo(dtype)
    return lax.full(shape, limits.min if monoid == "max" else limits.max, dtype)


_COMBINE = {
    "sum": lax.add,
    "max": lax.max,
    "min": lax.min,
    "prod": lax.mul,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}


def combine(monoid: str, one: jax.Array, other: jax.Array) -> jax.Array:
    """Two partial results as one."""
    return _COMBINE[monoid](one, other)


def run(steps: Sequence[PhaseStep], env: Env) -> None:
    """Evaluate steps in order."""
    for step in steps:
        eqn = step.eqn
        with source_infos.source_context(eqn), eqn.ctx.manager:
            operands = [
                None if form == ABSENT else env.read(atom, form)
                for atom, form in zip(eqn.invars, step.operand_forms, strict=True)
            ]
            results = evaluate(step, operands, env)
        for var, form, result in zip(eqn.outvars, step.result_forms, results, strict=True):
            if form != ABSENT:
                env.values[var, form] = result


def evaluate(step: PhaseStep, operands: list[Any], env: Env) -> list[Any]:
    """The results of a step from its operands, each in the form in which the step reads it."""
    eqn = step.eqn
    if step.bodies:
        return _CONTROL_FLOW[eqn.primitive.name](step, operands, env)
    if is_barrier(eqn):
        results = jax_compat.bind(eqn, _kept(operands, step.operand_forms))
        return _spread(results, step.operand_forms)
    if not any(isinstance(form, tuple) for form in (*step.operand_forms, *step.result_forms)):
        return jax_compat.bind(eqn, operands)
    if eqn.primitive.name == "scan":  # over the batch: each microbatch scans its own rows
        return jax_compat.bind(eqn, operands, length=eqn.params["length"] // env.parts)
    read, made = (
        [env.cuts(atom.aval, form) for atom, form in zip(atoms, forms, strict=True)]
        for atoms, forms in ((eqn.invars, step.operand_forms), (eqn.outvars, step.result_forms))
    )
    return bind_local(eqn, operands, read, made)


# Control flow: trace each body on slices and bind the same primitive with it. A body that reads the
# microbatch's index takes it as one more operand.


def _evaluate_body(body: Body, original: Any, env: Env, inputs: Sequence[Any]) -> list[Any]:
    """Results of `body`, the rewritten `original`, from its inputs that are passed."""
    inner = Env({}, env.parts, env.index)
    consts = original.consts if isinstance(original, ClosedJaxpr) else ()
    for var, value in zip(body.jaxpr.constvars, consts, strict=True):
        inner.values[var, WHOLE] = value
    inner.values.update(zip(body.reads, inputs, strict=True))
    run(body.steps, inner)
    return [
        _typed(inner.read(atom, form), atom.aval)
        for atom, form in zip(body.jaxpr.outvars, body.out_forms, strict=True)
        if form != ABSENT
    ]


def _trace(body: Body, original: Any, env: Env) -> ClosedJaxpr:
    """`body`, the rewritten `original`, as a jaxpr of (index, *its inputs that are passed)."""

    def function(index: Any, *inputs: Any) -> list[Any]:
        here = Env({}, env.parts, None if env.index is None else index)
        return _evaluate_body(body, original, here, inputs)

    avals = [local_struct(var.aval, form, env.parts) for var, form in body.reads]
    return jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), np.int32), *avals)


def _typed(value: Any, aval: Any) -> Any:
    """A literal result as an array of its dtype."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value, aval.dtype)


def local_struct(aval: Any, form: Form = WHOLE, parts: int = 1) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what the loop holds of a value."""
    shape = list(aval.shape)
    if isinstance(form, tuple):
        shape[form[0]] //= parts
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=weak)


def _bodies(pairs: Sequence[tuple[Body, Any]], env: Env) -> tuple[list[Any], list[Any]]:
    """Traced bodies as the primitive keeps them, and the operands that they take before others.

    These are arrays that the bodies hold, and the microbatch's index if one of them reads it.
    """
    traced = [_trace(body, original, env) for body, original in pairs]
    held = [value for closed in traced for value in closed.consts]
    indexed = any(closed.jaxpr.invars[0] in used_vars(closed.jaxpr) for closed in traced)
    bodies: list[Any] = []
    start = 0
    for closed, (_, original) in zip(traced, pairs, strict=True):
        jaxpr, stop = closed.jaxpr, start + len(closed.consts)
        # What another body holds is an operand of this one too.
        leading = [jax_compat.new_var(jax.typeof(value)) for value in held]
        leading[start:stop] = jaxpr.constvars
        start = stop
        passed = jaxpr.invars if indexed else jaxpr.invars[1:]
        jaxpr = jax_compat.replace_jaxpr(jaxpr, constvars=[], invars=[*leading, *passed])
        bodies.append(ClosedJaxpr(jaxpr, ()) if isinstance(original, ClosedJaxpr) else jaxpr)
    return bodies, [*held, env.index] if indexed else held


def _kept(values: Sequence[Any], forms: Sequence[Form]) -> list[Any]:
    return [value for value, form in zip(values, forms, strict=True) if form != ABSENT]


def _spread(results: Sequence[Any], forms: Sequence[Form]) -> list[Any]:
    left = iter(results)
    return [None if form == ABSENT else next(left) for form in forms]


def _scan(step: PhaseStep, operands: list[Any], env: Env) -> list[Any]:
    params, forms = step.eqn.params, step.operand_forms
    scan = ScanParts.of(step.eqn)
    (body,) = step.bodies
    operands = [
        value if form == ABSENT else _typed(value, atom.aval)
        for atom, form, value in zip(step.eqn.invars, forms, operands, strict=True)
    ]
    consts, start, stacks = map(_kept, scan.operands(operands), scan.operands(forms))

    def function(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _evaluate_body(body, params["jaxpr"], env, [*consts, *carry, *xs])
        return results[: len(carry)], results[len(carry) :]

    settings = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(function, start, stacks, **settings)
    return _spread([*carry, *stacked], step.result_forms)


def _while(step: PhaseStep, operands: list[Any], env: Env) -> list[Any]:
    params, loop = step.eqn.params, WhileParts.of(step.eqn)
    tested, consts, carry = map(_kept, loop.operands(operands), loop.operands(step.operand_forms))
    (condition,), one = _bodies([(step.bodies[0], params["cond_jaxpr"])], env)
    (body,), other = _bodies([(step.bodies[1], params["body_jaxpr"])], env)
    condition_consts, body_consts = [*one, *tested], [*other, *consts]
    counts = {"cond_nconsts": len(condition_consts), "body_nconsts": len(body_consts)}
    passed = [*condition_consts, *body_consts, *carry]
    results = jax_compat.bind(step.eqn, passed, cond_jaxpr=condition, body_jaxpr=body, **counts)
    return _spread(results, step.result_forms)


def _cond(step: PhaseStep, operands: list[Any], env: Env) -> list[Any]:
    pairs = list(zip(step.bodies, step.eqn.params["branches"], strict=True))
    branches, leading = _bodies(pairs, env)
    passed = [operands[0], *leading, *_kept(operands[1:], step.operand_forms[1:])]
    return _spread(jax_compat.bind(step.eqn, passed, branches=tuple(branches)), step.result_forms)


_CONTROL_FLOW = {"scan": _scan, "while": _while, "cond": _cond}
