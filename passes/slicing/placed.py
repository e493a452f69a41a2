"""The whole program with the stage of every equation, accumulators split where needed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from jax.extend.core import DropVar, JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom, made_from, makers_of, variables
from autopar.passes.graph.microbatched import Carried
from autopar.passes.graph.primitives import COMBINES
from autopar.passes.slicing.accumulators import Terms, absorbed_by, sum_tree
from autopar.passes.slicing.anatomy import Anatomy, is_small
from autopar.passes.slicing.placement import Placement

MANY_STAGES = 4
"""From so many on, one stage adds up what all of them send: messages grow with their number, not
with its square."""


@dataclass(frozen=True)
class Placed:
    """An equation and its stage; None: it is copied to every stage that reads its results."""

    eqn: JaxprEqn
    stage: int | None
    backward: bool = False


@dataclass(frozen=True)
class Carry(Carried):
    """What one stage accumulates."""

    stage: int


@dataclass(frozen=True)
class PlacedProgram:
    """The whole program, placed; `parts` is what it was before.

    The body's equations are in an order in which they can be evaluated. Of those `outside`, the
    first `num_before` are before the loop. `homes`: stages of large state leaves, by input number.
    """

    parts: Anatomy
    body: tuple[Placed, ...]
    carries: tuple[Carry, ...]
    outside: tuple[Placed, ...]
    num_before: int
    homes: Mapping[int, int]

    @cached_property
    def backward_values(self) -> frozenset[Var]:
        """What the backward pass makes of a microbatch."""
        return frozenset(v for item in self.body if item.backward for v in item.eqn.outvars)

    @cached_property
    def read_for_state(self) -> frozenset[Var]:
        """What new state is made of outside of the loop."""
        eqns, graph = [item.eqn for item in self.outside], self.parts.graph
        pairs = zip(graph.jaxpr.outvars, graph.outputs, strict=True)
        state = [atom for atom, label in pairs if label.alias is not None]
        return frozenset(v for i in made_from(eqns, state) for v in variables(eqns[i].invars))


def build(parts: Anatomy, terms: tuple[Terms, ...], where: Placement) -> PlacedProgram:
    """Put the stages on the equations, and split accumulators and scalar sums by stage."""
    split = _SplitAccumulators(parts, terms, where)
    body, before, carries = split.body(), _before(parts, where), tuple(split.carries)
    after = [Placed(eqn, where.epilogue.get(i)) for i, eqn in enumerate(parts.step.epilogue)]
    after = [*split.totals, *after]
    located = _located(parts, body, carries, [*before, *after])
    after = split_scalar_sums(after, located, set(variables(parts.graph.jaxpr.outvars)))
    outside = (*before, *after)
    return PlacedProgram(parts, tuple(body), carries, outside, len(before), where.homes)


def _before(parts: Anatomy, where: Placement) -> list[Placed]:
    """Equations before the loop: all copied, but an effect happens on one stage."""
    stages = {parts.graph.jaxpr.invars[number]: stage for number, stage in where.homes.items()}
    placed = []
    for eqn in parts.step.prologue:
        known = [stages[v] for v in variables(eqn.invars) if v in stages]
        if known:
            stages.update((var, max(known)) for var in eqn.outvars)
        placed.append(Placed(eqn, max(known, default=0) if eqn.effects else None))
    return placed


class _SplitAccumulators:
    """The accumulators of each stage.

    Attributes:
      carries: the accumulators.
      totals: equations after the loop that add up those which are on several stages.
      instead: by number, equations of the body that go where an accumulator's terms go.
      added: by number, those that follow an equation of the body: they add to a stage's part.
    """

    def __init__(self, parts: Anatomy, terms: tuple[Terms, ...], where: Placement) -> None:
        self.parts, self.where = parts, where
        self.absorbed = absorbed_by(terms)
        self.carries: list[Carry] = []
        self.totals: list[Placed] = []
        self.instead: dict[int, Placed] = {}
        self.added: dict[int, list[Placed]] = defaultdict(list)
        made_by = makers_of(parts.body.eqns)
        for number, item in enumerate(terms):
            carried = item.carried
            if isinstance(carried.total, DropVar):
                continue
            groups: dict[int, list[Atom]] = {}
            for atom, stage in zip(item.terms, where.terms[number], strict=True):
                groups.setdefault(stage, []).append(atom)
            backward = {
                stage: any(made_by.get(var) in parts.backward for var in variables(atoms))
                for stage, atoms in groups.items()
            }
            if len(groups) > 1:
                self._split(item, groups, backward, where.totals[number])
                continue
            stage = next(iter(groups), where.totals[number])
            carry = carried.carry, carried.start, carried.result, carried.total
            self.carries.append(Carry(*carry, stage))
            for index in item.absorbed:
                eqn = parts.body.eqns[index]
                self.instead[index] = Placed(eqn, stage, backward.get(stage, False))

    def body(self) -> list[Placed]:
        """The equations of the body."""
        body = []
        for index, eqn in enumerate(self.parts.body.eqns):
            if index in self.instead:
                body.append(self.instead[index])
            elif index not in self.absorbed:
                stage = self.where.body.get(index)
                body.append(Placed(eqn, stage, index in self.parts.backward))
            body += self.added.get(index, [])
        return body

    def _split(
        self,
        item: Terms,
        groups: Mapping[int, Sequence[Atom]],
        backward: Mapping[int, bool],
        home: int,
    ) -> None:
        """One accumulator for each stage that makes terms, and their sum, which is at `home`."""
        carried, last = item.carried, item.carried.combine[-1]
        aval = carried.carry.aval
        partial: list[Var] = []
        for stage in sorted(groups):
            carry, result, total = (jax_compat.new_var(aval) for _ in range(3))
            eqns = self._adding(item, groups[stage], carry, result)
            self.added[last] += [Placed(eqn, stage, backward[stage]) for eqn in eqns]
            self.carries.append(Carry(carry, carried.start, result, total, stage))
            partial.append(total)
        where = None if is_small(carried.total.aval) else home
        adding = _sum_of(self.parts.body.eqns[last], partial, carried.total)
        self.totals += [Placed(eqn, where) for eqn in adding]

    def _adding(
        self, item: Terms, atoms: Sequence[Atom], carry: Var, result: Var
    ) -> list[JaxprEqn]:
        """Equations that add some of an accumulator's terms to a new one."""
        body = self.parts.body.eqns
        eqns: list[JaxprEqn] = []
        atom = atoms[0]
        if len(atoms) > 1:
            adding = body[item.sums[0]]
            atom = jax_compat.new_var(adding.outvars[0].aval)
            eqns += _sum_of(adding, atoms, atom)
        for index in item.chain:
            passed = jax_compat.new_var(body[index].outvars[0].aval)
            eqns.append(body[index].replace(invars=[atom], outvars=[passed]))
            atom = passed
        combine = body[item.carried.combine[0]]
        return [*eqns, combine.replace(invars=[carry, atom], outvars=[result])]


