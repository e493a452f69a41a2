"""Calls of `jax.experimental.custom_partitioning`, whose authors say how they are cut.

The sharding rule tells which dimensions go together. Whether a loop of it can be cut, and into
what, the author's partitioning function tells: it is asked for a mesh of one axis that cuts that
loop alone, and has to agree with the rule. Where it completes results by a sum (maximum, minimum)
over the axis as its last step, the results without that step are the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from autopar.base.errors import TraceError
from autopar.base.user_code import innermost, warn
from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import jaxprs_in, user_source
from autopar.passes.graph.primitives import FactorKind
from autopar.passes.primitives.cuts import LocalCall, NotLocalError
from autopar.passes.primitives.factor_rule import Factor, FactorRule, ValueFactors
from autopar.passes.primitives.shardings import dtype_of, shape_of
from autopar.passes.primitives.shardy import OpRule, parse

_COLLECTIVES: Mapping[str, FactorKind] = {
    "psum": "sum",
    "psum_invariant": "sum",
    "pmax": "max",
    "pmin": "min",
}


def partitioned_rule(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule | None:
    """The rule of a `custom_partitioning` call, or None where it has none."""
    try:
        text = jax_compat.sharding_rule_text(eqn)
    except Exception as error:
        raise TraceError(
            "The sharding rule of a custom_partitioning cannot be read.",
            where=innermost(error) or user_source(eqn),
            why=f"{type(error).__name__}: {error}",
            hint=f"mend the rule that def_partition was given; it is called at {user_source(eqn)}.",
        ) from error
    if text is None:
        return None
    rule = parse(text)
    whole = {i for value in (*rule.operands, *rule.results) for dim in value for i in dim[1:]}
    read = {i for value in rule.operands for dim in value for i in dim}
    failed: dict[str, tuple[Exception, list[int]]] = {}
    kinds: list[FactorKind] = []
    for i in range(len(rule.sizes)):
        kind: FactorKind = "replicated"
        if i not in {*rule.blocked, *whole} and i in read:
            try:
                kind = _kind(eqn, rule, i)
            except Exception as error:  # of the author's partitioning function
                failed.setdefault(repr(error), (error, []))[1].append(i)
        kinds.append(kind)
    for reason, cut in failed.values():
        _tell(reason, eqn, rule, cut)
    factors = tuple(map(Factor, rule.sizes, kinds))
    return FactorRule(factors, rule.operands, rule.results)


def _tell(error: Exception, eqn: JaxprEqn, rule: OpRule, factors: Sequence[int]) -> None:
    """Warn of a partitioning function that failed when it was asked to cut these factors."""
    cuts = [
        " and ".join(
            f"argument {n} is cut along dimension {d}"
            for n, value in enumerate(rule.operands)
            for d, dim in enumerate(value)
            if dim and dim[0] == factor
        )
        for factor in factors
    ]
    name = getattr(eqn.params["partition"], "__qualname__", None) or "partition"
    what = f"The partitioning function `{name}` of a custom_partitioning failed"
    warn(
        f"{what} where {', and where '.join(cuts)}.",
        innermost(error) or user_source(eqn),
        f"{type(error).__name__}: {error}\nThe sharding rule allows that cut. The call at "
        f"{user_source(eqn)} stays whole along it, on every device and in every microbatch.",
        "let it take such arguments, or leave the dimension out of the rule "
        "(need_replication_factors=...).",
    )


def _kind(eqn: JaxprEqn, rule: OpRule, factor: int) -> FactorKind:
    """What becomes of a factor that is cut, by the partitioning function."""
    size = rule.sizes[factor]
    parts = next((p for p in range(2, size + 1) if size % p == 0), None)
    if parts is None:
        return "replicated"

    def cuts(values: Sequence[ValueFactors]) -> list[list[int]]:
        return [[parts if dim and dim[0] == factor else 1 for dim in value] for value in values]

    operands, results = cuts(rule.operands), cuts(rule.results)
    try:
        monoids = _local(eqn, operands, results).monoids
    except NotLocalError:
        return "replicated"
    inside = [any(factor in dim for dim in value) for value in rule.results]
    missing = {m for m, has in zip(monoids, inside, strict=True) if not has}
    if all(inside):
        return "replicated" if any(monoids) else "pass"
    if len(missing) != 1 or any(m for m, has in zip(monoids, inside, strict=True) if has):
        return "replicated"
    return missing.pop() or "replicated"


class _LocalProgram(NamedTuple):
    """What one device computes, and by what each result is completed, which is left out."""

    call: ClosedJaxpr
    monoids: tuple[FactorKind | None, ...]


def _local(
    eqn: JaxprEqn, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> _LocalProgram:
    """The author's program for devices that each hold one of some parts of every dimension.

    Raises:
      NotLocalError: it wants other parts, or its devices talk to each other before their last step.
    """
    params = eqn.params
    counts = sorted({n for parts in (*operands, *results) for n in parts if n > 1})
    if len(counts) > 1:
        raise NotLocalError("dimensions are cut in different numbers of parts")
    mesh = AbstractMesh((counts[0] if counts else 1,), ("cut",))

    def sharding(parts: Sequence[int]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*("cut" if n > 1 else None for n in parts)))

    def structs(values: Sequence[Any], parts: Sequence[Sequence[int]]) -> list[Any]:
        return [
            jax.ShapeDtypeStruct(shape_of(v), dtype_of(v), sharding=sharding(p))
            for v, p in zip(values, parts, strict=True)
        ]

    given = params["in_tree"].unflatten(structs(eqn.invars, operands))
    made = params["out_tree"].unflatten(structs(eqn.outvars, results))
    _, function, made_shardings, given_shardings = params["partition"](
        *params["static_args"], mesh, given, made
    )
    wanted = (
        *params["in_tree"].flatten_up_to(given_shardings),
        *params["out_tree"].flatten_up_to(made_shardings),
    )
    for one, parts in zip(wanted, (*operands, *results), strict=True):
        if not isinstance(one, NamedSharding):
            raise NotLocalError("the partitioning function answers with another kind of sharding")
        entries = list(one.spec)
        if [*entries, *[None] * (len(parts) - len(entries))] != list(sharding(parts).spec):
            raise NotLocalError("the partitioning function wants other shardings")
    local = [
        jax.ShapeDtypeStruct(
            tuple(size // n for size, n in zip(shape_of(v), parts, strict=True)), dtype_of(v)
        )
        for v, parts in zip(eqn.invars, operands, strict=True)
    ]
    axes = list(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    closed = jax.make_jaxpr(function, axis_env=axes)(*params["in_tree"].unflatten(local))
    for aval, v, parts in zip(closed.out_avals, eqn.outvars, results, strict=True):
        if aval.shape != tuple(n // m for n, m in zip(shape_of(v), parts, strict=True)):
            raise NotLocalError(f"the partitioning function gives {aval.shape} on slices")
    return _without_last_step(closed)


def _without_last_step(closed: ClosedJaxpr) -> _LocalProgram:
    jaxpr = closed.jaxpr
    last: dict[Any, tuple[Any, FactorKind]] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        kind = _COLLECTIVES.get(eqn.primitive.name)
        if kind is not None and eqn.params.get("axis_index_groups") is None:
            last.update((v, (x, kind)) for v, x in zip(eqn.outvars, eqn.invars, strict=True))
        else:
            eqns.append(eqn)
    read = {v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)}
    if not read.isdisjoint(last) or any(map(_talks, eqns)):
        raise NotLocalError("devices talk to each other before the last step")
    found = [None if isinstance(v, Literal) else last.get(v) for v in jaxpr.outvars]
    outvars = [v if end is None else end[0] for v, end in zip(jaxpr.outvars, found, strict=True)]
    program = jax_compat.replace_jaxpr(jaxpr, eqns=eqns, outvars=outvars)
    monoids = tuple(None if end is None else end[1] for end in found)
    return _LocalProgram(ClosedJaxpr(program, closed.consts), monoids)


def _talks(eqn: JaxprEqn) -> bool:
    """Whether an equation, or one inside of it, names the axis of devices."""
    names = [v for key, v in eqn.params.items() if key.startswith("ax")]
    named = any("cut" in (v if isinstance(v, (tuple, list)) else (v,)) for v in names)
    return named or any(_talks(inner) for body in jaxprs_in(eqn.params) for inner in body.eqns)


def partitioned_on_slices(call: LocalCall) -> list[Any]:
    """The author's program on slices, again as a `custom_partitioning` call.

    A loop after the other is cut, because the partitioning function is asked for one axis.
    """
    eqn = call.eqn
    values = (*eqn.invars, *eqn.outvars)
    cuts = (*call.operand_cuts, *call.result_cuts)
    parts = [[1 if cut is None else cut.parts for cut in value] for value in cuts]
    program = eqn.params["call"]
    for step in _single_cuts(eqn, parts):
        operands, results = step[: len(eqn.invars)], step[len(eqn.invars) :]
        program = _local(eqn, operands, results).call
        shapes = [
            tuple(size // n for size, n in zip(shape_of(v), number, strict=True))
            for v, number in zip(values, step, strict=True)
        ]
        eqn = _resized(eqn, shapes, program)
    function = jaxpr_as_fun(program)
    if program.consts:
        return list(function(*call.operands))
    return jax_compat.bind(eqn, call.operands)


def _single_cuts(eqn: JaxprEqn, parts: list[list[int]]) -> list[list[list[int]]]:
    """The parts of every dimension, factor by factor of the rule."""
    text = jax_compat.sharding_rule_text(eqn)
    assert text is not None
    rule = parse(text)
    dims = [dim for value in (*rule.operands, *rule.results) for dim in value]
    flat = [n for value in parts for n in value]
    cut = sorted({dim[0] for dim, n in zip(dims, flat, strict=True) if n > 1})
    steps = []
    for factor in cut:
        number = {n for dim, n in zip(dims, flat, strict=True) if dim and dim[0] == factor}
        if len(number) != 1:
            raise NotLocalError("arrays are not cut alike")
        (count,) = number
        steps.append(
            [
                [count if dim and dim[0] == factor else 1 for dim in value]
                for value in (*rule.operands, *rule.results)
            ]
        )
    return steps


def _resized(eqn: JaxprEqn, shapes: Sequence[tuple[int, ...]], call: ClosedJaxpr) -> JaxprEqn:
    """The same call on arrays of other shapes."""

    def var(old: Any, shape: tuple[int, ...]) -> Any:
        return jax_compat.new_var(jax.core.ShapedArray(shape, dtype_of(old)))

    count = len(eqn.invars)
    return eqn.replace(
        invars=[var(*pair) for pair in zip(eqn.invars, shapes[:count], strict=True)],
        outvars=[var(*pair) for pair in zip(eqn.outvars, shapes[count:], strict=True)],
        params={**eqn.params, "call": call},
    )
