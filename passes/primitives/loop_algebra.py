"""The loops of one equation's operations, joined value by value until the equation's rule is left.

A dimension is a tuple of loops. Where one operation sees [6] and another [2, 3], the loop of 6 is
split; what any operation must have whole is blocked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.passes.graph.primitives import FactorKind
from autopar.passes.primitives.factor_rule import Factor, FactorRule, ValueFactors


@dataclass(eq=False)
class JoinedLoop:
    """One loop in the making: what it was split into or joined with, and what was done to it."""

    size: int
    parts: tuple[JoinedLoop, ...] = ()  # outermost first; one part: joined with it
    blocked: bool = False
    kind: FactorKind = "pass"


LoopDim = tuple[JoinedLoop, ...]


def new_dim(size: int) -> LoopDim:
    """A dimension that is one loop."""
    return (JoinedLoop(size),)


def _leaves(dim: Sequence[JoinedLoop]) -> list[JoinedLoop]:
    """The loops that a dimension's loops have been split into, without those of one iteration."""
    found: list[JoinedLoop] = []
    for loop in dim:
        if loop.parts:
            found += _leaves(loop.parts)
        elif loop.size != 1:
            found.append(loop)
    return found


def block(dim: Sequence[JoinedLoop]) -> None:
    """None of these loops may be cut."""
    for loop in _leaves(dim):
        loop.blocked = True


def set_kind(dim: Sequence[JoinedLoop], kind: FactorKind) -> None:
    """These loops are reduced by a monoid; blocked if they are by another one already."""
    for loop in _leaves(dim):
        if kind == "replicated" or loop.kind not in ("pass", kind):
            loop.blocked = True
        loop.kind = kind


def join_dims(one: LoopDim, other: LoopDim) -> None:
    """Make two descriptions of one dimension the same, splitting loops where they differ."""
    left, right = _leaves(one), _leaves(other)
    if math.prod(loop.size for loop in left) != math.prod(loop.size for loop in right):
        block([*left, *right])
        return
    while left and right:
        a, b = left.pop(), right.pop()  # the innermost ones
        if a is b:
            continue
        if a.size < b.size:
            a, b, left, right = b, a, right, left
        outer, rest = divmod(a.size, b.size)
        if rest:
            block([a, b, *left, *right])
            return
        if outer == 1:
            _link(a, b)
        else:
            a.parts = (
                JoinedLoop(outer, blocked=a.blocked, kind=a.kind),
                JoinedLoop(b.size, blocked=a.blocked, kind=a.kind),
            )
            left.append(a.parts[0])
            _link(a.parts[1], b)


def _link(a: JoinedLoop, b: JoinedLoop) -> None:
    if a.kind != b.kind and "pass" not in (a.kind, b.kind):
        a.blocked = True
    b.blocked |= a.blocked
    if b.kind == "pass":
        b.kind = a.kind
    a.parts = (b,)


def block_diagonals(value: Sequence[LoopDim]) -> None:
    """Two dimensions of one value cannot be the same loop."""
    seen: set[JoinedLoop] = set()
    for dim in value:
        for loop in _leaves(dim):
            loop.blocked |= loop in seen
            seen.add(loop)


def finished_rule(
    operands: Sequence[list[LoopDim]], results: Sequence[list[LoopDim]]
) -> FactorRule:
    """The rule of an equation from its operands' and results' dimensions."""
    numbers: dict[JoinedLoop, int] = {}

    def number(dims: list[LoopDim]) -> ValueFactors:
        return tuple(
            tuple(numbers.setdefault(loop, len(numbers)) for loop in _leaves(dim)) for dim in dims
        )

    result_factors = tuple(map(number, results))
    operand_factors = tuple(map(number, operands))
    factors = []
    for loop, i in numbers.items():
        inside = [any(i in dim for dim in value) for value in result_factors]
        can_cut = all(inside) if loop.kind == "pass" else not any(inside)
        kind = loop.kind if can_cut and not loop.blocked else "replicated"
        factors.append(Factor(loop.size, kind))
    return FactorRule(tuple(factors), operand_factors, result_factors)
