"""What a backward scan computes that the forward scan has computed in the same iteration.

`jax.checkpoint` around the body of a scan has the backward scan run the forward body again, from
what an iteration begins with. Results of equations of the two bodies are equal where primitive,
params and operands are (value numbering: Alpern, Wegman and Zadeck, 1988): the same constant,
slices of the same array, what the forward body stacked and the backward body has a slice of. What
is made of nothing, as masks are, JAX takes out of a forward scan, but not out of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jax.extend.core import DropVar, JaxprEqn, Literal, Var

from autopar.passes.graph.graph import Atom, equation_key, made_from, read_atom, variables
from autopar.passes.graph.microbatched import LoopPhase, scan_like, stacked
from autopar.passes.graph.primitives import DISTINCT

Names = dict[Var, Atom]
"""For each variable the first one that has the same value."""


class EqualValues(NamedTuple):
    """The first of equal equations by what makes them equal, and what is made of nothing."""

    first: dict[Hashable, JaxprEqn]
    nothing: set[Var]
    names: Names

    @classmethod
    def of(cls, eqns: Sequence[JaxprEqn]) -> EqualValues:
        """What the equations of a scope make of nothing."""
        values = cls({}, set(), {})
        for eqn in eqns:
            values.is_of_nothing(eqn, values.names)
        return values

    def is_of_nothing(self, eqn: JaxprEqn, names: Names) -> bool:
        """Whether an equation computes with numbers alone; its results are named then."""
        operands = [read_atom(names, atom) for atom in eqn.invars]
        if not self.nothing.issuperset(variables(operands)) or not self.name(eqn, names):
            return False
        self.nothing.update(variables(read_atom(names, var) for var in eqn.outvars))
        return True

    def name(self, eqn: JaxprEqn, names: Names) -> bool:
        """Name the results of an equation, the first of its kind or not; False: it has no equal."""
        key = _key(eqn, names)
        if key is None:
            return False
        before = self.first.setdefault(key, eqn)
        names.update(zip(eqn.outvars, before.outvars, strict=True))
        return True

    def are_known(self, eqn: JaxprEqn, names: Names) -> bool:
        """Name the results of an equation that has an equal before; whether it has."""
        before = self.first.get(_key(eqn, names))
        if before is None:
            return False
        pairs = list(zip(eqn.outvars, before.outvars, strict=True))
        if any(isinstance(y, DropVar) and not isinstance(x, DropVar) for x, y in pairs):
            return False  # that one does not keep what is needed here
        names.update(pairs)
        return True


def _key(eqn: JaxprEqn, names: Names) -> Hashable:
    if eqn.effects or eqn.primitive.name in DISTINCT:
        return None
    named = eqn.replace(invars=[read_atom(names, atom) for atom in eqn.invars])
    key: Hashable = equation_key(named)
    return key


@dataclass(frozen=True)
class ComputedBefore:
    """A scan, and another one of as many iterations that reads stacks of it.

    Args:
      forward: the scan that stacks.
      backward: the scan that reads.
      values: what is known of the scope of both.
    """

    forward: JaxprEqn
    backward: JaxprEqn
    values: EqualValues

    @cached_property
    def _loops(self) -> tuple[LoopPhase, LoopPhase]:
        return LoopPhase(self.forward), LoopPhase(self.backward)

    @cached_property
    def again(self) -> Names:
        """What the backward body computes again, and the forward body's variables for it."""
        first, second = self._loops
        names, inputs = Names(), dict[tuple[Var, bool], Var]()
        for inner, outer, sliced in _inputs(first, self.values):
            fixed = isinstance(outer, Literal) or outer in self.values.nothing
            names[inner] = outer if fixed else inputs.setdefault((outer, sliced), inner)
        for eqn in first.body.eqns:
            self.values.is_of_nothing(eqn, names) or self.values.name(eqn, names)
        known = Names()
        stacks = {outer: read_atom(names, atom) for atom, outer in first.stacks}
        for inner, outer, sliced in _inputs(second, self.values):
            if isinstance(outer, Literal) or outer in self.values.nothing:
                known[inner] = outer
            elif sliced and outer in stacks:
                known[inner] = stacks[outer]
            elif (outer, sliced) in inputs:
                known[inner] = inputs[outer, sliced]
        again = Names()
        for eqn in second.body.eqns:
            if self.values.is_of_nothing(eqn, known):
                continue
            operands = variables(eqn.invars)
            if all(var in known for var in operands) and self.values.are_known(eqn, known):
                again.update((v, known[v]) for v in eqn.outvars if not isinstance(v, DropVar))
        return again

    def rewritten(self, read: Collection[Var]) -> tuple[JaxprEqn, JaxprEqn]:
        """Both scans; the forward one stacks what the backward one need not compute again.

        Args:
          read: what others than the backward scan read.
        """
        first, second = self._loops
        left = [eqn for eqn in second.body.eqns if self.again.keys().isdisjoint(eqn.outvars)]
        leaving = [item.result for item in second.accumulators]
        leaving += [atom for atom, _ in second.stacks]
        alive = made_from(left, leaving)
        eqns = [eqn for number, eqn in enumerate(left) if number in alive or eqn.effects]
        reads = dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars))
        reads |= dict.fromkeys(variables(leaving))
        consts, slices = (
            [pair for pair in pairs.items() if pair[0] in reads]
            for pairs in (second.consts, second.slices)
        )
        stacks = {atom: outer for atom, outer in first.stacks if isinstance(atom, Var)}
        for var in reads:
            if var in self.again:
                same = self.again[var]
                assert isinstance(same, Var), "what an equation makes is a variable"
                outer = stacks.setdefault(same, stacked(same, self.forward.params["length"]))
                slices.append((var, outer))
        needed = {*read, *(outer for _, outer in slices)}
        pairs = dict.fromkeys([*first.stacks, *stacks.items()])
        kept = [pair for pair in pairs if pair[1] in needed]
        whole = [*first.consts.items()], first.accumulators, [*first.slices.items()]
        forward = scan_like(self.forward, *whole, kept, first.body.eqns)
        carries, results = second.accumulators, [*second.stacks]
        return forward, scan_like(self.backward, consts, carries, slices, results, eqns)


def _inputs(loop: LoopPhase, values: EqualValues) -> list[tuple[Var, Atom, bool]]:
    """What a body is given beside what it carries: the value outside, and whether it is sliced."""
    kinds = (loop.consts, False), (loop.slices, True)
    return [
        (inner, read_atom(values.names, outer), sliced)
        for pairs, sliced in kinds
        for inner, outer in pairs.items()
    ]
