"""Exponentials of scores less the largest of their rows, as softmaxes make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from autopar.passes.sharding.compiler_rules import reduces_rows
from autopar.passes.sharding.epilogues import InstructionValues, V, name_of

_SAME_NUMBERS = ("broadcast_in_dim", "max", "reshape", "stop_gradient")


class RowExponentials(Generic[V]):
    """Follows a program equation by equation.

    Args:
      root: the value whose buffer one is.
    """

    def __init__(self, root: Callable[[V], V]):
        self.root = root
        self.largest: dict[V, V] = {}  # of every row, however it is shaped: of which scores
        self.shifted: dict[V, V] = {}  # less the largest: of which scores

    def scores_of(self, made: InstructionValues[V]) -> V | None:
        """Follow an equation with one result; the scores if its result is their exponentials."""
        name, result = name_of(made), self.root(made.results[0])
        operands = [None if v is None else self.root(v) for v in made.operands]
        first = operands[0] if operands else None
        if name == "reduce_max" and made.eqn is not None and reduces_rows(made.eqn):
            if first is not None:
                self.largest[result] = first
        elif name in _SAME_NUMBERS:
            of = {self.largest[v] for v in operands if v is not None and v in self.largest}
            if len(of) == 1:
                self.largest[result] = of.pop()
        elif name == "sub" and first is not None:
            other = operands[1]
            if other is not None and self.largest.get(other) == first:
                self.shifted[result] = first
        elif name == "exp" and first is not None:
            return self.shifted.get(first)
        return None
