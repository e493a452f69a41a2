"""A factor rule: which dimensions of an equation's operands and results are the same loop.

The notation is Shardy's (OpShardingRuleAttr in its documentation): `([i,k],[k,j])->([i,j])
reduction={k}` says that a matrix product loops over `i`, `j` and `k`, and sums over `k`.
A dimension that merges several loops lists them from the outermost: `([i,j])->([ij])`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from jax.extend.core import JaxprEqn

from autopar.passes.graph.primitives import FactorKind

MONOIDS: tuple[FactorKind, ...] = ("sum", "max", "min", "prod", "and", "or")
DimFactors = tuple[int, ...]  # factor indices of one dimension, outermost first
ValueFactors = tuple[DimFactors, ...]


@dataclass(frozen=True)
class Factor:
    """One loop of an equation: its trip count and what cutting it does to the results.

    `pass`: results are cut along it too, or every result is computed from it alone.
    A monoid: each cut computes a partial result, and combining them with the monoid is the whole;
    results that have the loop in a dimension are cut along it (the two gradients of a product).
    `replicated`: it must not be cut.
    """

    size: int
    kind: FactorKind


@dataclass(frozen=True)
class FactorRule:
    """Factors of an equation and where they are in each dimension of operands and results.

    The loops of `inner` may be cut though they are inside of others in a dimension: where those are
    cut into single iterations.
    """

    factors: tuple[Factor, ...]
    operands: tuple[ValueFactors, ...]
    results: tuple[ValueFactors, ...]
    inner: tuple[int, ...] = ()

    @cached_property
    def dims_of_factors(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each factor where it is: numbers of operands, then results, and dimensions of it."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.factors]
        for number, value in enumerate((*self.operands, *self.results)):
            for dim, factors in enumerate(value):
                for factor in dict.fromkeys(factors):
                    found[factor].append((number, dim))
        return tuple(map(tuple, found))

    @cached_property
    def nested(self) -> frozenset[int]:
        """The factors that are not the outermost real loop of some dimension that they are in."""
        dims = [dim for value in (*self.operands, *self.results) for dim in value]
        return frozenset(f for dim in dims for f in dim if f != self.outermost(dim))

    def outermost(self, dim: tuple[int, ...]) -> int | None:
        """The outermost factor of a dimension that is a real loop."""
        return next((f for f in dim if self.factors[f].size > 1), None)

    def __str__(self) -> str:
        def value(dims: ValueFactors) -> str:
            return "[" + ",".join("".join(map(_name, dim)) or "1" for dim in dims) + "]"

        text = f"({','.join(map(value, self.operands))})->({','.join(map(value, self.results))})"
        for kind in (*MONOIDS, "replicated"):
            named = [_name(i) for i, factor in enumerate(self.factors) if factor.kind == kind]
            if named:
                label = "reduction" if kind == "sum" else kind
                text += f" {label}={{{','.join(named)}}}"
        return text


def _name(index: int) -> str:
    letter = chr(ord("i") + index % 18)  # Shardy's own order: i..z, then i1, j1, ...
    return letter if index < 18 else f"{letter}{index // 18}"


Rules = Mapping[JaxprEqn, FactorRule]  # of every equation that is not control flow
