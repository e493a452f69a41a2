"""What a backward scan computes that the forward scan has computed in the same iteration.

`jax.checkpoint` around the body of a scan has the backward scan run the forward body again, from
what an iteration begins with. Results of equations of the two bodies are equal where primitive,
params and operands are (value numbering: Alpern, Wegman and Zadeck, 1988): the same constant,
slices of the same array, what the forward body stacked and the backward body has a slice of. What
is made of nothing, as masks are, or of constants of the loop alone, JAX takes out of a forward
scan, but not out of a checkpoint: the backward body computes from what is outside what has its
equal there.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jax.extend.core import DropVar, JaxprEqn, Literal, Var

from autopar.passes.graph.graph import Atom, equation_key, made_from, read_atom, variables
from autopar.passes.graph.microbatched import Carried, LoopPhase, scan_like, stacked
from autopar.passes.graph.primitives import DISTINCT


class OfNothing(NamedTuple):
    """What the equations of a scope make of numbers alone.

    Args:
      first: the first of equal equations, by what makes them equal.
      names: for each result the first one that has its value.
    """

    first: Mapping[Hashable, JaxprEqn]
    names: Mapping[Var, Atom]

    @classmethod
    def of(cls, eqns: Sequence[JaxprEqn]) -> OfNothing:
        """Of a scope's equations, in order."""
        numbers, names = _Numbering(cls({}, {})), dict[Var, Atom]()
        for eqn in eqns:
            numbers.name_of_nothing(eqn, names)
        return cls(numbers.first, names)


class Outside(NamedTuple):
    """What a scope has computed before a scan.

    Args:
      nothing: what all of its equations make of numbers alone.
      first: of all equations before the scan, the first of equal ones.
      names: for each of their results the first one that has its value.
    """

    nothing: OfNothing
    first: Mapping[Hashable, JaxprEqn]
    names: Mapping[Var, Atom]

    @classmethod
    def before(cls, eqns: Sequence[JaxprEqn], nothing: OfNothing) -> Outside:
        """Of the equations before the scan, in order."""
        numbers, names = _Numbering(OfNothing({}, {})), {**nothing.names}
        for eqn in eqns:
            numbers.name(eqn, names)
        return cls(nothing, numbers.first, {**names, **nothing.names})


class _Numbering:
    """Names for values, under which equal ones are one; it grows while equations are named."""

    def __init__(self, outside: OfNothing):
        self.first = {**outside.first}
        self.nothing = set(variables(outside.names.values()))  # names of what is made of nothing

    def name_of_nothing(self, eqn: JaxprEqn, names: dict[Var, Atom]) -> bool:
        """Name the results of an equation that reads only what is made of nothing, if it does."""
        operands = variables(read_atom(names, atom) for atom in eqn.invars)
        if not self.nothing.issuperset(operands) or not self.name(eqn, names):
            return False
        self.nothing.update(variables(read_atom(names, var) for var in eqn.outvars))
        return True

    def name(self, eqn: JaxprEqn, names: dict[Var, Atom]) -> bool:
        """Name the results of an equation, the first of its kind or not; False: it has no equal."""
        key = _key(eqn, names)
        if key is None:
            return False
        if _lacks(self.first.setdefault(key, eqn), eqn):
            self.first[key] = eqn
        names.update(zip(eqn.outvars, self.first[key].outvars, strict=True))
        return True

    def name_again(self, eqn: JaxprEqn, names: dict[Var, Atom]) -> bool:
        """Name the results of an equation that is not the first of its kind, if it is not."""
        before = self.first.get(_key(eqn, names))
        if before is None or _lacks(before, eqn):
            return False
        names.update(zip(eqn.outvars, before.outvars, strict=True))
        return True


def _key(eqn: JaxprEqn, names: Mapping[Var, Atom]) -> Hashable:
    if eqn.effects or eqn.primitive.name in DISTINCT:
        return None
    named = eqn.replace(invars=[read_atom(names, atom) for atom in eqn.invars])
    key: Hashable = equation_key(named)
    return key


def _lacks(before: JaxprEqn, eqn: JaxprEqn) -> bool:
    """Whether an equation drops what an equal one keeps."""
    pairs = zip(before.outvars, eqn.outvars, strict=True)
    return any(isinstance(x, DropVar) and not isinstance(y, DropVar) for x, y in pairs)


