"""How a value depends on the batch: the states of the analysis and their algebra.

Microbatch `i` of `M` holds the rows `[:, i, :]` of a dimension seen as `[major, M, rest]`; a
`Place` says which dimension of a value that is, and its `major`. A value is

- whole: the same for every microbatch, so it can be had before the loop;
- split: every microbatch computes its own rows, found at a place;
- partial: every microbatch computes a partial result, combined by a monoid (mostly a sum);
- late: known only when the loop is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from jax.extend.core import JaxprEqn

from autopar.passes.graph.primitives import KEEPS_ZERO, REARRANGES
from autopar.passes.primitives.factor_rule import DimFactors, FactorRule, ValueFactors

Kind = Literal["whole", "split", "partial", "late"]
Place = tuple[int, int]  # (dimension, major)
Cut = tuple[int, int]  # (factor, major within it)
Form = Place | str | None  # how the loop holds a value: WHOLE, a Place, or a monoid's name
WHOLE: Form = None

IDEMPOTENT = frozenset({"max", "min", "and", "or"})


@dataclass(frozen=True, slots=True)
class BatchState:
    """What is known about one value.

    `place` of a late value is where its rows were before they were mixed; it only says how much
    the value costs, as `blurred` does (its rows are somewhere, but not in one known place).
    `zero` marks known zeros, `batch` and `params` what the value depends on.
    """

    kind: Kind
    place: Place | None = None
    monoid: str | None = None
    zero: bool = False
    batch: bool = False
    params: bool = False
    blurred: bool = False

    @property
    def form(self) -> Form:
        """How the loop holds the value."""
        return self.place if self.kind == "split" else self.monoid

    @property
    def wide(self) -> bool:
        """Whether its size grows with the batch."""
        return self.blurred or self.place is not None

    @property
    def early(self) -> bool:
        """Whether the whole value can be had before the loop."""
        return self.kind == "whole" or (self.kind == "split" and not self.params)

    def __str__(self) -> str:
        if self.kind == "split":
            assert self.place is not None
            return f"split({self.place[0]}, major={self.place[1]})"
        return str(self.monoid) if self.kind == "partial" else self.kind


@cache
def whole(
    zero: bool = False, batch: bool = False, params: bool = False, blurred: bool = False
) -> BatchState:
    """The same for every microbatch."""
    return BatchState("whole", zero=zero, batch=batch, params=params, blurred=blurred)


@cache
def split(place: Place, params: bool = True) -> BatchState:
    """Every microbatch has its own rows."""
    return BatchState("split", place=place, batch=True, params=params)


@cache
def partial(monoid: str, params: bool = True) -> BatchState:
    """Every microbatch has a partial result."""
    return BatchState("partial", monoid=monoid, batch=True, params=params)


@cache
def late(place: Place | None = None, params: bool = True, blurred: bool = False) -> BatchState:
    """Known when the loop is done."""
    return BatchState("late", place=place, batch=True, params=params, blurred=blurred)


def join(one: BatchState, other: BatchState) -> BatchState:
    """The state of a value that is one or the other (a loop's carry, a branch's result)."""
    if one == other:
        return one
    params, batch = one.params or other.params, one.batch or other.batch
    kinds = {one.kind, other.kind}
    if kinds == {"whole"}:
        blurred = one.blurred or other.blurred
        return whole(zero=one.zero and other.zero, batch=batch, params=params, blurred=blurred)
    if "late" not in kinds:
        forms = {state.form for state in (one, other) if state.kind != "whole"}
        if len(forms) == 1:
            (form,) = forms
            return partial(form, params) if isinstance(form, str) else split(form, params)
    return late(one.place or other.place, params, one.blurred or other.blurred)


# Places and factors.


def locate(dims: DimFactors, sizes: Sequence[int], major: int, parts: int) -> Cut | None:
    """The factor in which a dimension is cut, and the cut's major within it.

    None where the cut does not fall into a single factor.
    """
    outer = 1
    for factor in dims:
        size = sizes[factor]
        if size > 1 and major % outer == 0 and size % (major // outer * parts) == 0:
            return factor, major // outer
        outer *= size
    return None


class Occurrences:
    """Where each factor of a rule is: for a value, (dimension, product of what is outside it).

    A factor that occurs twice in one value has no place there: `TWICE`.
    """

    TWICE = (-1, -1)

    def __init__(self, rule: FactorRule):
        self.rule = rule
        self.sizes = tuple(factor.size for factor in rule.factors)
        self.operands = [self._index(value) for value in rule.operands]
        self.results = [self._index(value) for value in rule.results]

    def _index(self, value: ValueFactors) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for dim, factors in enumerate(value):
            outer = 1
            for factor in factors:
                found[factor] = self.TWICE if factor in found else (dim, outer)
                outer *= self.sizes[factor]
        return found

    def factor(self, value: ValueFactors, place: Place | None, parts: int) -> Cut | None:
        """The factor and the major within it, of a cut of `value` at `place`."""
        return place and locate(value[place[0]], self.sizes, place[1], parts)

    def places(
        self, values: Iterable[dict[int, tuple[int, int]]], factor: int, major: int
    ) -> list[Place | None] | None:
        """Where each value is cut when the factor is; None if one holds the factor twice."""
        found = [index.get(factor) for index in values]
        if self.TWICE in found:
            return None
        return [where and (where[0], where[1] * major) for where in found]


_NOT_DATA = {"select_n": lambda k: k == 0, "dynamic_slice": lambda k: k > 0}


def keeps_zero(eqn: JaxprEqn, states: Sequence[BatchState]) -> bool:
    """Whether the results of an equation are known zeros because its operands are.

    A product with a zero is not: the other factor may be infinite.
    """
    name = eqn.primitive.name
    if name not in KEEPS_ZERO:
        return False
    skip = _NOT_DATA.get(name)
    return all(state.zero for k, state in enumerate(states) if not (skip and skip(k)))


def moves_elements(eqn: JaxprEqn) -> bool:
    """Whether the only operand's elements are moved or repeated, and nothing else."""
    return eqn.primitive.name in REARRANGES and len(eqn.invars) == 1
