"""Backward scans cut in two, so that zero-bubble schedules find weight gradients in them.

The backward pass of `lax.scan` is one scan. What its iterations hand on to each other, such as the
gradient of an activation, other stages wait for; the weight gradients that it makes on the way
nobody waits for. The first scan hands on, and keeps for every iteration what the second one, which
computes the rest, cannot read elsewhere. Both compute the same numbers as the scan that they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom
from autopar.passes.graph.microbatched import Microbatched
from autopar.passes.graph.primitives import ADDS, CASTS, HEAVY
from autopar.passes.graph.scans import ScanParts
from autopar.passes.slicing.anatomy import Anatomy

_SUMS = ADDS | CASTS


def split_backward_scans(parts: Anatomy) -> Microbatched:
    """The program with the loop's backward scans cut in two where weight gradients can wait."""
    awaited = _awaited(parts)
    eqns: list[JaxprEqn] = []
    for index, eqn in enumerate(parts.body.eqns):
        is_scan = index in parts.backward and eqn.primitive.name == "scan" and not eqn.effects
        eqns += _split(eqn, awaited) if is_scan else [eqn]
    if len(eqns) == len(parts.body.eqns):
        return parts.step
    closed = ClosedJaxpr(jax_compat.replace_jaxpr(parts.body, eqns=eqns), ())
    scan = parts.loop.scan
    return parts.step.with_scan(scan.replace(params={**scan.params, "jaxpr": closed}))


def _awaited(parts: Anatomy) -> set[Var]:
    """What a heavy equation of the backward pass is made from."""
    found: set[Var] = set()
    for index in sorted(parts.backward, reverse=True):
        eqn = parts.body.eqns[index]
        if eqn.primitive.name in HEAVY or any(var in found for var in eqn.outvars):
            found.update(_variables(eqn.invars))
    return found


