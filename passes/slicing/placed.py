"""The whole program with the stage of every equation, accumulators split where needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import DropVar, JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom
from autopar.passes.graph.primitives import COMBINES
from autopar.passes.slicing.accumulators import Terms, absorbed_by
from autopar.passes.slicing.anatomy import Anatomy, holds, is_small
from autopar.passes.slicing.placement import Placement


@dataclass(frozen=True)
class Placed:
    """An equation and its stage; None: it is copied to every stage that reads its results."""

    eqn: JaxprEqn
    stage: int | None
    backward: bool = False


@dataclass(frozen=True)
class Carry:
    """An accumulator of one stage: an `Accumulator`, but of one stage alone."""

    stage: int
    carry: Var
    start: Atom
    result: Atom
    total: Var


@dataclass(frozen=True)
class PlacedProgram:
    """The whole program, placed.

    Args:
      parts: what it was before.
      body: the equations of the loop's body, in an order in which they can be evaluated.
      carries: the accumulators.
      outside: the equations before the loop, then those behind it.
      num_before: how many of `outside` are before the loop.
      homes: stages of the large state leaves, by input number.
    """

    parts: Anatomy
    body: tuple[Placed, ...]
    carries: tuple[Carry, ...]
    outside: tuple[Placed, ...]
    num_before: int
    homes: Mapping[int, int]


def build(parts: Anatomy, terms: tuple[Terms, ...], where: Placement) -> PlacedProgram:
    """Put the stages on the equations, and split accumulators and scalar sums by stage."""
    body, carries, totals = _body(parts, terms, where)
    before = _before(parts, where)
    behind = [
        *totals,
        *(Placed(eqn, where.epilogue.get(place)) for place, eqn in enumerate(parts.step.epilogue)),
    ]
    located = _located(parts, body, carries, (*before, *behind))
    behind = split_scalar_sums(behind, located, _outputs(parts))
    return PlacedProgram(
        parts, tuple(body), tuple(carries), (*before, *behind), len(before), where.homes
    )


def _outputs(parts: Anatomy) -> set[Var]:
    return {v for v in parts.graph.jaxpr.outvars if not isinstance(v, Literal)}


def _before(parts: Anatomy, where: Placement) -> list[Placed]:
    """Equations before the loop: all copied, but an effect happens on one stage."""
    homes = {parts.graph.jaxpr.invars[number]: stage for number, stage in where.homes.items()}
    stages: dict[Var, int] = dict(homes)
    placed = []
    for eqn in parts.step.prologue:
        known = [stages[v] for v in eqn.invars if not isinstance(v, Literal) and v in stages]
        if known:
            stages.update((var, max(known)) for var in eqn.outvars)
        placed.append(Placed(eqn, max(known, default=0) if eqn.effects else None))
    return placed


def _body(
    parts: Anatomy, terms: tuple[Terms, ...], where: Placement
) -> tuple[list[Placed], list[Carry], list[Placed]]:
    """The body's equations, the accumulators, and the equations that add split ones up."""
    made_by = {var: i for i, eqn in enumerate(parts.body.eqns) for var in eqn.outvars}
    absorbed = absorbed_by(terms)
    instead: dict[int, Placed] = {}
    added: dict[int, list[Placed]] = {}
    carries: list[Carry] = []
    totals: list[Placed] = []
    for number, item in enumerate(terms):
        carried = item.carried
        if isinstance(carried.total, DropVar):
            continue
        groups: dict[int, list[Atom]] = {}
        for atom, stage in zip(item.terms, where.terms[number], strict=True):
            groups.setdefault(stage, []).append(atom)
        backward = {
            stage: any(
                not isinstance(a, Literal) and made_by.get(a) in parts.backward for a in atoms
            )
            for stage, atoms in groups.items()
        }
        if len(groups) <= 1:
            stage = next(iter(groups), where.totals[number])
            for index in item.absorbed:
                instead[index] = Placed(parts.body.eqns[index], stage, backward.get(stage, False))
            carries.append(
                Carry(stage, carried.carry, carried.start, carried.result, carried.total)
            )
            continue
        last = item.carried.combine[-1]
        partial: list[Var] = []
        for stage in sorted(groups):
            made = _accumulate(parts, item, groups[stage])
            added.setdefault(last, []).extend(
                Placed(eqn, stage, backward[stage]) for eqn in made.eqns
            )
            total = jax_compat.new_var(carried.total.aval)
            partial.append(total)
            carries.append(Carry(stage, made.carry, carried.start, made.result, total))
        small = is_small(carried.total.aval)
        combine = parts.body.eqns[last]
        totals += [
            Placed(eqn, None if small else where.totals[number])
            for eqn in _sum_of(combine, partial, carried.total)
        ]
    body = []
    for index, eqn in enumerate(parts.body.eqns):
        if index in instead:
            body.append(instead[index])
        elif index not in absorbed:
            body.append(Placed(eqn, where.body.get(index), index in parts.backward))
        body += added.get(index, [])
    return body, carries, totals


@dataclass(frozen=True)
class _Accumulated:
    eqns: list[JaxprEqn]
    carry: Var
    result: Var


