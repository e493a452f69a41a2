"""Evaluate steps: the interpreter that runs while the split program is traced.

Values are kept by variable and form, so a whole value, its rows of one microbatch and its partial
sum never take each other's place.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from autopar.passes import jax_compat
from autopar.passes.graph import Atom
from autopar.passes.localize import Cut, Cuts, bind_local, take
from autopar.passes.microbatch.demand import ABSENT, Body, Step, is_barrier
from autopar.passes.microbatch.lattice import IDEMPOTENT, WHOLE, Form

Values = MutableMapping[tuple[Var, Form], Any]


class Env:
    """Values by variable and form, in one microbatch (`index` of `parts`) or outside of the loop."""

    def __init__(self, values: Values, parts: int = 1, index: Any = None):
        self.values, self.parts, self.index = values, parts, index

    def inner(self, parts: int, index: Any) -> Env:
        """An environment that reads these values too, and writes its own."""
        return Env(ChainMap({}, self.values), parts, index)

    def read(self, atom: Atom, form: Form) -> Any:
        if isinstance(atom, Literal):
            return self._from_whole(atom.val, atom.aval, form)
        found = self.values.get((atom, form), self)
        if found is self:
            found = self._from_whole(self.values[atom, WHOLE], atom.aval, form)
            self.values[atom, form] = found
        return found

    def write(self, var: Any, form: Form, value: Any) -> None:
        self.values[var, form] = value

    def cuts(self, aval: Any, form: Form) -> Cuts:
        cuts: list[Cut | None] = [None] * len(aval.shape)
        if isinstance(form, tuple):
            dim, major = form
            cuts[dim] = Cut(self.parts, self.index, major)
        return tuple(cuts)

    def _from_whole(self, value: Any, aval: Any, form: Form) -> Any:
        if form is WHOLE:
            return value
        assert self.index is not None, (aval, form)
        if isinstance(form, tuple):
            return take(value, self.cuts(aval, form))
        if form in IDEMPOTENT:
            return value
        # The first microbatch counts it, the others hold the monoid's neutral element.
        neutral = identity(form, aval.shape, aval.dtype)
        first = lax.eq(self.index, np.int32(0))
        return lax.select_n(
            lax.broadcast_in_dim(first, aval.shape, ()), neutral, jnp.asarray(value, aval.dtype)
        )


def identity(monoid: str, shape: Sequence[int], dtype: Any) -> Any:
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


def combine(monoid: str, one: Any, other: Any) -> Any:
    return _COMBINE[monoid](one, other)


def run(steps: Sequence[Step], env: Env) -> None:
    """Evaluate steps in order."""
    for step in steps:
        eqn = step.eqn
        with jax_compat.source_context(eqn), eqn.ctx.manager:
            operands = [
                None if form == ABSENT else env.read(atom, form)
                for atom, form in zip(eqn.invars, step.operand_forms, strict=True)
            ]
            results = _evaluate(step, operands, env)
        for var, form, result in zip(eqn.outvars, step.result_forms, results, strict=True):
            if form != ABSENT:
                env.write(var, form, result)


def bind(eqn: JaxprEqn, operands: Sequence[Any], **changes: Any) -> list[Any]:
    """The equation's primitive on these operands."""
    bound = eqn.primitive.get_bind_params({**eqn.params, **changes})
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # older releases
    results = eqn.primitive.bind(*functions, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _evaluate(step: Step, operands: list[Any], env: Env) -> list[Any]:
    eqn = step.eqn
    if step.bodies:
        return _CONTROL_FLOW[eqn.primitive.name](step, operands, env)
    if is_barrier(eqn):
        kept = [k for k, form in enumerate(step.operand_forms) if form != ABSENT]
        results: list[Any] = [None] * len(operands)
        for k, result in zip(kept, bind(eqn, [operands[k] for k in kept]), strict=True):
            results[k] = result
        return results
    if not any(isinstance(form, tuple) for form in (*step.operand_forms, *step.result_forms)):
        return bind(eqn, operands)
    if eqn.primitive.name == "scan":  # over the batch: each microbatch scans its own rows
        return bind(eqn, operands, length=eqn.params["length"] // env.parts)
    return bind_local(
        eqn,
        operands,
        [env.cuts(atom.aval, form) for atom, form in zip(eqn.invars, step.operand_forms, strict=True)],
        [env.cuts(var.aval, form) for var, form in zip(eqn.outvars, step.result_forms, strict=True)],
    )


# Control flow: trace each body on slices and bind the same primitive with it. The microbatch's index is
# one more operand of every body.


def _trace(body: Body, consts: Sequence[Any], env: Env) -> ClosedJaxpr:
    """`body` as a jaxpr of (index, *its inputs that are passed)."""

    def function(index: Any, *inputs: Any) -> list[Any]:
        inner = Env({}, env.parts, index if env.index is not None else None)
        for var, value in zip(body.jaxpr.constvars, consts, strict=True):
            inner.write(var, WHOLE, value)
        passed = iter(inputs)
        for var, form in zip(body.jaxpr.invars, body.in_forms, strict=True):
            if form != ABSENT:
                inner.write(var, form, next(passed))
        run(body.steps, inner)
        return [
            _typed(inner.read(atom, form), atom.aval)
            for atom, form in zip(body.jaxpr.outvars, body.out_forms, strict=True)
            if form != ABSENT
        ]

    avals = [
        local_struct(var.aval, form, env.parts)
        for var, form in zip(body.jaxpr.invars, body.in_forms, strict=True)
        if form != ABSENT
    ]
    return jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), np.int32), *avals)


