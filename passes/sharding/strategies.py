"""Strategies of one equation: each mesh axis cuts one factor, or nothing, or stays unreduced.

A *choice* gives every mesh axis a factor index, or `REPLICATE`, or `LINEAR - k`: the k-th set of
operands in which the equation is jointly linear is partial over the axis, and so are the results.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.passes.primitives.factor_rule import FactorRule, ValueFactors
from autopar.passes.sharding.layout import Layout, num_parts

REPLICATE = -1
LINEAR = -2
Choice = tuple[int, ...]
LinearSets = tuple[frozenset[int], ...]


class Strategy(NamedTuple):
    """What a choice asks of each operand, leaves in each result, and divides the work by.

    `completed` results are all-reduced right after the equation: `left` is what it leaves before.
    """

    choice: Choice
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    division: int
    left: tuple[Layout, ...]

    @property
    def completed(self) -> bool:
        return self.left != self.results


Strategies = tuple[Strategy, ...]


@dataclass(frozen=True)
class Shape:
    """What strategies depend on: the rule and in which operands the equation is linear.

    Factors `inside` of others can be cut where each of those is cut into single iterations.
    """

    rule: FactorRule
    linear: LinearSets
    cuttable: tuple[bool, ...]
    inside: tuple[tuple[int, tuple[int, ...]], ...] = ()


def shape_of(rule: FactorRule, linear: LinearSets) -> Shape:
    """A factor can be cut by a mesh axis if it is the outermost one wherever it occurs.

    Or inside of others, if the rule says so.
    """
    outermost = [factor.kind != "replicated" and factor.size > 1 for factor in rule.factors]
    inside: dict[int, tuple[int, ...]] = {}
    for value in (*rule.operands, *rule.results):
        for dim in value:
            loops = [f for f in dim if rule.factors[f].size > 1]
            for number, factor in enumerate(loops[1:], 1):
                outermost[factor] = False
                if factor in rule.inner and rule.factors[factor].kind != "replicated":
                    inside[factor] = tuple(loops[:number])
    return Shape(rule, linear, tuple(outermost), tuple(inside.items()))


def strategy(shape: Shape, choice: Choice, mesh: Sequence[int]) -> Strategy:
    """The layouts that a valid choice implies."""
    rule = shape.rule
    axes_of: dict[int, list[int]] = {}
    for axis, picked in enumerate(choice):
        if picked >= 0:
            axes_of.setdefault(picked, []).append(axis)
    linear_axes = [(axis, shape.linear[LINEAR - p]) for axis, p in enumerate(choice) if p <= LINEAR]

    def dims(value: ValueFactors) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(a for f in dim for a in axes_of.get(f, ())) for dim in value)

    operands = tuple(
        Layout(dims(value), tuple((a, "sum") for a, sets in linear_axes if i in sets))
        for i, value in enumerate(rule.operands)
    )
    unreduced = {a: "sum" for a, _ in linear_axes}

    def result(value: ValueFactors) -> Layout:
        inside = {f for dim in value for f in dim}
        reduced = {
            axis: rule.factors[f].kind
            for f, axes in axes_of.items()
            if rule.factors[f].kind != "pass" and f not in inside
            for axis in axes
        }
        return Layout(dims(value), tuple(sorted({**reduced, **unreduced}.items())))

    results = tuple(map(result, rule.results))
    division = num_parts((a for axes in axes_of.values() for a in axes), mesh)
    return Strategy(choice, operands, results, division, results)


def as_it_lies(layout: Layout, mesh: Sequence[int]) -> Strategy:
    """Of an identity: the operand is read in the layout that the result has."""
    axes = [axis for dim in layout.dims for axis in dim]
    return Strategy((), (layout,), (layout,), num_parts(axes, mesh), (layout,))


def completed(
    found: Strategy, result_shape: Sequence[int], mesh: Sequence[int], scatter: bool
) -> list[Strategy]:
    """The same strategy with its results reduced at once: whole, or scattered along a dimension.

    They are scattered along all axes that they are partial over, or along some, and so are whole
    along the others: gradients inside a node and across nodes.
    """
    axes = tuple(axis for axis, _ in found.left[0].partial)
    whole = tuple(Layout(r.dims) for r in found.results)
    variants = [found._replace(results=whole)]
    if scatter and len(whole) == 1 and all(m == "sum" for _, m in found.left[0].partial):
        for count in range(len(axes), 0, -1):
            for some in itertools.combinations(axes, count):
                for dim, size in enumerate(result_shape):
                    cut = tuple(sorted((*whole[0].dims[dim], *some)))
                    if size % num_parts(cut, mesh) == 0:
                        dims = (*whole[0].dims[:dim], cut, *whole[0].dims[dim + 1 :])
                        variants.append(found._replace(results=(Layout(dims),)))
    return variants


def _divides(rule: FactorRule, choice: Choice, mesh: Sequence[int]) -> bool:
    """Whether every cut factor divides evenly."""
    return all(
        rule.factors[f].size % num_parts((a for a, p in enumerate(choice) if p == f), mesh) == 0
        for f in {*choice}
        if f >= 0
    )


def _is_nested(shape: Shape, choice: Choice, mesh: Sequence[int]) -> bool:
    """Whether what is around a cut inner loop is cut into single iterations, by earlier axes."""
    for factor, around in shape.inside:
        before = choice[: choice.index(factor)] if factor in choice else ()
        for outer in around if factor in choice else ():
            parts = num_parts((axis for axis, picked in enumerate(before) if picked == outer), mesh)
            if parts != shape.rule.factors[outer].size:
                return False
    return True


def choices(shape: Shape, mesh: Sequence[int], *, linear: bool) -> list[Choice]:
    """Every valid choice, the replicated one first."""
    factors = [f for f, ok in enumerate(shape.cuttable) if ok]
    factors += [factor for factor, _ in shape.inside]
    sets = [LINEAR - k for k in range(len(shape.linear))] if linear else []
    options = [[REPLICATE] if size == 1 else [REPLICATE, *factors, *sets] for size in mesh]
    found = [c for c in itertools.product(*options) if _divides(shape.rule, c, mesh)]
    return [c for c in found if _is_nested(shape, c, mesh)] if shape.inside else found


def follow(shape: Shape, lead: int, layout: Layout, mesh: Sequence[int]) -> Choice:
    """The choice that takes operand `lead` as it lies, as far as the rule allows."""
    picked = _take_dims(shape, shape.rule.operands[lead], layout, mesh)
    for axis, monoid in layout.partial:
        if monoid == "sum":
            position = next((k for k, s in enumerate(shape.linear) if lead in s), None)
            if position is not None:
                picked[axis] = LINEAR - position
    return tuple(picked)


def produce(shape: Shape, result: int, layout: Layout, mesh: Sequence[int]) -> Choice:
    """The choice that leaves a result in `layout`, as far as the rule allows (for `pass`)."""
    return tuple(_take_dims(shape, shape.rule.results[result], layout, mesh))


def _take_dims(shape: Shape, value: ValueFactors, layout: Layout, mesh: Sequence[int]) -> list[int]:
    picked = [REPLICATE] * len(mesh)
    for dim, axes in enumerate(layout.dims):
        factor = shape.rule.outermost(value[dim])
        if factor is None or not shape.cuttable[factor]:
            continue
        parts = 1
        for axis, taken in enumerate(picked):
            if taken == factor:
                parts *= mesh[axis]
        for axis in axes:
            parts *= mesh[axis]
            if shape.rule.factors[factor].size % parts:
                break
            picked[axis] = factor
    return picked