@dataclass(frozen=True)
class ComputedBefore:
    """A scan, and another one of as many iterations that reads stacks of it.

    Args:
      forward: the scan that stacks.
      backward: the scan that reads.
      outside: what the scope of both has computed before.
    """

    forward: JaxprEqn
    backward: JaxprEqn
    outside: Outside

    @cached_property
    def _loops(self) -> tuple[LoopPhase, LoopPhase]:
        return LoopPhase(self.forward), LoopPhase(self.backward)

    @cached_property
    def again(self) -> Mapping[Var, Var]:
        """What the backward body computes again, and the forward body's variables for it.

        Two scans may have one body, so a variable of the backward body is nothing without a name.
        """
        return {v: same for v, same in self._found.items() if same not in self._made_outside}

    @cached_property
    def before(self) -> Mapping[Var, Var]:
        """What the backward body computes of constants alone, and the scope's variables for it."""
        return {v: same for v, same in self._found.items() if same in self._made_outside}

    @cached_property
    def _made_outside(self) -> set[Var]:
        return {var for eqn in self.outside.first.values() for var in eqn.outvars}

    @cached_property
    def _found(self) -> Mapping[Var, Var]:
        """What the backward body computes again, and where it was computed first."""
        first, second = self._loops
        numbers = _Numbering(self.outside.nothing)
        outside = _Numbering(OfNothing(self.outside.first, {}))
        names: dict[Var, Atom] = {}
        given: dict[tuple[Var, bool], Atom] = {}
        for inner, outer, sliced in self._inputs(first):
            if isinstance(outer, Literal):
                names[inner] = outer
                continue
            is_nothing = outer in numbers.nothing
            own: Atom = inner if sliced else outer
            names[inner] = given.setdefault((outer, sliced), own)
            if is_nothing:
                numbers.nothing.update(variables([names[inner]]))
        for eqn in first.body.eqns:
            if not numbers.name_of_nothing(eqn, names):
                numbers.name(eqn, names)
        stacks = {outer: read_atom(names, atom) for atom, outer in first.stacks}
        known: dict[Var, Atom] = {}
        for inner, outer, sliced in self._inputs(second):
            if isinstance(outer, Literal):
                known[inner] = outer
            elif sliced and outer in stacks:
                known[inner] = stacks[outer]
            elif (outer, sliced) in given:
                known[inner] = given[outer, sliced]
            elif not sliced:
                known[inner] = outer
        found: dict[Var, Var] = {}
        for eqn in second.body.eqns:
            if not all(var in known for var in variables(eqn.invars)):
                continue
            if numbers.name_of_nothing(eqn, known):
                continue
            if numbers.name_again(eqn, known) or outside.name_again(eqn, known):
                results = (v for v in eqn.outvars if not isinstance(v, DropVar))
                found.update((v, same) for v in results if isinstance(same := known[v], Var))
        return found

    def _inputs(self, loop: LoopPhase) -> list[tuple[Var, Atom, bool]]:
        """What a body is given that it does not carry: the value outside, and whether a slice."""
        kinds = (loop.consts, False), (loop.slices, True)
        return [
            (inner, read_atom(self.outside.names, outer), sliced)
            for pairs, sliced in kinds
            for inner, outer in pairs.items()
        ]

    def rewritten(self, read: Collection[Var]) -> tuple[JaxprEqn, JaxprEqn]:
        """Both scans; the forward one stacks what the backward one need not compute again.

        Args:
          read: what others than the backward scan read of the forward scan.
        """
        first, second = self._loops
        left = [eqn for eqn in second.body.eqns if self._found.keys().isdisjoint(eqn.outvars)]
        leaving = [item.result for item in second.accumulators]
        leaving += [atom for atom, _ in second.stacks]
        happening = [atom for eqn in left if eqn.effects for atom in eqn.invars]
        alive = made_from(left, [*leaving, *happening])
        left = [eqn for number, eqn in enumerate(left) if number in alive or eqn.effects]
        reads = dict.fromkeys(v for eqn in left for v in variables(eqn.invars))
        reads |= dict.fromkeys(variables(leaving))
        consts, slices = (
            [pair for pair in pairs.items() if pair[0] in reads]
            for pairs in (second.consts, second.slices)
        )
        stack_of = {atom: outer for atom, outer in first.stacks if isinstance(atom, Var)}
        slice_of = {outer: inner for inner, outer in slices if isinstance(outer, Var)}
        const_of = {outer: inner for inner, outer in consts if isinstance(outer, Var)}
        there: dict[Var, Atom] = {}
        for var in reads:
            if var in self.before:
                outer = self.before[var]
                if outer not in const_of:
                    const_of[outer] = var
                    consts.append((var, outer))
                there[var] = const_of[outer]
            if var in self.again:
                same = self.again[var]
                outer = stack_of.setdefault(same, stacked(same, self.forward.params["length"]))
                if outer not in slice_of:
                    slice_of[outer] = var
                    slices.append((var, outer))
                there[var] = slice_of[outer]
        needed = {*read, *variables(outer for _, outer in (*consts, *slices))}
        needed.update(variables(item.start for item in second.accumulators))
        known = {outer for _, outer in first.stacks}
        pairs = [*first.stacks, *(pair for pair in stack_of.items() if pair[1] not in known)]
        kept = [pair for pair in pairs if pair[1] in needed]
        whole = [*first.consts.items()], first.accumulators, [*first.slices.items()]
        forward = scan_like(self.forward, *whole, kept, first.body.eqns)
        carries = [
            Carried(item.carry, item.start, read_atom(there, item.result), item.total)
            for item in second.accumulators
        ]
        results = [(read_atom(there, atom), outer) for atom, outer in second.stacks]
        eqns = [eqn.replace(invars=[read_atom(there, x) for x in eqn.invars]) for eqn in left]
        return forward, scan_like(self.backward, consts, carries, slices, results, eqns)