def _typed(value: Any, aval: Any) -> Any:
    """A literal result as an array of its dtype."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value, aval.dtype)


def local_struct(aval: Any, form: Form, parts: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what the loop holds of a value."""
    shape = list(aval.shape)
    if isinstance(form, tuple):
        shape[form[0]] //= parts
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=weak)


def _consts(closed: Any) -> Sequence[Any]:
    return closed.consts if isinstance(closed, ClosedJaxpr) else ()


def _like(closed: ClosedJaxpr, original: Any) -> Any:
    """A traced body in the form in which the primitive keeps its own."""
    assert not closed.consts, closed.consts
    return closed if isinstance(original, ClosedJaxpr) else closed.jaxpr


def _kept(values: Sequence[Any], forms: Sequence[Form]) -> list[Any]:
    return [value for value, form in zip(values, forms, strict=True) if form != ABSENT]


def _spread(results: Sequence[Any], forms: Sequence[Form]) -> list[Any]:
    left = iter(results)
    return [None if form == ABSENT else next(left) for form in forms]


def _index(env: Env) -> Any:
    return np.int32(0) if env.index is None else env.index


def _scan(step: Step, operands: list[Any], env: Env) -> list[Any]:
    params = step.eqn.params
    (body,) = step.bodies
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    forms = step.operand_forms
    closed = _trace(body, _consts(params["jaxpr"]), env)
    changes = {
        "jaxpr": _like(closed, params["jaxpr"]),
        "num_consts": 1 + len(_kept(forms[:first], forms[:first])),
        "num_carry": len(_kept(forms[first:last], forms[first:last])),
    }
    passed = _kept(operands, forms)
    if "linear" in params:
        changes["linear"] = (False,) * (1 + len(passed))
    return _spread(bind(step.eqn, [_index(env), *passed], **changes), step.result_forms)


def _while(step: Step, operands: list[Any], env: Env) -> list[Any]:
    params = step.eqn.params
    condition, body = step.bodies
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    forms = step.operand_forms
    changes = {
        "cond_jaxpr": _like(
            _trace(condition, _consts(params["cond_jaxpr"]), env), params["cond_jaxpr"]
        ),
        "body_jaxpr": _like(_trace(body, _consts(params["body_jaxpr"]), env), params["body_jaxpr"]),
        "cond_nconsts": 1 + len(_kept(forms[:first], forms[:first])),
        "body_nconsts": 1 + len(_kept(forms[first:second], forms[first:second])),
    }
    passed = [
        _index(env),
        *_kept(operands[:first], forms[:first]),
        _index(env),
        *_kept(operands[first:], forms[first:]),
    ]
    return _spread(bind(step.eqn, passed, **changes), step.result_forms)


def _cond(step: Step, operands: list[Any], env: Env) -> list[Any]:
    branches = step.eqn.params["branches"]
    traced = tuple(
        _like(_trace(body, _consts(branch), env), branch)
        for body, branch in zip(step.bodies, branches, strict=True)
    )
    passed = [operands[0], _index(env), *_kept(operands[1:], step.operand_forms[1:])]
    return _spread(bind(step.eqn, passed, branches=traced), step.result_forms)


_CONTROL_FLOW = {"scan": _scan, "while": _while, "cond": _cond}
