"""Calls of functions whose loops the user names (`autopar.local`): primitive, rule, and on slices.

The call stays one equation. On slices the function is traced anew, with slices as arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from autopar.base.errors import OptionError
from autopar.base.loop_notation import LoopNotation, Term
from autopar.passes.graph.graph import user_source
from autopar.passes.graph.primitives import FactorKind
from autopar.passes.primitives.cuts import Cuts, DimCut, LocalCall, NotLocalError, local_shape
from autopar.passes.primitives.factor_rule import DimFactors, FactorRule
from autopar.passes.primitives.own_rules import Loops
from autopar.passes.primitives.shardings import shape_of

Sizes = Mapping[str, int]
_KINDS: Mapping[str, FactorKind] = {"cut": "pass", "sum": "sum", "max": "max", "min": "min"}


@dataclass(frozen=True)
class LocalBody:
    """What a call computes: a function of the loops' sizes and of flat arrays, and its loops.

    `sizes` are those of the arrays in the call at hand, of the loops that the rule names.
    """

    function: Callable[[Sizes, Sequence[Any]], list[Any]]
    loops: LoopNotation
    sizes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.loops} with {dict(self.sizes)}"


local_call_p = Primitive("local_call")
local_call_p.multiple_results = True


def call_local(body: LocalBody, operands: Sequence[Any]) -> list[Any]:
    """Call a body on arrays of its sizes, as one equation."""
    structs = [jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.numpy.result_type(x)) for x in operands]
    call = jax.make_jaxpr(lambda *xs: body.function(dict(body.sizes), xs))(*structs)
    results: list[Any] = local_call_p.bind(*operands, body=body, call=call)
    return results


@local_call_p.def_impl
def _impl(*operands: Any, body: LocalBody, call: ClosedJaxpr) -> list[Any]:
    return list(jax.jit(jaxpr_as_fun(call))(*operands))


@local_call_p.def_abstract_eval
def _abstract(*avals: Any, body: LocalBody, call: ClosedJaxpr) -> list[Any]:
    return list(call.out_avals)


def _inlined(*operands: Any, body: LocalBody, call: ClosedJaxpr) -> list[Any]:
    return list(jaxpr_as_fun(call)(*operands))


mlir.register_lowering(local_call_p, mlir.lower_fun(_inlined, multiple_results=True))


@dataclass(frozen=True)
class _Mapped:
    """A function of slices along one more dimension, the first of those that have it."""

    function: Callable[[Sizes, Sequence[Any]], list[Any]]
    in_axes: tuple[int | None, ...]

    def __str__(self) -> str:
        return str(self.function)

    def __call__(self, sizes: Sizes, operands: Sequence[Any]) -> list[Any]:
        mapped = jax.vmap(lambda *xs: self.function(sizes, xs), self.in_axes)
        return list(mapped(*operands))


def _batch(
    operands: Sequence[Any], dims: Sequence[int | None], *, body: LocalBody, call: ClosedJaxpr
) -> tuple[list[Any], list[int]]:
    moved = [
        x if dim is None else jax.numpy.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    in_axes = tuple(None if dim is None else 0 for dim in dims)
    size = next(x.shape[0] for x, axis in zip(moved, in_axes, strict=True) if axis == 0)
    name = f"vmap{sum(loop.startswith('vmap') for loop, _ in body.sizes)}"
    terms = tuple(
        term if axis is None else ((name,), *term)
        for term, axis in zip(body.loops.operands, in_axes, strict=True)
    )
    results = tuple(((name,), *term) for term in body.loops.results)
    loops = LoopNotation(terms, results, (*body.loops.kinds, (name, "cut")))
    mapped = LocalBody(_Mapped(body.function, in_axes), loops, (*body.sizes, (name, size)))
    return call_local(mapped, moved), [0] * len(results)


batching.primitive_batchers[local_call_p] = _batch


def local_rule(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule | None:
    """The rule that the user wrote; a loop that is not named as one to be cut stays whole."""
    body: LocalBody = eqn.params["body"]
    loops, sizes, kinds = Loops(), dict(body.sizes), dict(body.loops.kinds)
    named = {
        name: loops.new(size, _KINDS[kinds[name]] if name in kinds else "replicated")
        for name, size in sizes.items()
    }

    def value(var: Any, term: Term) -> list[DimFactors]:
        return [
            tuple(f for name in dim for f in named[name]) if dim else loops.new(size, "replicated")
            for size, dim in zip(shape_of(var), term, strict=True)
        ]

    return loops.rule(
        [value(*pair) for pair in zip(eqn.invars, body.loops.operands, strict=True)],
        [value(*pair) for pair in zip(eqn.outvars, body.loops.results, strict=True)],
    )


def local_on_slices(call: LocalCall) -> list[Any]:
    """The call on slices: again one equation, of a function of smaller arrays."""
    body: LocalBody = call.eqn.params["body"]
    sizes, parts = dict(body.sizes), dict[str, int]()
    terms = (*body.loops.operands, *body.loops.results)
    for term, cuts in zip(terms, (*call.operand_cuts, *call.result_cuts), strict=True):
        for dim, cut in zip(term, cuts, strict=True):
            for name in dim:
                number = 1 if cut is None or _cut_loop(dim, sizes, cut) != name else cut.parts
                if parts.setdefault(name, number) != number:
                    raise NotLocalError(f"the loop {name!r} is not cut alike everywhere")
            if cut is not None and not dim:
                raise NotLocalError("a dimension that the rule does not name is cut")
    local = tuple((name, size // parts.get(name, 1)) for name, size in body.sizes)
    try:
        results = call_local(replace(body, sizes=local), call.operands)
    except Exception as error:  # the function is the user's
        raise _does_not_cut(call, local, f"it raises {type(error).__name__}: {error}") from error
    for result, var, cuts in zip(results, call.eqn.outvars, call.result_cuts, strict=True):
        expected = local_shape(shape_of(var), cuts)
        if result.shape != expected:
            reason = f"it gives an array of shape {result.shape}, and the rule says {expected}."
            raise _does_not_cut(call, local, reason)
    return results


def _does_not_cut(call: LocalCall, local: Sequence[tuple[str, int]], why: str) -> OptionError:
    body: LocalBody = call.eqn.params["body"]
    sizes = dict(body.sizes)
    cut = ", ".join(f"{name} of {size} instead of {sizes[name]}" for name, size in local
                    if size != sizes[name])  # fmt: skip
    return OptionError(
        f"The rule that autopar.local was given for {body.function} is not so: {body.loops}.",
        where=user_source(call.eqn),
        why=f"on a slice with {cut}, {why}",
        hint="let it take its sizes from its arguments, or name in cut= only what it can be cut"
        " along; autopar.check_rule tries a rule.",
    )


def _cut_loop(dim: Sequence[str], sizes: Sizes, cut: DimCut) -> str | None:
    """Which of a dimension's loops a cut falls into."""
    outer = 1
    for name in dim:
        if cut.major % outer == 0 and sizes[name] % (cut.major // outer * cut.parts) == 0:
            return name
        outer *= sizes[name]
    return None


def loop_cuts(body: LocalBody, name: str, parts: int, index: int) -> tuple[list[Cuts], list[Cuts]]:
    """How operands and results are cut when one loop is, in contiguous parts."""
    sizes = dict(body.sizes)

    def cut(dim: Sequence[str]) -> DimCut | None:
        if name not in dim:
            return None
        outer = math.prod(sizes[other] for other in dim[: dim.index(name)])
        return DimCut(parts, index, outer)

    operands, results = (
        [tuple(map(cut, term)) for term in terms]
        for terms in (body.loops.operands, body.loops.results)
    )
    return operands, results