def _accumulate(parts: Anatomy, item: Terms, atoms: Sequence[Atom]) -> _Accumulated:
    """Equations that add some of an accumulator's terms to a new accumulator."""
    eqns: list[JaxprEqn] = []
    atom = atoms[0]
    if len(atoms) > 1:
        adding = parts.body.eqns[item.sums[0]]
        atom = jax_compat.new_var(adding.outvars[0].aval)
        eqns += _sum_of(adding, atoms, atom)
    for index in item.chain:
        eqn = parts.body.eqns[index]
        passed = jax_compat.new_var(eqn.outvars[0].aval)
        eqns.append(eqn.replace(invars=[atom], outvars=[passed]))
        atom = passed
    carried = item.carried
    carry = jax_compat.new_var(carried.carry.aval)
    result = jax_compat.new_var(carried.carry.aval)
    combine = parts.body.eqns[carried.combine[0]]
    eqns.append(combine.replace(invars=[carry, atom], outvars=[result]))
    return _Accumulated(eqns, carry, result)


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
) -> dict[Var, frozenset[int]]:
    """For variables outside of the loop, the stages whose values they are computed from."""
    found: dict[Var, frozenset[int]] = {}
    for var, label in zip(parts.graph.jaxpr.invars, parts.graph.inputs, strict=True):
        if holds(label, var.aval):
            found[var] = frozenset()  # replaced below: held leaves are read on assigned stages
    inside = {var: item.stage for item in body for var in item.eqn.outvars}
    for atom, var in parts.loop.stacks:
        stage = None if isinstance(atom, Literal) else inside.get(atom)
        found[var] = frozenset(() if stage is None else (stage,))
    found.update((carry.total, frozenset((carry.stage,))) for carry in carries)
    for item in outside:
        if item.stage is not None:
            stages = frozenset((item.stage,))
        else:
            stages = frozenset().union(
                *(found.get(v, frozenset()) for v in item.eqn.invars if not isinstance(v, Literal))
            )
        found.update((var, stages) for var in item.eqn.outvars)
    return found


def split_scalar_sums(
    behind: Sequence[Placed], located: Mapping[Var, frozenset[int]], outputs: set[Var]
) -> list[Placed]:
    """Replace copied sums (or the like) of scalars from several stages by one partial per stage.

    Each stage adds up its own scalars and sends one; the sum of those is copied. It is mostly a
    global norm, or whether all gradients are finite.
    """
    uses = Counter(v for item in behind for v in item.eqn.invars if not isinstance(v, Literal))
    made_by = {var: place for place, item in enumerate(behind) for var in item.eqn.outvars}

    def adds(place: int | None) -> bool:
        if place is None:
            return False
        eqn = behind[place].eqn
        return (
            behind[place].stage is None
            and eqn.primitive.name in COMBINES
            and is_small(eqn.outvars[0].aval)
            and all(v.aval.shape == eqn.outvars[0].aval.shape for v in eqn.invars)
        )

    def inner(atom: Atom, outer: JaxprEqn) -> int | None:
        """The operation that makes an operand which only one other, alike, reads."""
        if isinstance(atom, Literal) or uses[atom] != 1 or atom in outputs:
            return None
        place = made_by.get(atom)
        alike = place is not None and behind[place].eqn.primitive is outer.primitive
        return place if alike and adds(place) else None

    within = {
        place
        for other, item in enumerate(behind)
        if adds(other)
        for atom in item.eqn.invars
        if (place := inner(atom, item.eqn)) is not None
    }
    instead: dict[int, list[Placed]] = {}
    dropped: set[int] = set()
    for root in range(len(behind)):
        if not adds(root) or root in within:
            continue
        tree: list[int] = []
        leaves: list[Atom] = []
        stack: list[Atom] = [behind[root].eqn.outvars[0]]
        while stack:
            atom = stack.pop()
            place = root if not tree else inner(atom, behind[root].eqn)
            if place is None:
                leaves.append(atom)
            else:
                tree.append(place)
                stack += reversed(behind[place].eqn.invars)
        groups: dict[int, list[Atom]] = {}
        rest: list[Atom] = []
        for atom in leaves:
            stages = frozenset() if isinstance(atom, Literal) else located.get(atom, frozenset())
            if len(stages) == 1:
                groups.setdefault(next(iter(stages)), []).append(atom)
            else:
                rest.append(atom)
        if len(groups) < 2 or all(len(group) == 1 for group in groups.values()):
            continue
        adding = behind[root].eqn
        new: list[Placed] = []
        for stage in sorted(groups):
            if len(groups[stage]) == 1:
                rest += groups[stage]
                continue
            partial = jax_compat.new_var(adding.outvars[0].aval)
            new += [Placed(eqn, stage) for eqn in _sum_of(adding, groups[stage], partial)]
            rest.append(partial)
        new += [Placed(eqn, None) for eqn in _sum_of(adding, rest, adding.outvars[0])]
        instead[root] = new
        dropped.update(tree)
    result = []
    for place, item in enumerate(behind):
        if place in instead:
            result += instead[place]
        elif place not in dropped:
            result.append(item)
    return result
