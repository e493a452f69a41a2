"""Factor rules of all equations of a program, from Shardy's registry and a few of our own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from autopar.base.errors import UnknownPrimitiveWarning
from autopar.base.user_code import warn_at_call
from autopar.passes.graph.graph import used_vars, user_source
from autopar.passes.graph.primitives import (
    CONTROL_FLOW,
    ELEMENTWISE,
    FOREIGN,
    KEEPS_ZERO,
    KERNELS,
    MONOID_REDUCTIONS,
    SCATTERS,
)
from autopar.passes.graph.scans import bodies_with_constants
from autopar.passes.primitives.factor_rule import Factor, FactorRule, Rules, ValueFactors
from autopar.passes.primitives.kernels import KERNEL_RULES, kernel_rule
from autopar.passes.primitives.own_rules import OWN, elementwise, reduction, replicated
from autopar.passes.primitives.shardings import (
    dtype_of,
    is_known,
    is_tiny_float,
    shape_of,
    whole_dims,
)
from autopar.passes.primitives.shardy import lower_rules


class _EquationRules(Mapping[JaxprEqn, FactorRule]):
    """The factor rule of every equation that is not control flow, keyed by the equation itself."""

    def __init__(self, rules: Sequence[tuple[JaxprEqn, FactorRule]]):
        self._rules = {id(eqn): (eqn, rule) for eqn, rule in rules}

    def __getitem__(self, eqn: JaxprEqn) -> FactorRule:
        try:
            return self._rules[id(eqn)][1]
        except KeyError:
            raise KeyError(f"no rule was populated for the equation {eqn}") from None

    def __iter__(self) -> Iterator[JaxprEqn]:
        return (eqn for eqn, _ in self._rules.values())

    def __len__(self) -> int:
        return len(self._rules)

    def __str__(self) -> str:
        return "\n".join(f"{eqn.primitive}: {rule}" for eqn, rule in self._rules.values())


def populate(jaxprs: Jaxpr | Iterable[Jaxpr], *, warns: bool = True) -> Rules:
    """Find the rule of every equation, also inside scan, while and cond bodies.

    Control-flow equations have no rule: who walks them recurses. Rules are cached in the process
    by what determines them. A primitive without a rule is replicated, with one warning.

    Args:
      jaxprs: a flat jaxpr (see `autopar.passes.graph.flatten`), or several.
      warns: whether to warn; who only guesses leaves that to what is planned.

    Returns:
      A mapping from equations (by identity) to rules.
    """
    pairs = [
        (eqn, _key(eqn, flags))
        for jaxpr in ([jaxprs] if isinstance(jaxprs, Jaxpr) else jaxprs)
        for eqn, flags in _equations(jaxpr)
    ]
    missing: dict[Any, JaxprEqn] = {}
    for eqn, key in pairs:
        if key not in _CACHE:
            missing.setdefault(key, eqn)
    _CACHE.update(zip(missing, _new_rules(list(missing.items())), strict=True))
    warned: set[tuple[str, str]] = set()
    for eqn, key in pairs if warns else ():
        if _CACHE[key] is not None or not any(map(shape_of, (*eqn.invars, *eqn.outvars))):
            continue  # of scalars, nothing could be cut
        name = eqn.primitive.name
        is_kernel = name in KERNELS or name in FOREIGN
        place = name, user_source(eqn) if is_kernel else ""
        if place not in warned:
            warned.add(place)
            _warn(eqn, is_kernel)
    return _EquationRules([(eqn, _CACHE[key] or _normal(replicated(eqn))) for eqn, key in pairs])


_CACHE: dict[Any, FactorRule | None] = {}  # None: there is no rule


def _equations(
    jaxpr: Jaxpr, zeros: frozenset[Var] = frozenset()
) -> Iterator[tuple[JaxprEqn, frozenset[int]]]:
    """Equations, each with the positions of what its rule depends on beside its operands' types.

    These are the operands that are zero, where they would be counted several times, and a kernel's
    results that nobody reads.
    """
    known, used = set(zeros), used_vars(jaxpr)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in CONTROL_FLOW:
            for inner, given in bodies_with_constants(eqn):
                zero = (v for v, atom in given if _is_zero(atom, known))
                yield from _equations(inner, frozenset(zero))
            continue
        if name in KEEPS_ZERO and all(_is_zero(atom, known) for atom in eqn.invars):
            known.update(eqn.outvars)
        if name in KERNELS:
            yield eqn, frozenset(i for i, var in enumerate(eqn.outvars) if var not in used)
            continue
        positions = _ZERO_MATTERS.get(name, ())
        yield eqn, frozenset(i for i in positions if _is_zero(eqn.invars[i], known))


# A scatter adds to its first operand, a reduction to its initial value.
_ZERO_MATTERS: dict[str, tuple[int, ...]] = {**dict.fromkeys(SCATTERS, (0,)), "reduce": (1,)}


def _is_zero(atom: Any, zeros: set[Var]) -> bool:
    if isinstance(atom, Literal):
        return not np.any(np.asarray(atom.val))
    return atom in zeros


def _key(eqn: JaxprEqn, flags: frozenset[int]) -> Any:
    """What determines a rule: primitive, params, and the operands' shapes and dtypes."""
    params = tuple((name, _hashable(value)) for name, value in eqn.params.items())
    avals = tuple(map(_signature, eqn.invars))
    return eqn.primitive.name, params, avals, flags


