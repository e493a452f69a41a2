"""Which forward equation a heavy backward equation belongs to.

Rematerialized equations compute the same as forward ones: a recomputed value has the number of the
forward one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache

from jax.extend.core import JaxprEqn

from autopar.passes.graph import source_infos
from autopar.passes.graph.graph import Atom, variables
from autopar.passes.graph.primitives import HEAVY
from autopar.passes.slicing.anatomy import Anatomy

_WRAPPER = re.compile(
    r"(transpose|jvp|vmap|checkpoint|(autopar_)?rematted_computation|remat)\(?|\)"
)


def find_primals(parts: Anatomy) -> dict[int, int]:
    """Heavy backward equations of the body, each with the forward equation it belongs to.

    A backward contraction shares an operand with its primal: the residual or the parameter. Where
    several forward equations read that operand (shared layers, an encoder's output), they must
    agree in the name stack and the source line as well, or in the cotangent that the other gradient
    of the primal reads. Equations without a single primal are left out.
    """
    numbers, eqns = parts.value_numbers, parts.body.eqns

    def numbers_of(atoms: Iterable[Atom]) -> list[int]:
        return [numbers[var] for var in variables(atoms)]

    @cache
    def place_of(index: int) -> tuple[str, tuple[str, int, str] | None]:
        return _place(eqns[index])

    def at_place(candidates: Iterable[int], eqn: JaxprEqn) -> list[int]:
        there = _place(eqn)
        return [c for c in dict.fromkeys(candidates) if place_of(c) == there]

    def agreed(candidates: Sequence[int], eqn: JaxprEqn) -> int | None:
        """The only candidate; else the only one that shares an operand and the place."""
        if len(set(candidates)) > 1:
            candidates = at_place(candidates, eqn)
        return candidates[0] if len(set(candidates)) == 1 else None

    trunk = [index for index in parts.trunk() if eqns[index].primitive.name in HEAVY]
    inner = {number for index in parts.trunk() for number in numbers_of(eqns[index].outvars)}
    readers, reading = defaultdict[int, list[int]](list), defaultdict[int, set[int]](set)
    makers: dict[int, int] = {}
    for index in trunk:
        for number in numbers_of(eqns[index].invars):
            readers[number].append(index)
        makers.update(dict.fromkeys(numbers_of(eqns[index].outvars), index))
    at_places = defaultdict[object, list[int]](list)  # what of the trunk is at a place
    for index in trunk:
        at_places[eqns[index].primitive, place_of(index)].append(index)
    primals: dict[int, int] = {}
    unclear: dict[int, list[int]] = {}
    for index in sorted(parts.backward):
        eqn = eqns[index]
        if eqn.primitive.name not in HEAVY:
            continue
        operands = numbers_of(eqn.invars)
        shared = [
            candidate
            for number in operands
            for candidate in readers.get(number, ())
            if eqns[candidate].primitive is eqn.primitive
        ]
        if eqn.primitive.name == "scan":
            shared = [makers[n] for n in operands if n in makers] or shared
        primal = agreed(shared, eqn)
        if primal is None:
            unclear[index] = shared
            continue
        primals[index] = primal
        for number in operands:
            reading[number].add(primal)
    # The two gradients of a product read one cotangent: what is known of one tells the other.
    for index, shared in unclear.items():
        eqn, operands = eqns[index], numbers_of(eqns[index].invars)
        beside = {p for n in operands if n not in readers for p in reading.get(n, ())}
        primal = agreed([candidate for candidate in shared if candidate in beside], eqn)
        if primal is None:  # several at one place, such as query, key and value, read one residual
            made = [n for n in operands if n in inner and n in readers]
            near = {c for n in made for c in readers[n] if c in shared}
            primal = min(at_place(near, eqn), default=None)
        if primal is None:
            named = at_places.get((eqn.primitive, _place(eqn)), [])
            primal = named[0] if len(named) == 1 else None
        if primal is not None:
            primals[index] = primal
    return primals


def _place(eqn: JaxprEqn) -> tuple[str, tuple[str, int, str] | None]:
    stack = _WRAPPER.sub("", str(eqn.source_info.name_stack))
    return "/".join(part for part in stack.split("/") if part), source_infos.user_frame(eqn)