def _variables(atoms: Iterable[Atom]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


@dataclass(frozen=True)
class _ScanPart:
    """A part of a scan's body: numbers of results and of equations."""

    results: frozenset[int]
    eqns: frozenset[int]


def _split(eqn: JaxprEqn, awaited: set[Var]) -> list[JaxprEqn]:
    scan = ScanParts.of(eqn)
    body = scan.body
    _, carries, _ = scan.operands(body.invars)
    if body.constvars or eqn.params["jaxpr"].consts:
        return [eqn]
    handed_on = {place for place, var in enumerate(carries) if not _is_sum(body, var, place)}
    asked = {place for place, var in enumerate(eqn.outvars) if var in awaited}
    first = _closure(body, carries, handed_on | asked)
    others = {
        place
        for place, var in enumerate(eqn.outvars)
        if place not in first.results and not isinstance(var, DropVar)
    }
    if not first.results or not others:
        return [eqn]
    second = _closure(body, carries, others)
    later = second.eqns - first.eqns
    if not any(body.eqns[index].primitive.name in HEAVY for index in later):
        return [eqn]
    results = frozenset(others | (second.results - first.results))
    again, kept = _again(body, first, results, later, carries)
    made = [jax_compat.new_var(_stacked(var, eqn.params["length"])) for var in kept]
    return [
        _scan(eqn, first.results, sorted(first.eqns), (), kept, made),
        _scan(eqn, results, sorted(later | again), tuple(zip(kept, made, strict=True)), (), ()),
    ]


def _is_sum(body: Jaxpr, carry: Var, place: int) -> bool:
    """Whether what is carried is only added to: nothing else depends on what it was."""
    reached: set[Atom] = {carry}
    for eqn in body.eqns:
        if any(var in reached for var in _variables(eqn.invars)):
            if eqn.primitive.name not in _SUMS:
                return False
            reached.update(eqn.outvars)
    return not any(
        var in reached and number != place
        for number, var in enumerate(body.outvars)
        if not isinstance(var, Literal)
    )


def _closure(body: Jaxpr, carries: Sequence[Var], results: set[int]) -> _ScanPart:
    """The equations that results are made from, and all results that they hand on for that."""
    made_by = {var: index for index, eqn in enumerate(body.eqns) for var in eqn.outvars}
    place_of = {var: place for place, var in enumerate(carries)}
    found, eqns = set(results), set[int]()
    stack = [body.outvars[place] for place in results]
    while stack:
        atom = stack.pop()
        if isinstance(atom, Literal):
            continue
        if atom in place_of and place_of[atom] not in found:
            found.add(place_of[atom])
            stack.append(body.outvars[place_of[atom]])
        index = made_by.get(atom)
        if index is not None and index not in eqns:
            eqns.add(index)
            stack += body.eqns[index].invars
    return _ScanPart(frozenset(found), frozenset(eqns))


def _again(
    body: Jaxpr,
    first: _ScanPart,
    results: frozenset[int],
    later: frozenset[int],
    carries: Sequence[Var],
) -> tuple[frozenset[int], list[Var]]:
    """What the second part computes once more because it is cheap, and what is kept for it."""
    hidden = {var for place, var in enumerate(carries) if place in first.results}
    cheap: set[int] = set()
    for index in sorted(first.eqns):
        eqn = body.eqns[index]
        if eqn.primitive.name in HEAVY or any(v in hidden for v in _variables(eqn.invars)):
            hidden.update(eqn.outvars)
        else:
            cheap.add(index)
    made_by = {var: index for index in cheap for var in body.eqns[index].outvars}
    again: set[int] = set()
    kept: dict[Var, None] = {}
    stack = [v for index in later for v in _variables(body.eqns[index].invars)]
    stack += _variables(body.outvars[place] for place in results)
    while stack:
        var = stack.pop()
        if var in hidden:
            kept[var] = None
        elif var in made_by and made_by[var] not in again:
            again.add(made_by[var])
            stack += _variables(body.eqns[made_by[var]].invars)
    order = [*carries, *(var for eqn in body.eqns for var in eqn.outvars)]
    return frozenset(again), [var for var in order if var in kept]


def _stacked(var: Var, length: int) -> object:
    aval = var.aval
    weak = bool(getattr(aval, "weak_type", False))
    return jax_compat.array_type((length, *aval.shape), aval.dtype, weak)


def _scan(
    eqn: JaxprEqn,
    results: frozenset[int],
    indices: Sequence[int],
    given: Sequence[tuple[Var, Var]],
    kept: Sequence[Var],
    made: Sequence[Var],
) -> JaxprEqn:
    """A scan that computes a part.

    Args:
      eqn: the scan.
      results: numbers of its results that this one gives.
      indices: of the equations that it has.
      given: variables of the body that are slices here, each with the stacked value.
      kept: variables of the body that are stacked as further results.
      made: for each of them the variable outside.
    """
    scan = ScanParts.of(eqn)
    body = scan.body
    consts, carries, slices = scan.operands(range(len(body.invars)))
    needed = set(_variables(v for index in indices for v in body.eqns[index].invars))
    needed |= {*_variables(body.outvars[place] for place in results), *kept}
    needed -= {var for var, _ in given}
    places = [
        *(place for place in consts if body.invars[place] in needed),
        *(place for number, place in enumerate(carries) if number in results),
        *(place for place in slices if body.invars[place] in needed),
    ]
    # Every scan has variables of its own.
    renamed: dict[Atom, Var] = {}

    def new(var: Var) -> Var:
        if isinstance(var, DropVar):
            return var
        renamed[var] = jax_compat.new_var(var.aval)
        return renamed[var]

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else renamed[atom]

    invars = [*(new(body.invars[place]) for place in places), *(new(var) for var, _ in given)]
    eqns = [
        body.eqns[index].replace(
            invars=[read(v) for v in body.eqns[index].invars],
            outvars=[new(v) for v in body.eqns[index].outvars],
        )
        for index in indices
    ]
    wanted = sorted(results)
    outvars = [read(v) for v in (*(body.outvars[place] for place in wanted), *kept)]
    closed = ClosedJaxpr(
        jax_compat.replace_jaxpr(body, invars=invars, outvars=outvars, eqns=eqns), ()
    )
    params = jax_compat.scan_params(
        eqn.params,
        closed,
        sum(place in consts for place in places),
        sum(place < scan.num_carry for place in wanted),
    )
    return eqn.replace(
        invars=[*(eqn.invars[place] for place in places), *(outer for _, outer in given)],
        outvars=[*(eqn.outvars[place] for place in wanted), *made],
        params=params,
    )