def _sum_of(adding: JaxprEqn, atoms: Sequence[Atom], result: Var) -> list[JaxprEqn]:
    """Equations like `adding` that add values up, from first to last."""
    eqns = []
    so_far = atoms[0]
    for place, atom in enumerate(atoms[1:], 2):
        out = result if place == len(atoms) else jax_compat.new_var(result.aval)
        eqns.append(adding.replace(invars=[so_far, atom], outvars=[out]))
        so_far = out
    return eqns


def _located(
    parts: Anatomy, body: Sequence[Placed], carries: Sequence[Carry], outside: Sequence[Placed]
) -> dict[Var, set[int]]:
    """For variables outside of the loop, the stages whose values they are computed from.

    State leaves are left out: they are read on assigned stages.
    """
    inside = {var: item.stage for item in body for var in item.eqn.outvars}
    found: dict[Var, set[int]] = {carry.total: {carry.stage} for carry in carries}
    for atom, var in parts.loop.stacks:
        stage = None if isinstance(atom, Literal) else inside.get(atom)
        found[var] = set() if stage is None else {stage}
    for item in outside:
        read = variables(item.eqn.invars)
        copied = {s for v in read for s in found.get(v, ())}
        stages = copied if item.stage is None else {item.stage}
        found.update((var, stages) for var in item.eqn.outvars)
    return found


def split_scalar_sums(
    after: Sequence[Placed], located: Mapping[Var, set[int]], outputs: set[Var]
) -> list[Placed]:
    """Replace copied sums (or the like) of scalars from several stages by one partial per stage.

    Each stage adds up its own scalars and sends one; the sum of those is copied. It is mostly a
    global norm, or whether all gradients are finite. Of many stages the first that has any adds
    them up, whose backward pass ends last, and sends the sum: each of the others receives one
    scalar, and does the same as the others.
    """
    eqns = [item.eqn for item in after]
    uses, made_by = Counter(v for eqn in eqns for v in variables(eqn.invars)), makers_of(eqns)
    sums = {
        place
        for place, item in enumerate(after)
        if item.stage is None
        and item.eqn.primitive.name in COMBINES
        and is_small(item.eqn.outvars[0].aval)
        and all(v.aval.shape == item.eqn.outvars[0].aval.shape for v in item.eqn.invars)
    }

    def inner(atom: Atom, outer: JaxprEqn) -> int | None:
        """The operation that makes an operand which only one other, alike, reads."""
        if isinstance(atom, Literal) or uses[atom] != 1 or atom in outputs:
            return None
        place = made_by.get(atom)
        alike = place in sums and eqns[place].primitive is outer.primitive
        return place if alike else None

    within = {inner(atom, eqns[place]) for place in sums for atom in eqns[place].invars}
    instead: dict[int, list[Placed]] = {}
    for root in sums - within:
        adding = after[root].eqn
        tree, leaves = sum_tree(adding.invars, partial(inner, outer=adding), eqns)
        groups: dict[int, list[Atom]] = {}
        rest: list[Atom] = []
        for atom in leaves:
            stages = set() if isinstance(atom, Literal) else located.get(atom, set())
            (groups.setdefault(min(stages), []) if len(stages) == 1 else rest).append(atom)
        if len(groups) < 2 or all(len(group) == 1 for group in groups.values()):
            continue
        new: list[Placed] = []
        for stage, group in sorted(groups.items()):
            if len(group) > 1:
                total = jax_compat.new_var(adding.outvars[0].aval)
                new += [Placed(eqn, stage) for eqn in _sum_of(adding, group, total)]
                group = [total]
            rest += group
        home = min(groups) if len(groups) >= MANY_STAGES else None
        new += [Placed(eqn, home) for eqn in _sum_of(adding, rest, adding.outvars[0])]
        instead |= {**{place: [] for place in tree}, root: new}
    return [x for place, item in enumerate(after) for x in instead.get(place, [item])]
