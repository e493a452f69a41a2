"""Which forward equation a heavy backward equation belongs to.

Rematerialized equations compute the same as forward ones: values are numbered by what computes them
(barriers are transparent), so a recomputed value has the number of the forward one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom
from autopar.passes.graph.primitives import HEAVY
from autopar.passes.slicing.anatomy import Anatomy

_WRAPPER = re.compile(r"(transpose|jvp|vmap|checkpoint|rematted_computation|remat)\(?|\)")


def find_primals(parts: Anatomy) -> dict[int, int]:
    """Heavy backward equations of the body, each with the forward equation it belongs to.

    A backward contraction shares an operand with its twin: the residual or the parameter. Where
    several forward equations read that operand (shared layers, an encoder's output), they must
    agree in the name stack and the source line as well, or in the cotangent that the other gradient
    of the twin reads. Equations without a single twin are left out.
    """
    numbers = _value_numbers(parts)
    eqns = parts.body.eqns
    trunk = [index for index in parts.trunk() if eqns[index].primitive.name in HEAVY]
    inner = {numbers[var] for index in parts.trunk() for var in eqns[index].outvars}
    readers: dict[int, list[int]] = {}
    makers: dict[int, int] = {}
    for index in trunk:
        for number in _numbers_of(eqns[index].invars, numbers):
            readers.setdefault(number, []).append(index)
        for number in _numbers_of(eqns[index].outvars, numbers):
            makers[number] = index
    twins: dict[int, int] = {}
    unclear: dict[int, list[int]] = {}
    for index in sorted(parts.backward):
        eqn = eqns[index]
        if eqn.primitive.name not in HEAVY:
            continue
        operands = _numbers_of(eqn.invars, numbers)
        shared = [
            candidate
            for number in operands
            for candidate in dict.fromkeys(readers.get(number, ()))
            if eqns[candidate].primitive is eqn.primitive
        ]
        if eqn.primitive.name == "scan":
            shared = [makers[n] for n in operands if n in makers] or shared
        twin = _agreed(shared, eqn, eqns)
        if twin is None:
            unclear[index] = shared
        else:
            twins[index] = twin
    # The two gradients of a product read one cotangent: what is known of one tells the other.
    reading: dict[int, set[int]] = {}
    for index, twin in twins.items():
        for number in _numbers_of(eqns[index].invars, numbers):
            reading.setdefault(number, set()).add(twin)
    for index, shared in unclear.items():
        eqn = eqns[index]
        operands = _numbers_of(eqn.invars, numbers)
        beside = {t for n in operands if n not in readers for t in reading.get(n, ())}
        twin = _agreed([candidate for candidate in shared if candidate in beside], eqn, eqns)
        if twin is None:  # several at one place, such as query, key and value, read one residual
            made = [n for n in operands if n in inner and n in readers]
            near = {c for n in made for c in readers[n] if c in shared}
            near = {c for c in near if _place(eqns[c]) == _place(eqn)}
            twin = min(near, default=None)
        if twin is None:
            named = [c for c in trunk if eqns[c].primitive is eqn.primitive]
            named = [c for c in named if _place(eqns[c]) == _place(eqn)]
            twin = named[0] if len(named) == 1 else None
        if twin is not None:
            twins[index] = twin
    return twins


def _agreed(candidates: list[int], eqn: JaxprEqn, eqns: list[JaxprEqn]) -> int | None:
    """The only candidate; else the only one that shares an operand and the place."""
    if len(set(candidates)) == 1:
        return candidates[0]
    placed = {c for c in candidates if _place(eqns[c]) == _place(eqn)}
    return placed.pop() if len(placed) == 1 else None


def _place(eqn: JaxprEqn) -> tuple[str, Any]:
    stack = _WRAPPER.sub("", str(eqn.source_info.name_stack))
    return "/".join(part for part in stack.split("/") if part), jax_compat.user_frame(eqn)


def _numbers_of(atoms: Iterable[Any], numbers: dict[Var, int]) -> list[int]:
    return [numbers[v] for v in atoms if not isinstance(v, Literal) and v in numbers]


def _value_numbers(parts: Anatomy) -> dict[Var, int]:
    """Equal numbers for variables of the body that hold equal values."""
    numbers: dict[Var, int] = {}
    known: dict[Any, list[int]] = {}
    fresh = iter(range(1 << 62))

    def key(atom: Atom) -> Any:
        if isinstance(atom, Literal):
            return ("literal", str(atom.val), str(atom.aval))
        return numbers[atom]

    for var in parts.body.invars:
        numbers[var] = next(fresh)
    for eqn in parts.body.eqns:
        if eqn.primitive.name == "optimization_barrier":
            for var, operand in zip(eqn.outvars, eqn.invars, strict=True):
                numbers[var] = next(fresh) if isinstance(operand, Literal) else numbers[operand]
            continue
        # Bodies of control flow are equal if they are one object.
        params = tuple((name, _param(value)) for name, value in sorted(eqn.params.items()))
        signature = (eqn.primitive.name, params, tuple(map(key, eqn.invars)))
        made = known.get(signature)
        if made is None or eqn.effects:
            made = known[signature] = [next(fresh) for _ in eqn.outvars]
        numbers.update(zip(eqn.outvars, made, strict=True))
    return numbers


def _param(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return str(value)
    return value