def _signature(var: Any) -> Any:
    return var.aval.shape, var.aval.dtype


def _hashable(value: Any) -> Any:
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        return str(value)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def _new_rules(missing: Sequence[tuple[Any, JaxprEqn]]) -> list[FactorRule | None]:
    found: dict[int, FactorRule] = {}
    to_lower: list[int] = []
    for i, (key, eqn) in enumerate(missing):
        name = eqn.primitive.name
        if name in OWN:
            found[i] = OWN[name](eqn, key[-1])
        elif name in KERNELS or name in KERNEL_RULES:
            rule = kernel_rule(eqn, key[-1])
            if rule is not None:
                found[i] = rule
        elif any(0 in _signature(var)[0] for var in (*eqn.invars, *eqn.outvars)):
            # Nothing to compute, but its rows must not seem to mix.
            found[i] = (elementwise if name in ELEMENTWISE else replicated)(eqn)
        elif is_known(name):
            to_lower.append(i)
    lowered = lower_rules([missing[i][1] for i in to_lower])
    for i, rule in zip(to_lower, lowered, strict=True):
        eqn = missing[i][1]
        if rule is None and eqn.primitive.name in ELEMENTWISE:
            rule = elementwise(eqn)
        if rule is None and eqn.primitive.name in MONOID_REDUCTIONS:
            rule = reduction(eqn)
        if rule is not None:
            found[i] = rule
    return [
        _normal(_keep_whole(found[i], eqn)) if i in found else None
        for i, (_, eqn) in enumerate(missing)
    ]


def _keep_whole(rule: FactorRule, eqn: JaxprEqn) -> FactorRule:
    """Replicate factors that `bind_local` cannot cut, and those of sums in tiny floats and bits."""
    whole: set[int] = set()
    if any(is_tiny_float(dtype := dtype_of(v)) or dtype == np.bool_ for v in eqn.outvars):
        whole.update(i for i, f in enumerate(rule.factors) if f.kind in ("sum", "prod"))
    for values, all_dims in zip((rule.operands, rule.results), whole_dims(eqn), strict=True):
        for value, dims in zip(values, all_dims, strict=True):
            for dim in dims:
                whole.update(value[dim])
    factors = tuple(
        Factor(factor.size, "replicated") if i in whole else factor
        for i, factor in enumerate(rule.factors)
    )
    return FactorRule(factors, rule.operands, rule.results, rule.inner)


def _normal(rule: FactorRule) -> FactorRule:
    """Number factors in the order in which results, then operands, name them; drop the others."""
    order: dict[int, int] = {}
    for value in (*rule.results, *rule.operands):
        for dim in value:
            for factor in dim:
                order.setdefault(factor, len(order))

    def rename(values: tuple[ValueFactors, ...]) -> tuple[ValueFactors, ...]:
        return tuple(tuple(tuple(order[i] for i in dim) for dim in value) for value in values)

    factors, inner = (rule.factors[i] for i in order), (order[i] for i in rule.inner)
    return FactorRule(tuple(factors), rename(rule.operands), rename(rule.results), tuple(inner))


def _warn(eqn: JaxprEqn, is_kernel: bool) -> None:
    hint = ""
    if is_kernel:
        hint = (
            " Where it computes along a dimension independently (over a batch, over heads), say so "
            'by autopar.local(function, "b t h d, b s h d, b s h d -> b t h d", cut="b h").'
        )
    warn_at_call(
        f"autopar has no rule for the operation {eqn.primitive} at {user_source(eqn)}: every "
        f"device and every microbatch computes it whole.{hint}",
        UnknownPrimitiveWarning,
    )
